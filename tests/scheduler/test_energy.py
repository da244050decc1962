"""Who has taken how much energy: estimates, worked out by hand here."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.test import Client

from backends.models import Backend, BackendSample, GpuSample, Node
from scheduler import energy, spending, usage
from scheduler.models import Decision, EnergyHour, ModelPrice, UsageHour
from scheduler.spool import Record
from scheduler.templatetags import figures
from tests.factories import make_admin, make_backend, make_user

pytestmark = pytest.mark.django_db
HOUR = datetime(2026, 6, 1, 12, tzinfo=UTC)
NOW = HOUR + timedelta(hours=1, minutes=30)


def at(minute: float) -> datetime:
    return HOUR + timedelta(minutes=minute)


@pytest.fixture
def backend() -> Backend:
    """It has the GPUs 0 and 1 of a node of three."""
    node = Node.objects.create(name="gpu-1", telemetry_url="http://gpu-1:8007/gpu-info")
    return make_backend("a", models=("m",), node=node, gpu_indexes=[0, 1])


def power(backend: Backend, minute: float, *watts: float | None) -> None:
    for index, one in enumerate(watts):
        GpuSample.objects.create(
            node_id=backend.node_id or 0,
            node="gpu-1",
            gpu=str(index),
            at=at(minute),
            power_watts=one,
        )


def served(backend: Backend, user_id: int, start: float, end: float, **fields: Any) -> Decision:
    """A request in a slot between two minutes of the hour, and its row of the totals."""
    arrived = at(start)
    hour = arrived.replace(minute=0, second=0, microsecond=0)
    UsageHour.objects.get_or_create(hour=hour, user_id=user_id, group="staff", key_id=0, model="m")
    values: dict[str, Any] = {
        "request_id": f"{user_id}-{start}",
        "user_id": user_id,
        "group": "staff",
        "model_served": "m",
        "outcome": "completed",
        "selected_backend_id": backend.pk,
        "arrived_at": arrived,
        "queued_at": arrived,
        "dispatched_at": arrived,
        "ended_at": at(end),
    }
    return Decision.objects.create(**(values | fields))


def taken() -> dict[int, float]:
    rows = UsageHour.objects.values_list("user_id", "estimated_energy_wh")
    return {user: round(watt_hours, 9) for user, watt_hours in rows}


def test_a_minutes_energy_is_split_by_the_time_in_slots(backend: Backend) -> None:
    power(backend, 5.0, 100, 200, 999)  # the third is not the backend's
    power(backend, 5.5, 140, 200, 999)  # means: 120 and 200 W, 320 W for a minute
    served(backend, 1, 5.0, 6.0)
    served(backend, 2, 5.5, 6.0)
    assert energy.add_up(NOW) == 1
    # 60 s against 30 s: two thirds of 320 W · 1/60 h, and one.
    assert taken() == {1: round(320 / 60 * 2 / 3, 9), 2: round(320 / 60 / 3, 9)}
    [hour] = EnergyHour.objects.all()
    assert hour.measured_wh == pytest.approx((320 + 999) / 60)
    assert hour.attributed_wh == pytest.approx(320 / 60)


def test_idle_minutes_are_nobodys(backend: Backend) -> None:
    for minute in range(10):
        power(backend, minute, 60, 0)
    served(backend, 1, 2.0, 2.1)
    energy.add_up(NOW)
    assert taken() == {1: 1.0}  # 60 W for the one minute in which something ran


def test_a_request_over_two_hours_gets_both_parts_in_the_row_that_counts_it(
    backend: Backend,
) -> None:
    power(backend, 59, 60, 0)
    power(backend, 60, 120, 0)
    served(backend, 1, 59.0, 61.0)
    assert energy.add_up(NOW + timedelta(hours=1)) == 2
    assert taken() == {1: 3.0}


def test_each_hour_is_added_once_and_only_when_it_is_over(backend: Backend) -> None:
    power(backend, 5, 60, 0)
    served(backend, 1, 5.0, 6.0)
    assert energy.add_up(at(69)) == 0
    assert energy.add_up(at(71)) == 1
    assert energy.add_up(at(80)) == 0
    assert taken() == {1: 1.0}


def test_unknown_power_is_not_zero_and_not_guessed(backend: Backend) -> None:
    power(backend, 5, None, None)
    request = served(backend, 1, 5.0, 6.0)
    assert energy.add_up(NOW) == 0
    assert taken() == {1: 0.0}
    assert energy.of_request(request) is None


def test_one_requests_energy_is_its_part_of_what_ran_beside_it(backend: Backend) -> None:
    power(backend, 5, 100, 200, 999)
    BackendSample.objects.create(backend_id=backend.pk, backend="a", at=at(5), running=3)
    request = served(backend, 1, 5.0, 6.0)
    assert energy.of_request(request) == pytest.approx(300 / 3 / 60)
    Backend.objects.update(node=None)
    assert energy.of_request(request) is None


def test_records_that_come_later_leave_the_energy_as_it_is() -> None:
    record = Record(request_id="r", arrived_at=HOUR.timestamp(), outcome="completed", user_id=1)
    usage.add([usage.usage_of(record)])
    UsageHour.objects.update(estimated_energy_wh=5.0)
    usage.add([usage.usage_of(record)])
    [row] = UsageHour.objects.all()
    assert (row.requests, row.estimated_energy_wh) == (2, 5.0)


def test_energy_costs_what_a_kilowatt_hour_does(settings: Any) -> None:
    ada = make_user("ada")
    UsageHour.objects.create(hour=HOUR, user_id=ada.pk, model="m", estimated_energy_wh=500.0)
    UsageHour.objects.create(hour=HOUR, user_id=ada.pk, model="n", estimated_energy_wh=250.0)
    until = HOUR + timedelta(hours=1)
    [row] = spending.totals("user", HOUR, until)
    assert (row["estimated_energy_wh"], row["estimated_energy_cost"]) == (750.0, None)
    settings.ENERGY_PRICE = 0.4
    [row] = spending.totals("user", HOUR, until)
    assert row["estimated_energy_cost"] == 0.3


@pytest.mark.parametrize(
    ("watt_hours", "text"),
    [(None, "–"), (0.0, "0\xa0Wh"), (0.0456, "0.046\xa0Wh"), (1.25, "1.2\xa0Wh"),
     (123.4, "123\xa0Wh"), (12345.0, "12.3\xa0kWh")],
)  # fmt: skip
def test_energy_has_its_unit_and_few_digits(watt_hours: float | None, text: str) -> None:
    assert figures.watt_hours(watt_hours) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [(None, "–"), (0, "0.00"), (1234.5, "1,234.50"), (Decimal("0.000042"), "0.000042")],
)
def test_money_is_short_and_never_in_exponents(amount: Any, text: str) -> None:
    assert figures.money(amount) == text


def test_pages_show_cost_and_energy_as_estimates(
    backend: Backend, client: Client, settings: Any
) -> None:
    settings.ENERGY_PRICE = 0.5
    ModelPrice.objects.create(model_name="m", prompt=Decimal(1), completion=Decimal(2))
    power(backend, 5, 100, 200)
    tokens = {"prompt_tokens": 1_000_000, "completion_tokens": 500_000}
    request = served(backend, make_user("ada").pk, 5.0, 6.0, **tokens)
    UsageHour.objects.update(requests=1, charged_tokens=1, **tokens)
    energy.add_up(NOW)
    client.force_login(make_admin())
    page = client.get(f"/admin/decisions/{request.request_id}/").content.decode()
    assert "2.00 EUR" in page
    assert "about 5\xa0Wh (estimated)" in page  # 300 W for a minute
    page = client.get("/admin/reports/?first=2026-06-01&last=2026-06-01").content.decode()
    for text in ("ada", "2.00", "5\xa0Wh", "0.0025", "energy is an estimate"):
        assert text in page


def test_hours_are_those_of_utc_wherever_the_site_is(backend: Backend, settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Kolkata"  # half an hour beside
    power(backend, 5, 60, 0)
    served(backend, 1, 5.0, 6.0)
    assert energy.add_up(NOW) == 1
    assert EnergyHour.objects.get().hour == HOUR
    assert taken() == {1: 1.0}
