"""Reports: entitled against received, borrowed and lent, causes; the page, its files, the API."""

from __future__ import annotations

import csv
import io
import random
from datetime import UTC, date, datetime
from typing import Any

import pytest
from django.test import Client

from accounts.models import Role
from scheduler import reports
from scheduler.models import ShareHour, UsageHour
from scheduler.reports import Period, Week, shares, weeks, whole
from tests.factories import make_admin, make_user

pytestmark = pytest.mark.django_db

MONDAY, TUESDAY = date(2026, 6, 1), date(2026, 6, 2)
PERIOD = Period(MONDAY, TUESDAY)
QUERY = "?first=2026-06-01&last=2026-06-02"


def used(day: int, hour: int, group: str, tokens: float, user_id: int = 0, **fields: Any) -> None:
    UsageHour.objects.create(
        hour=datetime(2026, 6, day, hour, tzinfo=UTC),
        group=group,
        user_id=user_id,
        model=fields.pop("model", "m"),
        requests=fields.pop("requests", 1),
        charged_tokens=tokens,
        **fields,
    )


def entitled(day: int, hour: int, group: str, sum_of_samples: float, **fields: Any) -> None:
    ShareHour.objects.create(
        hour=datetime(2026, 6, day, hour, tzinfo=UTC),
        group=group,
        entitled=sum_of_samples,
        **fields,
    )


def test_entitled_tokens_are_the_hours_part_of_the_samples_of_all_tokens() -> None:
    # 4 samples: staff had 3/4 in each. Staff took 500 of 1000.
    entitled(1, 9, "staff", 3.0, nominal=3.0)
    entitled(1, 9, "student", 1.0, nominal=1.0)
    used(1, 9, "staff", 400)
    used(1, 9, "staff", 100, model="n")
    used(1, 9, "student", 500, requests=4)
    # An hour later staff had nothing to do: what is its by weight was lent.
    entitled(1, 10, "staff", 0.0, nominal=1.5)
    entitled(1, 10, "student", 2.0, nominal=0.5)
    used(1, 10, "student", 200)
    staff, student = shares(PERIOD, "group")
    assert (staff.day, staff.name, staff.requests, staff.tokens) == (MONDAY, "staff", 2, 500)
    assert (staff.entitled, staff.received, staff.of) == (750, 500, 1200)
    assert (staff.borrowed, staff.lent) == (0, 250 + 150)
    assert (student.entitled, student.received, student.requests) == (250 + 200, 700, 5)
    assert (student.borrowed, student.lent) == (250 + 150, 0)
    assert (student.entitled_share, student.received_share) == (450 / 1200, 700 / 1200)


def test_hours_without_samples_count_in_no_share() -> None:
    used(1, 9, "staff", 400)
    [row] = shares(PERIOD, "group")
    assert (row.tokens, row.received, row.entitled_share, row.received_share) == (
        400,
        0,
        None,
        None,
    )
    assert (row.borrowed, row.lent) == (0, 0)


def test_who_was_entitled_and_took_nothing_is_there() -> None:
    entitled(1, 9, "staff", 1.0, nominal=1.0)
    entitled(1, 9, "student", 1.0, nominal=1.0)
    used(1, 9, "student", 100)
    staff, _ = shares(PERIOD, "group")
    assert (staff.name, staff.entitled, staff.received, staff.lent) == ("staff", 50, 0, 50)


def test_users_are_named_as_they_are_called_now_and_deleted_ones_by_number() -> None:
    ada = make_user("ada")
    entitled(1, 9, "staff", 2.0)
    entitled(1, 9, "staff", 0.5, user_id=ada.pk)
    entitled(1, 9, "staff", 1.5, user_id=987654)
    used(1, 9, "staff", 60, user_id=ada.pk)
    used(1, 9, "staff", 40, user_id=987654)
    other, mine = shares(PERIOD, "user")
    assert (other.name, other.entitled, other.received) == ("#987654", 75, 40)
    assert (mine.name, mine.entitled, mine.received, mine.of) == ("ada", 25, 60, 100)


def test_users_of_a_whole_period_are_the_sum_of_their_days() -> None:
    chance = random.Random(3)
    people = [make_user(f"user-{n}").pk for n in range(5)]
    for day in (1, 2):
        for hour in range(8, 14):
            for user_id in chance.sample(people, 3):
                used(day, hour, "staff", chance.randrange(1000), user_id=user_id)
                if hour != 9:  # nothing was sampled at nine
                    entitled(day, hour, "staff", chance.random(), user_id=user_id)
            if hour != 9:
                entitled(day, hour, "staff", 3.0, nominal=3.0)
    one, other = reports.users(PERIOD), whole(shares(PERIOD, "user"))
    assert [row.name for row in one] == [row.name for row in other]
    for name in ("requests", "tokens", "received", "entitled", "of"):
        assert [getattr(row, name) for row in one] == pytest.approx(
            [getattr(row, name) for row in other]
        )


