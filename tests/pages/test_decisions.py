"""The log of decisions and the page of one, without a browser."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from scheduler import admin as scheduler_admin
from scheduler.models import Decision
from tests.factories import make_admin, make_backend, make_decision, make_user

pytestmark = pytest.mark.django_db

LOG = "/admin/scheduler/decision/"
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


@pytest.fixture
def admin_client(client: Client) -> Client:
    client.force_login(make_admin("root"))
    return client


def told(answer: Any) -> str:
    return answer.content.decode().replace("\xa0", " ")


def listed(answer: Any) -> list[str]:
    return [row.request_id for row in answer.context["cl"].result_list]


def full_decision(request_id: str = "req-full", **fields: Any) -> Decision:
    """A request that waited for 12.4 s and was answered by gpu-2."""
    values: dict[str, Any] = {
        "client_request_id": "mine-1",
        "group": "student",
        "model_requested": "llama3:70b",
        "model_served": "llama3:70b-q4",
        "selected_backend_id": 2,
        "selected_backend": "gpu-2",
        "candidate_backends": [1, 2],
        "backend_names": {"1": "gpu-1", "2": "gpu-2", "3": "gpu-3"},
        "scores": {"1": 188.0, "2": 247.5},
        "score_parts": {"1": {"model_loaded": 0}, "2": {"model_loaded": 100}},
        "constraints": {"3": {"capacity": "8 of 8 slots in use"}},
        "selection_reason": "score",
        "attempts": [
            {"backend": "gpu-2", "status": 200, "reason": "",
             "started_at": "2026-06-01T12:00:12.501+00:00", "ended_at": None}
        ],
        "user_deficit": -1000.0,
        "user_weight": 3.0,
        "user_group": "student",
        "burst_credits": 400.0,
        "deprioritization_factor": 0.5,
        "wait_bonus": 12.0,
        "priority": -388.0,
        "wait_reason": "backends_full",
        "position_at_arrival": 36,
        "served_ahead": {"faculty": [31, 40000.0], "staff": [4, 900.0]},
        "prompt_tokens": 1200,
        "completion_tokens": 340,
        "charged_tokens": 1540,
        "queued_at": NOON + timedelta(seconds=0.1),
        "dispatched_at": NOON + timedelta(seconds=12.5),
        "first_byte_at": NOON + timedelta(seconds=13),
        "first_token_at": NOON + timedelta(seconds=13.5),
        "ended_at": NOON + timedelta(seconds=20),
    }  # fmt: skip
    return make_decision(request_id, **(values | fields))


def test_the_list_shows_what_happened_to_each_request(admin_client):
    full_decision(usage_estimated=True)
    make_decision("req-refused", outcome="refused", reason="queue_full", user="eve")
    page = told(admin_client.get(LOG))
    for text in (
        *("2026-06-01", "12:00:00", "ada", "student", "llama3:70b", "gpu-2", "12.4 s", "13.5 s"),
        *("≈ 1,200 + 340", "1,540", "eve", "refused", "queue_full"),
    ):
        assert text in page
    assert "&lt;span" not in page


def test_the_list_takes_a_fixed_number_of_queries_and_leaves_large_columns_alone(admin_client):
    def queries(address: str) -> list[str]:
        with CaptureQueriesContext(
            connection,
        ) as captured:
            assert admin_client.get(address).status_code == 200
        return [query["sql"] for query in captured if "scheduler_decision" in query["sql"]]

    full_decision("req-0")
    few = queries(LOG)
    for number in range(1, 120):
        full_decision(f"req-{number}")
    many = queries(LOG)
    assert len(few) == len(many) == 2  # the rows and their bounded number
    for column in ("score_parts", "constraints", "attempts", "served_ahead", "message"):
        assert not any(f'"{column}"' in sql for sql in many)
    assert not any("COUNT" in sql and "LIMIT" not in sql for sql in many)
    assert len(queries(f"{LOG}?p=2")) == 2


def test_the_list_counts_and_pages_no_further_than_its_bound(admin_client, monkeypatch):
    monkeypatch.setattr(scheduler_admin, "MOST_ROWS", 4)
    monkeypatch.setattr(scheduler_admin.DecisionAdmin, "list_per_page", 2)
    for number in range(7):
        make_decision(f"req-{number}", arrived_at=NOON + timedelta(seconds=number))
    first, second = admin_client.get(LOG), admin_client.get(LOG, {"p": "2"})
    assert (listed(first), listed(second)) == (["req-6", "req-5"], ["req-4", "req-3"])
    assert first.context["cl"].result_count == 4
    assert "Only the newest 4 are listed" in told(first)
    assert len(listed(admin_client.get(LOG, {"all": ""}))) == 2


@pytest.mark.parametrize("text", ["req-full", "mine-1"])
def test_a_request_is_found_by_its_whole_id_and_by_the_clients_own(admin_client, text):
    full_decision()
    make_decision("req-full-2", client_request_id="mine-11")
    assert listed(admin_client.get(LOG, {"q": text})) == ["req-full"]
    assert listed(admin_client.get(LOG, {"q": text[:-1]})) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("outcome", "failed"),
        ("model_requested", "qwen3"),
        ("selected_backend", "gpu-9"),
        ("user", "eve"),
    ],
)
def test_filters_compare_whole_values_through_an_index(admin_client, name, value):
    full_decision()
    make_decision("req-other", **{name: value})
    with CaptureQueriesContext(connection) as captured:
        answer = admin_client.get(LOG, {name: value})
    assert listed(answer) == ["req-other"]
    (rows,) = [q["sql"] for q in captured if q["sql"].startswith('SELECT "scheduler_decision"')]
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN QUERY PLAN {rows}")
        plan = " ".join(str(row) for row in cursor.fetchall())
    assert "USING INDEX decision_by_" in plan


def test_the_period_filter_counts_back_from_now(admin_client):
    now = datetime.now(UTC)
    make_decision("req-now", arrived_at=now - timedelta(minutes=5))
    make_decision("req-yesterday", arrived_at=now - timedelta(hours=30))
    assert listed(admin_client.get(LOG, {"period": "1"})) == ["req-now"]
    assert listed(admin_client.get(LOG, {"period": "168"})) == ["req-now", "req-yesterday"]
    assert len(listed(admin_client.get(LOG, {"period": "nonsense"}))) == 2


def test_the_filters_offer_the_configured_models_and_backends(admin_client):
    make_backend("gpu-7", models=("qwen3",))
    page = told(admin_client.get(LOG))
    assert re.search(r'<option value="gpu-7"', page)
    assert re.search(r'<option value="qwen3"', page)


def test_the_filters_never_count_rows_by_value(admin_client):
    make_decision("req-1")
    assert "Show counts" not in told(admin_client.get(LOG))
    with CaptureQueriesContext(connection) as captured:
        admin_client.get(LOG, {"_facets": "True"})
    assert not any("COUNT" in q["sql"] and "LIMIT" not in q["sql"] for q in captured)


def test_rows_are_never_added_changed_or_deleted_here(admin_client):
    row = make_decision("req-1")
    assert admin_client.get(f"{LOG}add/").status_code == 403
    assert admin_client.post(f"{LOG}{row.pk}/delete/", {"post": "yes"}).status_code == 403
    data = {"action": "delete_selected", "_selected_action": [row.pk], "post": "yes"}
    admin_client.post(LOG, data)
    assert Decision.objects.count() == 1


def test_djangos_page_of_a_row_leads_to_its_explanation(admin_client):
    row = make_decision("req-1")
    answer = admin_client.get(f"{LOG}{row.pk}/change/")
    assert (answer.status_code, answer["Location"]) == (302, "/admin/decisions/req-1/")
    assert admin_client.get(f"{LOG}99999/change/").status_code == 404


def test_the_short_address_leads_to_the_log_with_its_filters(admin_client):
    answer = admin_client.get("/admin/decisions/?outcome=failed")
    assert answer["Location"] == f"{LOG}?outcome=failed"


def test_the_page_of_a_decision_explains_it(admin_client, django_assert_max_num_queries):
    full_decision()
    with django_assert_max_num_queries(7):
        page = told(admin_client.get("/admin/decisions/req-full/"))
    for text in (
        "Waited 12.4 s because all backends with llama3:70b were full; "
        "31 requests of faculty and 4 of staff were served ahead; "
        "went to gpu-2: model loaded (247.5 points, next gpu-1 with 188).",
        "served as llama3:70b-q4",
        "capacity: 8 of 8 slots in use",
        "number 36 in line",
        "(−1,000 + 400) ÷ 3 ÷ 0.5 + 12 = −388",
        "1,200 in",
        "340 out",
        "1,540 tokens",
        "12:00:12.500",
        "12:00:12.501",
    ):
        assert text in page


def test_names_missing_in_a_record_are_those_of_today(admin_client):
    backend = make_backend("gpu-today")
    full_decision(
        candidate_backends=[2, backend.pk],
        constraints={"77": {"enabled": "has been removed"}},
        scores={"2": 5, str(backend.pk): 1},
        backend_names={},
    )
    page = told(admin_client.get("/admin/decisions/req-full/"))
    assert "gpu-today" in page
    assert "backend 77" in page


@pytest.mark.parametrize("outcome", ["refused", "cancelled", "failed", "aborted"])
def test_a_bare_record_of_any_outcome_has_a_page(admin_client, outcome):
    make_decision("req-bare", outcome=outcome, status=None, user="")
    assert admin_client.get("/admin/decisions/req-bare/").status_code == 200


def test_texts_from_outside_are_escaped(admin_client):
    full_decision(
        "req-odd",
        model_requested="<script>alert(1)</script>",
        message="<b>x</b>",
        outcome="failed",
        user="<i>eve</i>",
        client_request_id="a.b-c_d",
    )
    for address in (LOG, "/admin/decisions/req-odd/"):
        page = told(admin_client.get(address))
        assert "<script>alert(1)" not in page
        assert "<b>x</b>" not in page
        assert "<i>eve</i>" not in page


def test_an_unknown_request_is_not_found(admin_client):
    assert admin_client.get("/admin/decisions/nothing/").status_code == 404


def test_staff_without_a_role_reads_decisions_like_an_auditor(client):
    full_decision()
    client.force_login(make_user("clerk", is_staff=True))
    assert client.get("/admin/decisions/req-full/").status_code == 200
    assert client.get(LOG).status_code == 200
