"""Each rule of the advice: what it finds, and what it lets pass."""

from __future__ import annotations

import io
import json
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.limits import Holder, LimitSet
from accounts.models import Group, Role
from backends.models import Alias, BackendStatus, ModelStrategy
from scheduler import advice, advising
from scheduler.advice import SeenBackend, SeenBoost, SeenGroup, SeenKey, Site, advise
from scheduler.models import SiteSettings
from tests.factories import (
    make_admin,
    make_api_key,
    make_backend,
    make_boost,
    make_group,
    make_quota,
    make_user,
)

NOW = 1_000_000.0


def site(**fields) -> Site:
    return Site(now=NOW, stale_after=30.0, **fields)


def group(name: str = "physics", **fields) -> SeenGroup:
    values = {"group_id": 1, "weight": 1.0, "has_weight": True, "members": 1}
    return SeenGroup(name=name, **(values | fields))


def backend(name: str = "gpu-1", **fields) -> SeenBackend:
    values = {
        "backend_id": 7,
        "is_open": True,
        "max_concurrent": 4,
        "models": frozenset({"m"}),
        "age_seconds": 1.0,
    }
    return SeenBackend(name=name, **(values | fields))


def found(rule, picture: Site) -> list[tuple[str, str]]:
    return [(one.subject, one.what) for one in rule(picture)]


def test_a_share_below_one_slot():
    groups = [group("a", weight=1.0), group("b", weight=7.0), group("empty", weight=9, members=0)]
    rule = advice.share_below_one_slot
    assert found(rule, site(groups=groups, backends=[backend(max_concurrent=4)])) == [
        ("a", "The share of a is 0.5 of 4 slots.")
    ]
    assert found(rule, site(groups=groups, backends=[backend(max_concurrent=8)])) == []
    background = [group("a", weight=0.0), group("b")]
    assert found(rule, site(groups=background, backends=[backend(max_concurrent=1)])) == []
    assert found(rule, site(groups=groups, backends=[backend(is_open=False)])) == []


def test_a_group_without_members_or_weight():
    groups = [group("full"), group("empty", members=0), group("unset", has_weight=False, weight=2)]
    assert found(advice.unused_group, site(groups=groups)) == [
        ("empty", "empty has no active members.")
    ]
    assert found(advice.group_without_weight, site(groups=groups)) == [
        ("unset", "unset has no weight of its own; 2 applies.")
    ]


def test_users_without_a_group_are_told_of_once():
    names = ["a", "b", "c", "d", "e", "f", "g"]
    assert found(advice.users_without_group, site(ungrouped=names)) == [
        ("users", "Without a group: a, b, c, d, e and 2 more.")
    ]
    assert found(advice.users_without_group, site()) == []


def test_a_boost_of_weight_0():
    boosts = [
        SeenBoost(boost_id=1, name="idle", weight=0.0),
        SeenBoost(boost_id=2, name="b", weight=1.0),
    ]
    assert found(advice.boost_without_effect, site(boosts=boosts)) == [
        ("idle", "The boost idle multiplies a weight of 0.")
    ]


def test_a_backend_without_models():
    backends = [backend("a", models=frozenset()), backend("b"), backend("off", is_open=False)]
    assert found(advice.backend_without_models, site(backends=backends)) == [
        ("a", "a has no models.")
    ]


def test_a_model_on_one_backend_where_there_are_others():
    pair = [backend("a", models=frozenset({"m", "n"})), backend("b", models=frozenset({"n"}))]
    rule = advice.model_on_one_backend
    assert found(rule, site(backends=pair)) == [("m", "Only a has m.")]
    assert found(rule, site(backends=pair[:1])) == []
    tagged = [backend("a", models=frozenset({"x", "x:latest"})), backend("b")]
    assert [one for one, _ in found(rule, site(backends=tagged))] == ["m", "x"]
    closed = [backend("a"), backend("b", models=frozenset({"n"}), is_open=False)]
    assert found(rule, site(backends=closed)) == []


def test_more_slots_than_the_engine_runs():
    rule = advice.more_slots_than_the_engine
    backends = [
        backend("a", engine_slots=2),
        backend("b", engine_slots=4),
        backend("c", engine_slots=None),
    ]
    assert found(rule, site(backends=backends)) == [
        ("a", "a may be sent 4 requests at once and runs 2.")
    ]


