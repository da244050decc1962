"""Capturing prompts with the management API."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from accounts.models import ApiKey, Role
from scheduler.models import Capture
from tests.api.conftest import Api
from tests.factories import make_api_key, make_capture, make_user

pytestmark = pytest.mark.django_db

OFF = {"capture_until": None, "capture_reason": "", "capture_days": None}


@pytest.fixture
def key() -> ApiKey:
    make_api_key(make_user("ada"), name="laptop")
    return ApiKey.objects.get(name="laptop")


def shown(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ApiKey.CAPTURE}


def test_it_is_switched_on_and_off_by_changing_the_key(api: Api, key: ApiKey) -> None:
    address, until = f"api-keys/{key.pk}", timezone.now() + timedelta(days=3)
    assert shown(api.ok("GET", address)) == OFF
    on = {"capture_until": until.isoformat(), "capture_reason": "a bug", "capture_days": 7}
    row = api.ok("PATCH", address, on)
    assert (row["capture_reason"], row["capture_days"]) == ("a bug", 7)
    key.refresh_from_db()
    assert key.capture_until == until
    newest = api.ok("GET", f"{address}/history")["results"][0]
    assert newest["user"] == "root"
    assert {one["field"]: one["before"] for one in newest["changes"]} == OFF
    assert shown(api.ok("PATCH", address, {"enabled": True}))["capture_reason"] == "a bug"
    assert shown(api.ok("PATCH", address, {"capture_until": None})) == OFF


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"capture_until": "2026-01-01T00:00:00Z"}, {"capture_reason", "capture_days"}),
        ({"capture_reason": "a bug", "capture_days": 7}, {"capture_until"}),
        ({"capture_days": 91}, {"capture_days"}),
    ],
)
def test_half_a_switch_is_refused(api: Api, key: ApiKey, given: Any, fields: set[str]) -> None:
    answer = api("PATCH", f"api-keys/{key.pk}", given)
    assert answer.status_code == 400
    assert {one["field"] for one in answer.json()["errors"]} == fields


def test_what_is_captured_is_listed_and_each_reading_is_noted(api: Api, key: ApiKey) -> None:
    make_capture(key, "req-1", request=b'{"a": 1}', request_bytes=8, answer=b"\xff", answer_bytes=1)
    make_capture(key, "req-2", request=None, request_bytes=0, answer="é".encode(), answer_bytes=2)
    before = ApiKey.history.count()
    listed = api.ok("GET", f"captures?key_id={key.pk}&ordering=at")
    assert [one["request_id"] for one in listed["results"]] == ["req-1", "req-2"]
    assert set(listed["results"][0]) == {
        *("request_id", "key_id", "at", "delete_at", "request_bytes", "answer_bytes"),
    }
    assert api.ok("GET", f"captures?key_id={key.pk + 1}")["results"] == []
    assert ApiKey.history.count() == before
    answer = api("GET", "captures/req-1")
    assert answer.headers["Cache-Control"] == "no-store"
    read = answer.json()
    assert (read["request"], read["answer"], read["answer_base64"]) == ('{"a": 1}', None, "/w==")
    read = api.ok("GET", "captures/req-2")
    assert (read["request"], read["answer"], read["answer_base64"]) == (None, "é", None)
    assert api("GET", "captures/req-3").status_code == 404
    noted = api.ok("GET", f"api-keys/{key.pk}/history")["results"][:2]
    assert [(one["user"], one["reason"], one["changes"]) for one in noted] == [
        ("root", "captured prompt of req-2 read", []),
        ("root", "captured prompt of req-1 read", []),
    ]


@pytest.mark.parametrize("fields", [{"role": Role.AUDITOR}, {"role": Role.OPERATOR}, {}])
def test_nobody_else_lists_reads_or_deletes(key: ApiKey, fields: Any) -> None:
    make_capture(key, "req-1")
    api = Api(make_api_key(make_user("eve", **fields)))
    for call in (("GET", "captures"), ("GET", "captures/req-1")):
        assert api(*call).status_code == 403
    assert api("DELETE", f"api-keys/{key.pk}/captures").status_code == 403
    assert Capture.objects.count() == 1


def test_all_of_a_key_is_deleted(api: Api, key: ApiKey) -> None:
    make_capture(key, "req-1")
    assert api("DELETE", f"api-keys/{key.pk}/captures").status_code == 204
    assert Capture.objects.count() == 0
    assert api("DELETE", "api-keys/999999/captures").status_code == 404
