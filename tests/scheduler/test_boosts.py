"""Timed boosts: in force by the time of day, without anything being written."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import DatabaseError, connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import Boost, User
from scheduler import serving
from scheduler.configuration.applying import apply_text
from scheduler.configuration.document import Invalid
from scheduler.snapshot import load_snapshot
from tests.factories import make_boost, make_group, make_user
from tests.running import RunningRouter, until


@pytest.fixture
def ada() -> User:
    return make_user("ada", group=make_group("physics", scheduler_weight=3))


def weight_of(user: User, at: float) -> float:
    return load_snapshot().at(at).users[user.pk].weight


@pytest.mark.django_db
def test_a_loaded_boost_comes_and_goes_with_the_time_alone(ada):
    now = timezone.now()
    make_boost(
        group=ada.group,
        factor=2,
        starts_at=now + timedelta(hours=1),
        ends_at=now + timedelta(hours=2),
    )
    snapshot = load_snapshot()
    start = now.timestamp()
    weights = [snapshot.at(start + hours * 3600).users[ada.pk].weight for hours in (0, 1.5, 2.5)]
    assert weights == [3.0, 6.0, 3.0]
    # As after the clock was set back.
    assert snapshot.at(start + 9000).at(start + 5400).users[ada.pk].weight == 6.0


@pytest.mark.django_db
def test_nothing_is_made_anew_while_no_boost_begins_or_ends(ada):
    make_boost(group=ada.group)
    snapshot = load_snapshot()
    assert snapshot.at(time.time()) is snapshot
    assert snapshot.version == load_snapshot().version


@pytest.mark.django_db
def test_boosts_long_over_are_not_loaded_and_those_just_over_are(ada):
    now = timezone.now()
    for days in (2, 0.5):
        end = now - timedelta(days=days)
        make_boost(name=f"{days}", user=ada, starts_at=end - timedelta(hours=1), ends_at=end)
    assert [one.name for one in load_snapshot().boosts] == ["0.5"]


@pytest.mark.django_db
def test_loading_takes_as_many_queries_however_many_boosts(ada, django_assert_num_queries):
    with CaptureQueriesContext(connection) as few:
        load_snapshot()
    for _ in range(20):
        make_boost(user=ada)
    with django_assert_num_queries(len(few)):
        load_snapshot()


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"factor": -1}, "factor"),
        ({"factor": "1000000000.1"}, "factor"),
        ({"ends_at": timezone.now() - timedelta(days=1)}, "ends_at"),
        ({"user": None}, "group"),
    ],
)
def test_what_makes_no_sense_is_refused(ada, fields, wrong):
    values = {"name": "b", "user": ada, "factor": 2, "ends_at": timezone.now() + timedelta(days=1)}
    with pytest.raises(ValidationError) as refused:
        Boost(**(values | fields)).full_clean()
    assert wrong in refused.value.message_dict


@pytest.mark.django_db
def test_both_a_group_and_a_user_are_refused(ada):
    with pytest.raises(ValidationError, match="either a group or one user"):
        Boost(
            name="b", user=ada, group=ada.group, factor=2, ends_at=timezone.now() + timedelta(1)
        ).full_clean()


@pytest.mark.django_db
def test_ending_early_keeps_what_has_been_and_takes_away_what_has_not_begun(ada):
    now = timezone.now()
    running = make_boost(user=ada, starts_at=now - timedelta(hours=1), ends_at=now + timedelta(1))
    coming = make_boost(user=ada, starts_at=now + timedelta(hours=1))
    over = make_boost(
        user=ada, starts_at=now - timedelta(hours=3), ends_at=now - timedelta(hours=2)
    )
    for one in (running, coming, over):
        one.end(now, "ended early")
    assert list(Boost.objects.order_by("ends_at").values_list("ends_at", flat=True)) == [
        now - timedelta(hours=2),
        now,
    ]
    reasons = [row.history_change_reason for row in Boost.history.all()]
    assert reasons.count("ended early") == 2
    assert weight_of(ada, time.time()) == 3.0


@pytest.mark.django_db
def test_apply_makes_changes_and_takes_away_boosts():
    text = """
groups: [{name: physics, scheduler_weight: 3}]
boosts:
- {name: class project, group: physics, factor: 2, starts_at: 2026-01-01, ends_at: 2040-01-01,
   reason: "until Friday"}
"""
    assert apply_text(text).lines == ["+ group physics", "+ boost class project"]
    assert apply_text(text).lines == []
    assert Boost.objects.get().factor == 2
    changed = apply_text("boosts: [{name: class project, factor: 3}]")
    assert changed.lines == ["~ boost class project: factor 2 → 3"]
    gone = apply_text("boosts: [{name: class project, absent: true}]")
    assert gone.lines == ["- boost class project"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("entry", "path"),
    [
        ("{name: b, group: physics, factor: 2}", "boosts[0].ends_at"),
        ("{name: b, factor: 2, ends_at: 2040-01-01}", "boosts[0].group"),
        ("{name: b, group: physics, factor: -2, ends_at: 2040-01-01}", "boosts[0].factor"),
        ("{name: b, user: nobody, factor: 2, ends_at: 2040-01-01}", "boosts[0].user"),
        ("{name: b, group: physics, factor: 2, ends_at: 2000-01-01}", "boosts[0].ends_at"),
    ],
)
def test_apply_refuses_wrong_boosts_with_their_place(entry, path):
    with pytest.raises(Invalid) as refused:
        apply_text(f"groups: [{{name: physics}}]\nboosts: [{entry}]")
    assert [line.split(": ")[0] for line in refused.value.errors] == [path]
    assert not Boost.objects.exists()


# ---- in the running router


def boost_for(seconds: float, **fields: Any) -> Boost:
    user = User.objects.get(username="ada")
    now = timezone.now()
    return make_boost(user=user, starts_at=now, ends_at=now + timedelta(seconds=seconds), **fields)


@pytest.mark.django_db(transaction=True)
async def test_a_boost_begins_and_ends_by_itself_also_without_a_database(
    router: RunningRouter, backend: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await router.change(boost_for, 2.0, factor=2)

    def away(known_version: int) -> None:
        raise DatabaseError("gone")

    monkeypatch.setattr(serving, "_load_changes", away)
    assert (await router.chat()).status_code == 200
    assert router.runtime.snapshot.boosts_in_force != ()
    await until(lambda: router.runtime.snapshot.boosts_in_force == (), within=60)
    assert (await router.chat()).status_code == 200
    records = await router.records()
    assert [record.user_weight for record in records] == [2.0, 1.0]


@pytest.mark.django_db(transaction=True)
async def test_the_weight_in_force_is_what_statistics_show(
    router: RunningRouter, backend: int
) -> None:
    await router.user("bob", weight=1)
    await router.change(boost_for, 3600, factor=3)
    shares = {spec.username: spec.weight for spec in router.runtime.snapshot.users.values()}
    assert shares == {"ada": 3.0, "bob": 1.0}
    assert (await router.chat()).status_code == 200
    view = await asyncio.to_thread(router.runtime.view)
    assert [share.weight for share in view.stats.users] == [3.0]