def test_a_queue_inside_an_engine_counts_while_it_is_fresh():
    rule = advice.queue_in_the_engine
    backends = [
        backend("a", engine_waiting=3),
        backend("b", engine_waiting=0),
        backend("old", engine_waiting=3, age_seconds=31.0),
        backend("unknown", engine_waiting=3, age_seconds=None),
    ]
    assert found(rule, site(backends=backends)) == [("a", "3 requests wait inside a.")]


def test_stale_telemetry():
    rule = advice.stale_telemetry
    backends = [
        backend("fresh", age_seconds=30.0),
        backend("old", age_seconds=45.2),
        backend("never", age_seconds=None),
        backend("off", age_seconds=None, is_open=False),
    ]
    assert found(rule, site(backends=backends)) == [
        ("old", "old last answered a poll: 45 s ago."),
        ("never", "never last answered a poll: never."),
    ]


def test_aliases_whose_targets_are_not_there():
    aliases = {"dead": (1, ["x", "y"]), "half": (2, ["x", "m"]), "good": (3, ["m"])}
    seen = list(advice.dead_alias(site(aliases=aliases, backends=[backend()])))
    assert [(one.subject, one.weight, one.row) for one in seen] == [
        ("dead", "problem", 1),
        ("half", "hint", 2),
    ]
    assert seen[0].what == "No backend has x, y, which the alias dead names."


def test_a_strategy_of_no_model():
    picture = site(strategies={"m": 1, "gone": 2}, backends=[backend()])
    assert [one for one, _ in found(advice.strategy_of_no_model, picture)] == ["gone"]


def test_an_allowed_model_that_is_not_there():
    groups = [group(allowed_models=["m", "small", "gone"]), group("all"), group("none")]
    picture = site(groups=groups, backends=[backend()], aliases={"small": (1, ["m"])})
    assert found(advice.allowed_model_that_is_not_there, picture) == [
        ("physics", "physics may use gone, which no backend has.")
    ]


def test_keys_that_end_soon():
    day = 86400
    keys = [
        SeenKey(key_id=n, name=f"k{n}", username="ada", expires_at=NOW + left)
        for n, left in enumerate((-1, 3600, 14 * day, 14 * day + 1))
    ]
    assert found(advice.key_about_to_expire, site(keys=keys)) == [
        ("ada/k1", "The key k1 of ada ends in less than a day."),
        ("ada/k2", "The key k2 of ada ends in 14 days."),
    ]


def limited(**limits) -> Site:
    holder = Holder("user", 1)
    return site(
        limits={holder: LimitSet(**limits), Holder("user", 2): LimitSet(**limits)},
        limit_rows={holder: ("user ada", "accounts.quota", 5)},
    )


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({"tokens_per_minute": 10, "token_budget": 14_401}, 1),
        ({"tokens_per_minute": 10, "token_budget": 14_400}, 0),
        ({"tokens_per_minute": 10, "token_budget": 14_401, "budget_period": "week"}, 0),
        ({"tokens_per_minute": 10, "token_budget": 100_801, "budget_period": "week"}, 1),
        ({"tokens_per_minute": 10, "token_budget": 446_401, "budget_period": "month"}, 1),
        ({"token_budget": 14_401}, 0),
        ({"max_queued": 4, "max_concurrent": 4}, 1),
        ({"max_queued": 3, "max_concurrent": 4}, 0),
    ],
)
def test_limits_that_can_never_be_reached(limits, count):
    seen = list(advice.limit_never_reached(limited(**limits)))
    assert [(one.subject, one.kind, one.row) for one in seen] == (
        [("user ada", "accounts.quota", 5)] * count
    )


def test_limits_that_allow_nothing():
    assert found(advice.limit_that_allows_nothing, limited(token_budget=0, max_concurrent=0)) == [
        ("user ada", "Of user ada, max_concurrent, token_budget is 0.")
    ]
    assert found(advice.limit_that_allows_nothing, limited(token_budget=1)) == []
    assert (
        found(
            advice.limit_that_allows_nothing,
            limited(token_budget=0, shadow=frozenset({"token_budget"})),
        )
        == []
    )


