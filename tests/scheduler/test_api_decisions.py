"""``/api/admin/decisions``: every request for staff, newest first, cheap at any size."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from accounts.models import ApiKey, User
from scheduler.models import Decision
from tests.factories import make_admin, make_api_key, make_decision, make_user

pytestmark = pytest.mark.django_db

URL = "/api/admin/decisions"
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


@pytest.fixture
def staff(client: Client) -> Client:
    client.force_login(make_user("clerk", is_staff=True), "accounts.authentication.RoleBackend")
    return client


def ids(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.content
    return [one["request_id"] for one in answer.json()["results"]]


# ---- who may ask


def test_a_staff_session_and_a_staff_key_may_ask(staff: Client) -> None:
    assert staff.get(URL).status_code == 200
    for user in (make_user(is_staff=True), make_admin()):
        key = make_api_key(user)
        assert Client().get(URL, headers={"Authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize("path", ["decisions", "decisions/r1", "scheduler/stats", "schema/"])
def test_others_are_refused(path: str, client: Client) -> None:
    url = f"/api/admin/{path}"
    assert client.get(url).status_code == 401
    assert client.get(url, headers={"Authorization": "Bearer nonsense"}).status_code == 401
    user = make_user()
    key = make_api_key(user)
    assert client.get(url, headers={"Authorization": f"Bearer {key}"}).status_code == 403
    client.force_login(user, "accounts.authentication.RoleBackend")
    assert client.get(url).status_code == 403


@pytest.mark.parametrize(
    "change",
    [
        lambda: ApiKey.objects.update(enabled=False),
        lambda: ApiKey.objects.update(expires_at=NOON),
        lambda: User.objects.update(is_active=False),
    ],
    ids=["disabled", "expired", "inactive user"],
)
def test_a_key_that_lost_its_force_is_refused(change: Any, client: Client) -> None:
    key = make_api_key(make_admin())
    change()
    assert client.get(URL, headers={"Authorization": f"Bearer {key}"}).status_code == 401


# ---- what it says


def whole_decision() -> Decision:
    return make_decision(
        "abc123",
        client_request_id="mine",
        user_id=7,
        user="ada",
        group="faculty",
        model_requested="small",
        model_served="llama3.2",
        stream=True,
        selected_backend_id=1,
        selected_backend="gpu-1",
        candidate_backends=[1, 2, 3],
        scores={"1": 150.0, "2": 80.5},
        score_parts={"1": {"model_loaded": 100.0}},
        constraints={"3": {"context": 4096}},
        attempts=[
            {
                "backend": "gpu-1",
                "status": 200,
                "reason": "",
                "started_at": "2026-06-01T12:00:01+00:00",
                "ended_at": None,
            }
        ],
        user_deficit=-1000.0,
        user_weight=3.0,
        user_group="faculty",
        user_recent_usage=30000.0,
        prompt_tokens=60,
        completion_tokens=37,
        charged_tokens=97.0,
        dispatched_at=NOON + timedelta(seconds=1),
    )


def test_a_result_has_the_documented_fields_and_types(staff: Client) -> None:
    whole_decision()
    answer = staff.get(URL).json()
    assert (answer["next"], answer["previous"]) == (None, None)
    [one] = answer["results"]
    assert one == {
        "request_id": "abc123",
        "client_request_id": "mine",
        "user": "ada",
        "group": "faculty",
        "end_user": "",
        "task": "",
        "model_requested": "small",
        "model_served": "llama3.2",
        "dialect": "openai",
        "endpoint": "chat",
        "stream": True,
        "status": 200,
        "outcome": "completed",
        "reason": "",
        "message": "",
        "selected_backend_id": 1,
        "selected_backend": "gpu-1",
        "candidate_backends": [1, 2, 3],
        "scores": {"1": 150, "2": 80.5},
        "attempts": [
            {
                "backend": "gpu-1",
                "status": 200,
                "reason": "",
                "started_at": "2026-06-01T12:00:01+00:00",
                "ended_at": None,
            }
        ],
        "user_deficit": -1000,
        "user_weight": 3,
        "user_group": "faculty",
        "user_recent_usage": 30000,
        "prompt_tokens": 60,
        "cached_tokens": None,
        "completion_tokens": 37,
        "usage_estimated": False,
        "charged_tokens": 97,
        "arrived_at": "2026-06-01T12:00:00Z",
        "queued_at": None,
        "dispatched_at": "2026-06-01T12:00:01Z",
        "first_byte_at": None,
        "first_token_at": None,
        "ended_at": None,
    }
    assert isinstance(one["user_weight"], int)


def test_one_request_has_everything_that_is_known_of_it(staff: Client) -> None:
    whole_decision()
    one = staff.get(f"{URL}/abc123").json()
    assert one["score_parts"] == {"1": {"model_loaded": 100}}
    assert one["constraints"] == {"3": {"context": 4096}}
    assert one["user_id"] == 7
    assert {field.name for field in Decision._meta.fields} - set(one) == {"id"}
    assert staff.get(f"{URL}/other").status_code == 404


def test_it_cannot_be_written(staff: Client) -> None:
    make_decision("a")
    assert staff.post(URL, {}).status_code in (403, 405)
    assert staff.delete(f"{URL}/a").status_code in (403, 405)
    assert Decision.objects.count() == 1


# ---- filters


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"request_id": "a"}, ["a"]),
        ({"client_request_id": "mine"}, ["b"]),
        ({"user": "bob"}, ["b"]),
        ({"model": "m2"}, ["c", "b"]),
        ({"backend": "gpu-2"}, ["c"]),
        ({"outcome": "refused"}, ["b"]),
        ({"outcome": "aborted"}, []),
        ({"since": "2026-06-01T12:01:00Z"}, ["c", "b"]),
        ({"since": "2026-06-01T14:02:00+02:00"}, ["c"]),
        ({"since": "2026-06-01T14:02:00 02:00"}, ["c"]),
        ({"since": "2026-06-01T12:02:00"}, ["c"]),
        ({"since": "2026-06-02"}, []),
        ({"user": "ada", "model": "m2"}, ["c"]),
        ({"anything": "else"}, ["c", "b", "a"]),
    ],
)
def test_filters(staff: Client, query: dict[str, str], found: list[str]) -> None:
    make_decision("a", arrived_at=NOON, model_requested="m1", selected_backend="gpu-1")
    make_decision(
        "b",
        arrived_at=NOON + timedelta(minutes=1),
        user="bob",
        client_request_id="mine",
        model_requested="m2",
        outcome="refused",
    )
    make_decision(
        "c",
        arrived_at=NOON + timedelta(minutes=2),
        model_requested="m2",
        selected_backend="gpu-2",
    )
    assert ids(staff.get(URL, query)) == found


@pytest.mark.parametrize(
    "query",
    [
        {"outcome": "nonsense"},
        {"since": "yesterday"},
        {"since": "2026-13-01T00:00:00Z"},
        {"page_size": "0"},
        {"page_size": "1001"},
        {"page_size": "many"},
        {"user": "a\0b"},
        {"cursor": "nonsense"},
        {"cursor": "Zg=="},
        {"cursor": "ZiAxIDIwMjYtMDEtMDE="},
    ],
)
def test_a_bad_filter_is_a_400_that_names_it(staff: Client, query: dict[str, str]) -> None:
    answer = staff.get(URL, query)
    assert answer.status_code == 400
    assert answer["Content-Type"] == "application/problem+json"
    assert [one["field"] for one in answer.json()["errors"]] == list(query)


# ---- pages


def test_pages_lead_through_everything_once_and_back(staff: Client) -> None:
    for number in range(7):
        # Two each at the same time.
        make_decision(f"r{number}", arrived_at=NOON + timedelta(seconds=number // 2))
    make_decision("later", outcome="failed", arrived_at=NOON)
    url: str | None = f"{URL}?page_size=3&outcome=completed"
    pages = []
    while url:
        answer = staff.get(url)
        pages.append(ids(answer))
        last, url = answer.json(), answer.json()["next"]
    assert pages == [["r6", "r5", "r4"], ["r3", "r2", "r1"], ["r0"]]
    assert last["previous"] is not None
    back = staff.get(last["previous"]).json()
    assert [one["request_id"] for one in back["results"]] == ["r3", "r2", "r1"]
    back = staff.get(back["previous"]).json()
    assert [one["request_id"] for one in back["results"]] == ["r6", "r5", "r4"]
    assert back["previous"] is None
    assert ids(staff.get(back["next"])) == ["r3", "r2", "r1"]


def test_records_that_come_meanwhile_shift_no_page(staff: Client) -> None:
    for number in range(4):
        make_decision(f"r{number}", arrived_at=NOON + timedelta(seconds=number))
    first = staff.get(URL, {"page_size": 2})
    make_decision("new", arrived_at=NOON + timedelta(hours=1))
    assert ids(first) == ["r3", "r2"]
    assert ids(staff.get(first.json()["next"])) == ["r1", "r0"]


def test_a_page_is_one_query_without_count_or_large_columns(staff: Client) -> None:
    for _ in range(3):
        make_decision()
    with CaptureQueriesContext(
        connection,
    ) as queries:
        staff.get(URL, {"page_size": 2})
    [query] = [q["sql"] for q in queries if "scheduler_decision" in q["sql"]]
    assert "COUNT" not in query.upper()
    for column in ("score_parts", "constraints", "served_ahead", "backend_names"):
        assert column not in query


@pytest.mark.parametrize(
    "query",
    [
        "",
        "user=ada",
        "model=m",
        "backend=a",
        "outcome=failed",
        "request_id=r",
        "client_request_id=c",
        "since=2026-01-01T00:00:00Z",
    ],
)
def test_every_filter_uses_an_index(staff: Client, query: str) -> None:
    with CaptureQueriesContext(connection) as queries:
        staff.get(f"{URL}?{query}")
    [sql] = [q["sql"] for q in queries if "scheduler_decision" in q["sql"]]
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute(f"EXPLAIN QUERY PLAN {sql}")
            plan = [row[3] for row in cursor.fetchall()]
            assert "USING INDEX" in plan[0]
            # The index gives the order too, or all but ties in it.
            if query != "client_request_id=c":
                assert "USE TEMP B-TREE FOR ORDER BY" not in plan
        else:
            cursor.execute("SET LOCAL enable_seqscan = off")  # which suits an empty table
            cursor.execute(f"EXPLAIN {sql}")
            assert "Index" in " ".join(row[0] for row in cursor.fetchall())


def test_the_schema_describes_the_api(staff: Client) -> None:
    answer = staff.get("/api/admin/schema/?format=json")
    assert answer.status_code == 200
    assert set(answer.json()["paths"]) >= {
        "/api/admin/decisions",
        "/api/admin/decisions/{request_id}",
        "/api/admin/scheduler/stats",
    }
