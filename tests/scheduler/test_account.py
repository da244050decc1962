"""What a user is told of the own share, waits and clients."""

from __future__ import annotations

import ast
import json
import shlex
from datetime import timedelta

import pytest
from django.utils import timezone

from accounts.models import Group, User
from scheduler import account
from scheduler.account import LimitLeft, Standing, share_among, standing_of, summary
from scheduler.core.views import ShareView
from scheduler.explain_share import sentences
from scheduler.models import SiteSettings
from scheduler.snapshot import load_snapshot
from scheduler.snippets import snippets
from tests.factories import (
    make_api_key,
    make_backend,
    make_boost,
    make_decision,
    make_group,
    make_quota,
    make_user,
)
from tests.pages.live import Cluster
from tests.running import RunningRouter


def share(user_id: int, weight: float, group: str = "g") -> ShareView:
    return ShareView(
        user_id=user_id,
        unit=user_id,
        group=group,
        weight=weight,
        deficit=0.0,
        burst_credits=0.0,
        factor=1.0,
        recent_tokens=0.0,
        queued=1,
        running=0,
        charged_tokens=0.0,
    )


def test_who_is_busy_gets_the_own_part_of_the_weights():
    assert share_among([share(1, 3.0), share(2, 1.0)], 1, 3.0, "g", None) == 0.75


def test_who_is_idle_sees_what_coming_now_would_give():
    assert share_among([share(2, 1.0), share(3, 2.0)], 1, 3.0, "g", None) == 0.5
    assert share_among([], 1, 3.0, "g", None) == 1.0


def test_in_group_mode_a_newcomer_divides_the_groups_weight_with_its_busy_members():
    busy = [share(2, 1.0, "g"), share(3, 1.0, "g"), share(4, 4.0, "h")]
    # The group weighs 2: three members then share it, beside 4 of the other group.
    assert share_among(busy, 1, 2.0, "g", 2.0) == pytest.approx(2 / 3 / 6)
    assert share_among(busy[2:], 1, 2.0, "g", 2.0) == pytest.approx(2 / 6)


def test_background_users_are_equal_among_themselves():
    assert share_among([share(2, 0.0), share(3, 0.0)], 1, 0.0, "g", None) == pytest.approx(1 / 3)
    assert share_among([share(2, 5.0)], 1, 0.0, "g", None) == 0.0


def told(**fields) -> list[str]:
    values = {
        "weight": 3.0,
        "own_weight": 3.0,
        "source": "the weight of your group physics",
        "group": "physics",
        "boosts": (),
        "by_group": False,
        "is_live": True,
        "share": 0.25,
        "busy_users": 3,
    }
    return sentences(Standing(**(values | fields)))


def test_an_idle_user_is_told_what_a_request_would_get():
    assert told() == [
        "Your weight is 3: the weight of your group physics.",
        "3 other users have requests now; if you sent some, you would get 25\xa0% of the tokens.",
        "You have used nothing lately: you start level with those who wait.",
    ]


def test_debt_credits_and_being_heavy_are_told():
    said = told(
        running=2,
        busy_users=1,
        deficit=-4000.4,
        burst_credits=900,
        factor=0.76,
        recent_share=0.62,
        by_group=True,
    )
    assert said == [
        "Your weight is 3: the weight of your group physics.",
        "1 other user has requests too; by the weights you get 25\xa0% of the tokens.",
        "Your group physics shares its weight among its members who have requests.",
        "Your deficit is −4,000 tokens: you have had more than your part lately, so others who "
        "wait go first until it is even.",
        "You have 900 tokens of burst credit, which everybody gets while the cluster is idle; they "
        "count like tokens owed to you.",
        "You used 62\xa0% of all recent tokens: as a heavy user your priority is multiplied by "
        "0.76 until that falls.",
    ]


def test_a_boosted_weight_and_a_weight_of_0_are_told():
    assert told(weight=6.0)[0] == (
        "Your weight is 6, of which 3 is the weight of your group physics and the rest a boost."
    )
    assert told(weight=0.0)[0].startswith("Your weight is 0 (the weight of your group physics):")
    assert told(busy_users=0, share=1.0)[1] == (
        "Nobody else has requests now: everything that is free is yours."
    )


# ---- from the database and the scheduler


@pytest.fixture
def ada() -> User:
    Group.objects.all().delete()
    return make_user("ada", group=make_group("physics", scheduler_weight=3))


@pytest.mark.django_db
def test_the_standing_is_the_running_schedulers(ada):
    bob = make_user("bob", group=make_group("student", scheduler_weight=1))
    make_boost(group=ada.group, factor=3)
    cluster = Cluster(slots=2)
    cluster.ask(ada, jobs=3)
    cluster.ask(bob)
    found = standing_of(ada, cluster.view(), load_snapshot())
    assert found is not None
    assert (found.weight, found.own_weight, found.share) == (9.0, 3.0, 0.9)
    assert (found.queued + found.running, found.busy_users) == (3, 1)
    assert [one.factor for one in found.boosts] == [3.0]


