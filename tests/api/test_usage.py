"""/api/admin/usage and /api/admin/limits."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from accounts.limits import Holder, LimitSet, Use
from scheduler import serving
from scheduler.models import ModelPrice, UsageHour
from tests.api.conftest import Api
from tests.factories import make_api_key, make_group, make_user

pytestmark = pytest.mark.django_db
HOUR = datetime(2026, 6, 1, 12, tzinfo=UTC)
SINCE = "since=2026-06-01T00:00:00Z&until=2026-06-02T00:00:00Z"


@pytest.fixture
def api() -> Api:
    return Api(make_api_key(make_user("staff", is_staff=True)))


def test_usage_is_told_by_what_is_asked_for_and_as_a_file(api: Api) -> None:
    ada = make_user("ada")
    ModelPrice.objects.create(model_name="m", prompt=2, completion=4)
    UsageHour.objects.create(
        hour=HOUR, user_id=ada.pk, group="=physics", model="m", requests=2, completed=2,
        prompt_tokens=1_000_000, completion_tokens=500_000, charged_tokens=1_500_000,
    )  # fmt: skip
    told = api.ok("GET", f"usage?by=user&{SINCE}")
    [row] = told["rows"]
    assert (told["currency"], row["name"], row["requests"], row["cost"]) == ("EUR", "ada", 2, 4)
    assert api.ok("GET", f"usage?by=model&user=staff&{SINCE}")["rows"] == []
    file = api("GET", f"usage?by=group&form=csv&{SINCE}")
    assert file["Content-Disposition"] == 'attachment; filename="usage-by-group-2026-06-01.csv"'
    lines = file.content.decode().splitlines()
    assert lines[0].startswith("group,requests,completed")
    assert lines[1] == "'=physics,2,2,0,0,0,0,1000000,0,500000,0,1500000.0,0.0,4.0,"
    assert api("GET", "usage?bye=user").status_code == 400
    assert api("GET", "usage?user=nobody").status_code == 404


def test_limits_are_told_of_a_user_with_the_group_and_the_keys(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = make_user("ada", group=make_group("physics"))
    asked: list[Any] = []

    class Running:
        def limits_of(self, holders: list[Holder]) -> list[Use]:
            asked.extend(holders)
            limits = LimitSet(max_concurrent=4, token_budget=100)
            return [Use(holders[0], limits, 1, 0, None, None, 30.0, 20.0, HOUR.timestamp())]

    monkeypatch.setattr(serving, "_current", Running())
    told = api.ok("GET", "limits?user=ada")["limits"]
    assert asked == [Holder("user", ada.pk), Holder("group", ada.group_id)]
    assert [(one["limit"], one["used"], one["remaining"]) for one in told] == [
        ("max_concurrent", 1, 3),
        ("token_budget", 30, 50),
    ]
    assert told[1]["resets_at"] == "2026-06-01T12:00:00+00:00"