def test_days_are_the_sites_and_the_whole_period_is_their_sum(settings) -> None:
    settings.TIME_ZONE = "Europe/Zurich"
    for hour in (21, 23):  # 23:00 and 01:00 the next day there
        entitled(1, hour, "staff", 1.0, nominal=1.0)
        used(1, hour, "staff", 100)
    days = shares(PERIOD, "group")
    assert [(row.day, row.tokens) for row in days] == [(MONDAY, 100), (TUESDAY, 100)]
    [row] = whole(days)
    assert (row.day, row.tokens, row.entitled, row.of, row.received_share) == (
        None,
        200,
        200,
        200,
        1,
    )
    assert shares(Period(MONDAY, MONDAY), "group") == days[:1]


def test_slow_requests_are_counted_by_week_and_cause() -> None:
    used(1, 9, "staff", 1, requests=10, slow_own_backlog=2, slow_cold_load=1)
    used(7, 9, "staff", 1, requests=5, slow_cold_load=4)  # the Sunday
    used(8, 9, "staff", 1, requests=3)
    newer, older = weeks(Period(MONDAY, date(2026, 6, 8)))
    assert (newer.monday, newer.requests, newer.slow, newer.ranked) == (date(2026, 6, 8), 3, 0, [])
    assert isinstance(older, Week)
    assert (older.monday, older.requests, older.slow) == (MONDAY, 15, 7)
    assert older.ranked == [("cold load of the model", 5), ("own backlog", 2)]


@pytest.fixture
def traffic() -> None:
    entitled(1, 9, "staff", 3.0, nominal=3.0)
    entitled(1, 9, "=2+3", 1.0, nominal=1.0)
    used(1, 9, "staff", 500, slow_others_ahead=1)
    used(1, 9, "=2+3", 500, user_id=make_user("ada").pk)


def test_the_page_shows_groups_users_and_causes(client: Client, traffic: None) -> None:
    client.force_login(make_user("auditor", is_staff=True, role=Role.AUDITOR))
    page = client.get(f"/admin/reports/{QUERY}").content.decode()
    for text in ("75\xa0%", "50\xa0%", "<strong>1</strong> others ahead", "ada", "1 of 2 requests"):
        assert text in page
    assert "At most 92 days" in client.get("/admin/reports/?first=2020-01-01").content.decode()
    assert client.get("/admin/reports/").status_code == 200


def test_the_files_have_the_same_rows_and_no_formulas(client: Client, traffic: None) -> None:
    client.force_login(make_admin())
    answer = client.get(f"/admin/reports/groups.csv{QUERY}")
    assert answer["Content-Disposition"] == (
        'attachment; filename="mindrouter-groups-2026-06-01-2026-06-02.csv"'
    )
    formula, staff = csv.DictReader(io.StringIO(answer.content.decode()))
    assert formula["group"] == "'=2+3"
    assert (staff["day"], staff["group"], staff["entitled_tokens"]) == (
        "2026-06-01",
        "staff",
        "750.0",
    )
    assert (staff["lent_tokens"], staff["received_share"]) == ("250.0", "0.5")
    rows = client.get(f"/admin/reports/groups.json{QUERY}").json()
    assert rows == reports.as_values(PERIOD, "groups")
    assert rows[0]["group"] == "=2+3"
    for address in ("reports/nonsense.csv", "reports/groups.pdf", "reports/users.csv?first=x"):
        assert client.get(f"/admin/{address}").status_code == 400


def test_the_management_api_gives_the_same(client: Client, traffic: None) -> None:
    client.force_login(make_admin())
    for what in ("groups", "users", "causes"):
        answer = client.get(f"/api/admin/reports/{what}{QUERY}")
        assert answer.json() == reports.as_values(PERIOD, what)  # type: ignore[arg-type]
    assert client.get("/api/admin/reports/groups?first=2020-01-01").status_code == 400
    assert client.get("/api/admin/reports/groups?nonsense=1").status_code == 400


@pytest.mark.parametrize(
    "address",
    ["/admin/reports/", "/admin/reports/users.csv", "/admin/reports/users.json"],
)
def test_only_staff_reads_reports(client: Client, address: str) -> None:
    assert client.get(address).status_code == 302
    client.force_login(make_user("ada"))
    assert client.get(address).status_code == 302
    assert client.get("/api/admin/reports/users").status_code == 403


def test_many_groups_and_days_take_no_more_queries(
    client: Client, django_assert_max_num_queries: Any
) -> None:
    client.force_login(make_admin())
    for day in (1, 2):
        for number in range(30):
            entitled(day, 9, f"g{number}", 1.0, nominal=1.0)
            used(day, 9, f"g{number}", 10, user_id=number + 1)
    with django_assert_max_num_queries(16):
        client.get(f"/admin/reports/{QUERY}")
