"""What groups were entitled to over time: samples into minutes and hours."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from accounts.models import Group
from scheduler.metering import MINUTES_KEPT, Meter
from scheduler.models import ClusterMinute, ShareHour, ShareMinute
from scheduler.serving import LiveView
from tests.factories import make_group, make_user
from tests.pages.live import Cluster

pytestmark = pytest.mark.django_db

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp()


@pytest.fixture
def cluster() -> Cluster:
    """Two slots; bea and cem of staff (weight 3), ada of students (weight 1), faculty idle."""
    Group.objects.all().delete()
    staff, student = make_group("staff", scheduler_weight=3), make_group("student")
    make_group("faculty", scheduler_weight=4)
    people = {name: make_user(name, group=staff) for name in ("bea", "cem")}
    people["ada"] = make_user("ada", group=student)
    cluster = Cluster(slots=2, share_mode="user")
    cluster.people = people  # type: ignore[attr-defined]
    return cluster


def at(view: LiveView, seconds: float) -> LiveView:
    return replace(view, taken_at=NOON + seconds)


def hours() -> dict[tuple[str, int], tuple[float, float]]:
    return {
        (row.group, row.user_id): (round(row.entitled, 6), round(row.nominal, 6))
        for row in ShareHour.objects.all()
    }


def test_a_minute_is_stored_as_the_mean_of_its_samples(cluster: Any) -> None:
    meter = Meter()
    meter.sample(at(cluster.view(), 0))  # nobody has work
    cluster.ask(cluster.people["ada"], 4)
    meter.sample(at(cluster.view(), 30))
    assert ShareMinute.objects.count() == 0  # the minute is not over
    meter.sample(at(cluster.view(), 60))
    (row,) = ShareMinute.objects.all()
    assert (row.at, row.group) == (datetime(2026, 6, 1, 12, tzinfo=UTC), "student")
    assert (row.entitled, row.queued, row.running) == (0.5, 1.0, 1.0)
    whole = ClusterMinute.objects.get()
    assert (whole.queued, whole.running) == (1.0, 1.0)


def test_an_hour_adds_up_what_groups_and_their_users_were_entitled_to(cluster: Any) -> None:
    people, meter = cluster.people, Meter()
    cluster.ask(people["ada"])
    meter.sample(at(cluster.view(), 0))
    cluster.ask(people["bea"])
    meter.sample(at(cluster.view(), 20))
    cluster.ask(people["cem"])
    meter.sample(at(cluster.view(), 60))
    meter.sample(at(cluster.view(), 120))
    # Ada alone; ada 1 to bea 3; ada 1 to bea 3 and cem 3. The weights of all are 3, 1 and 4.
    ada, bea, cem = (people[name].pk for name in ("ada", "bea", "cem"))
    assert hours() == {
        ("student", 0): (round(1 + 1 / 4 + 1 / 7, 6), 0.375),
        ("student", ada): (round(1 + 1 / 4 + 1 / 7, 6), 0.0),
        ("staff", 0): (round(3 / 4 + 6 / 7, 6), 1.125),
        ("staff", bea): (round(3 / 4 + 3 / 7, 6), 0.0),
        ("staff", cem): (round(3 / 7, 6), 0.0),
        ("faculty", 0): (0.0, 1.5),
    }


def test_moments_without_any_work_entitle_nobody(cluster: Any) -> None:
    meter = Meter()
    for second in (0, 60, 120):
        meter.sample(at(cluster.view(), second))
    assert hours() == {}
    assert ShareMinute.objects.count() == 0


def test_minutes_are_forgotten_in_time_and_hours_are_not(cluster: Any) -> None:
    meter = Meter()
    cluster.ask(cluster.people["ada"])
    later = MINUTES_KEPT.total_seconds() + 60
    for second in (0, 60, later, later + 60):
        meter.sample(at(cluster.view(), second))
    assert ShareMinute.objects.count() == 2 == ClusterMinute.objects.count()
    assert ShareHour.objects.filter(group="student", user_id=0).count() == 2


def test_a_scheduler_that_starts_again_within_a_minute_keeps_what_is_there(cluster: Any) -> None:
    cluster.ask(cluster.people["ada"])
    for _ in range(2):
        meter = Meter()
        meter.sample(at(cluster.view(), 0))
        meter.sample(at(cluster.view(), 60))
    assert ShareMinute.objects.count() == 1
    assert hours()["student", 0][0] == 2.0