@pytest.mark.django_db
def test_in_group_mode_the_standing_says_so(ada):
    SiteSettings.objects.create(pk=1, share_mode="group")
    found = standing_of(ada, None, load_snapshot())
    assert found is not None
    assert (found.by_group, found.is_live, found.share) == (True, False, None)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("weight", "override", "group", "source"),
    [
        (3, 5, True, "a weight of your own"),
        (3, None, True, "the weight of your group physics"),
        (None, None, True, "the site's default, as your group physics has no weight"),
        (3, None, False, "you have no group, so the site's default counts"),
    ],
)
def test_where_a_weight_comes_from_is_said(ada, weight, override, group, source):
    Group.objects.update(scheduler_weight=weight)
    make_quota(ada, weight_override=override)
    ada.group = Group.objects.get() if group else None
    ada.save()
    found = standing_of(ada, None, load_snapshot())
    assert found is not None
    assert found.source == source


@pytest.mark.django_db
def test_without_a_scheduler_limits_are_shown_as_they_are_set(ada):
    Group.objects.update(max_concurrent=2, token_budget=5000, budget_period="week", max_wait=0.5)
    ada.group.refresh_from_db()
    make_quota(ada, max_concurrent=4)
    make_api_key(ada, name="laptop", requests_per_minute=7)
    make_api_key(make_user("bob"), name="theirs", requests_per_minute=9)
    limits = account.limits_of(ada, load_snapshot())
    assert {(one.name, one.limit, one.whose, one.used) for one in limits} == {
        ("requests at once, waiting or running", 4, "yours", None),
        ("tokens per week", 5000, "yours", None),
        ("requests per minute", 7, "key laptop", None),
        ("seconds in the queue", 0.5, "each request", None),
    }


@pytest.mark.django_db(transaction=True)
async def test_with_one_they_say_what_is_left(router: RunningRouter, backend: int) -> None:
    key = await router.user("eve", weight=1, max_concurrent=4, token_budget=10_000)
    assert (await router.chat(key=key)).status_code == 200
    await router.idle()

    def look() -> list[LimitLeft]:
        eve = User.objects.select_related("group").get(username="eve")
        return account.limits_of(eve, account.snapshot())

    limits = {one.name: one for one in await router.ask(look)}
    open_now = limits["requests at once, waiting or running"]
    assert (open_now.limit, open_now.used, open_now.left) == (4, 0, 4)
    budget = limits["tokens per day"]
    assert (budget.used, budget.left) == (10, 9990)  # 7 of the prompt, 3 of the answer
    assert budget.resets_at is not None


def test_waits_are_summed_up_by_cause():
    found = summary(
        [
            (0.0, "none", "a"),
            (2.0, "backends_full", "b"),
            (6.0, "backends_full", "c"),
            (30.0, "others_ahead", "d"),
        ]
    )
    assert (found.requests, found.median_seconds, found.p95_seconds) == (4, 2.0, 30.0)
    assert [(one.why, one.requests, one.total_seconds, one.longest_id) for one in found.causes] == [
        ("others were owed more", 1, 30.0, "d"),
        ("all backends with the model were full", 2, 8.0, "c"),
    ]
    assert summary([]).median_seconds is None


@pytest.mark.django_db
def test_only_own_waits_of_the_last_days_count(ada):
    now = timezone.now()

    def wait(seconds: float, **fields) -> None:
        at = fields.pop("at", now - timedelta(hours=1))
        make_decision(
            user="ada",
            arrived_at=at,
            queued_at=at,
            dispatched_at=at + timedelta(seconds=seconds),
            wait_reason="backends_full",
            **({"user_id": ada.pk} | fields),
        )

    wait(4)
    wait(100, at=now - timedelta(days=8))
    wait(100, user_id=ada.pk + 1)
    assert account.waits_of(ada).longest_seconds == 4.0


@pytest.mark.django_db
def test_models_are_those_that_the_group_may_use(ada):
    make_backend("a", models=("m", "n"))
    make_backend("off", models=("x",), enabled=False)
    assert account.models_of(ada, load_snapshot()) == ["m", "n"]
    Group.objects.update(allowed_models=["n", "x"])
    assert account.models_of(ada, load_snapshot()) == ["n"]


# ---- snippets


@pytest.mark.parametrize("model", ["llama3:70b", "a\"b'c\\d", "ü {x}"])
def test_every_snippet_is_well_formed_and_names_the_site_and_the_model(model):
    found = {one.name: one.text for one in snippets("https://llm.uni.example", model)}
    assert list(found) == ["curl", "OpenAI", "Anthropic", "Ollama", "LangChain", "Open WebUI"]
    for name in ("OpenAI", "Anthropic", "Ollama", "LangChain"):
        values = {n.value for n in ast.walk(ast.parse(found[name])) if isinstance(n, ast.Constant)}
        assert model in values
    (body,) = [word for word in shlex.split(found["curl"]) if word.startswith("{")]
    assert json.loads(body)["model"] == model
    assert "OPENAI_API_BASE_URL=https://llm.uni.example/v1" in shlex.split(found["Open WebUI"])