def test_open_to_nobody():
    names = frozenset({"guests"})
    assert len(found(advice.open_to_nobody, site(open_to="gone", usernames=names))) == 1
    assert found(advice.open_to_nobody, site(open_to="guests", usernames=names)) == []
    assert found(advice.open_to_nobody, site(usernames=names)) == []


def test_the_gravest_comes_first_and_every_rule_is_asked():
    seen = advise(
        site(
            groups=[group("empty", members=0)], backends=[backend(engine_slots=1)], ungrouped=["a"]
        )
    )
    assert [one.weight for one in seen] == ["problem", "warning", "hint"]
    rules = [
        value
        for value in vars(advice).values()
        if callable(value) and getattr(value, "__annotations__", {}).get("site") == "Site"
    ]
    assert set(advice.RULES) == set(rules) - {advise}


# ---- of a database


@pytest.fixture
def troubled(db) -> None:
    """A site on which many rules find something."""
    Group.objects.all().delete()
    physics = make_group("physics", scheduler_weight=0, allowed_models=["gone"])
    ada = make_user("ada", group=physics)
    make_user("bob")
    make_quota(ada, tokens_per_minute=1, token_budget=9999)
    make_api_key(ada, name="laptop", expires_at=timezone.now() + timedelta(days=2))
    make_boost(group=physics, name="idle")
    one = make_backend("gpu-1", models=("m",), max_concurrent=8)
    BackendStatus.objects.create(
        backend=one, observed_at=timezone.now(), answered_at=timezone.now(), slots=2, waiting=1
    )
    make_backend("gpu-2")
    Alias.objects.create(name="small", targets=["gone"])
    ModelStrategy.objects.create(model_name="gone")
    SiteSettings.objects.create(pk=1, open_to="nobody")
    make_admin("root")


EXPECTED = {
    "allowed_model_that_is_not_there",
    "backend_without_models",
    "boost_without_effect",
    "dead_alias",
    "key_about_to_expire",
    "limit_never_reached",
    "model_on_one_backend",
    "more_slots_than_the_engine",
    "open_to_nobody",
    "queue_in_the_engine",
    "stale_telemetry",
    "strategy_of_no_model",
    "users_without_group",
}


@pytest.mark.usefixtures("troubled")
def test_page_command_and_api_say_the_same(client: Client):
    out = io.StringIO()
    call_command("advise", "--json", stdout=out)
    rows = json.loads(out.getvalue())
    assert {one["rule"] for one in rows} == EXPECTED
    assert next(one["what"] for one in rows if one["rule"] == "users_without_group") == (
        "Without a group: bob."
    )
    text = io.StringIO()
    call_command("advise", stdout=text)
    assert all(one["what"] in text.getvalue() for one in rows)
    client.force_login(make_admin("boss"), "accounts.authentication.RoleBackend")
    assert client.get("/api/admin/advice").json() == rows
    page = client.get("/admin/advice/").content.decode()
    for one in rows:
        assert f'href="{one["url"]}"' in page
        assert client.get(one["url"]).status_code == 200


@pytest.mark.usefixtures("troubled")
def test_looking_takes_as_many_queries_whatever_there_is(django_assert_num_queries):
    with CaptureQueriesContext(connection) as few:
        advising.advice()
    for number in range(20):
        user = make_user(group=make_group())
        make_quota(user, token_budget=1)
        make_api_key(user, expires_at=timezone.now() + timedelta(days=1))
        make_backend(models=(f"m{number}",))
    with django_assert_num_queries(len(few)):
        advising.advice()


@pytest.mark.django_db
def test_a_site_in_order_says_so(client: Client):
    Group.objects.all().delete()
    root = make_admin("root", group=make_group("staff"))
    client.force_login(root, "accounts.authentication.RoleBackend")
    assert "rules found nothing" in client.get("/admin/advice/").content.decode()
    out = io.StringIO()
    call_command("advise", stdout=out)
    assert out.getvalue() == "Nothing to say.\n"


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("fields", "status"), [({"role": Role.OPERATOR}, 200), ({"role": Role.AUDITOR}, 200), ({}, 302)]
)
def test_staff_read_the_advice(client: Client, fields, status):
    client.force_login(make_user("somebody", **fields), "accounts.authentication.RoleBackend")
    assert client.get("/admin/advice/").status_code == status
