"""``/api/admin/scheduler/stats``: the documented JSON of the running scheduler."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.test import Client
from pytest_django import DjangoAssertNumQueries

from scheduler import services
from scheduler.core.views import BackendView, ShareView, Stats
from scheduler.serving import LiveView
from tests.factories import make_user

pytestmark = pytest.mark.django_db

URL = "/api/admin/scheduler/stats"


@pytest.fixture
def staff(client: Client) -> Client:
    client.force_login(make_user("clerk", is_staff=True), "accounts.authentication.RoleBackend")
    return client


def share(user_id: int, unit: Any = None, **values: Any) -> ShareView:
    figures: dict[str, Any] = {
        "group": None,
        "weight": 1.0,
        "deficit": 0.0,
        "burst_credits": 0.0,
        "factor": 1.0,
        "recent_tokens": 0.0,
        "queued": 0,
        "running": 0,
        "charged_tokens": 0.0,
    }
    return ShareView(user_id=user_id, unit=unit or user_id, **(figures | values))


def live_view(*shares: ShareView) -> LiveView:
    return LiveView(
        taken_at=1_780_000_000.25,
        configuration_version=12,
        limits_refused={"token_budget": 3},
        gap=0.0,
        gap_bound=0.0,
        shares=list(shares),
        stats=Stats(
            queue_total=5,
            queue_by_user={1: 3, 2: 2},
            queue_by_model={"llama3.2": 4, "mistral": 1},
            average_wait_seconds=2.5,
            total_users=2,
            global_recent_tokens=50000.0,
            users=list(shares),
        ),
        backends=[
            BackendView(
                id=4,
                name="gpu-1",
                in_flight=2,
                queued=1,
                max_concurrent=4,
                state="ready",
                observed_age_seconds=None,
                failed_for_seconds=None,
                foreign=0,
            )
        ],
    )


def test_the_figures_have_the_documented_keys_and_types(
    staff: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = make_user("ada")
    view = live_view(
        share(
            ada.pk,
            group="physics",
            weight=3.0,
            deficit=-1000.0,
            recent_tokens=30000.0,
            factor=0.8,
            burst_credits=12.5,
            running=2,
        ),
        share(999_999, unit=(999_999, "eve@example.org"), deficit=500.25, queued=1),
    )
    monkeypatch.setattr(services, "live", lambda: view)
    answer = staff.get(URL)
    assert answer.status_code == 200
    assert json.loads(answer.content) == {
        "taken_at": 1_780_000_000.25,
        "configuration_version": 12,
        "limits": {"refused": {"token_budget": 3}, "shadowed": {}},
        "queue": {
            "total": 5,
            "by_user": {"1": 3, "2": 2},
            "by_model": {"llama3.2": 4, "mistral": 1},
            "average_wait_seconds": 2.5,
        },
        "fair_share": {
            "total_users": 2,
            "global_recent_tokens": 50000,
            "user_stats": [
                {
                    "user_id": ada.pk,
                    "username": "ada",
                    "end_user": None,
                    "background_calls": False,
                    "group": "physics",
                    "weight": 3,
                    "deficit": -1000,
                    "burst_credits": 12.5,
                    "deprioritization_factor": 0.8,
                    "recent_tokens": 30000,
                    "queued": 0,
                    "running": 2,
                },
                {
                    "user_id": 999_999,
                    "username": None,
                    "end_user": "eve@example.org",
                    "background_calls": False,
                    "group": None,
                    "weight": 1,
                    "deficit": 500.25,
                    "burst_credits": 0,
                    "deprioritization_factor": 1,
                    "recent_tokens": 0,
                    "queued": 1,
                    "running": 0,
                },
            ],
        },
        "backends": [
            {
                "id": 4,
                "name": "gpu-1",
                "in_flight": 2,
                "queued": 1,
                "max_concurrent": 4,
                "state": "ready",
                "observed_age_seconds": None,
            }
        ],
    }
    assert b'"deficit":-1000,' in answer.content


def test_many_users_cost_no_more_queries_than_one(
    staff: Client,
    monkeypatch: pytest.MonkeyPatch,
    django_assert_max_num_queries: DjangoAssertNumQueries,
) -> None:
    view = live_view(*(share(number) for number in range(2000)))
    monkeypatch.setattr(services, "live", lambda: view)
    with django_assert_max_num_queries(3):  # session, user, names
        assert len(staff.get(URL).json()["fair_share"]["user_stats"]) == 2000


def test_where_no_scheduler_runs_it_is_a_503(
    staff: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "live", lambda: None)
    answer = staff.get(URL)
    assert answer.status_code == 503
    assert answer["Content-Type"] == "application/problem+json"
    assert answer.json() == {
        "type": "about:blank",
        "title": "Service Unavailable",
        "status": 503,
        "detail": "No scheduler runs in this process.",
    }


def test_a_scheduler_that_does_not_answer_is_a_503(
    staff: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck() -> None:
        raise TimeoutError

    monkeypatch.setattr(services, "live", stuck)
    assert staff.get(URL).status_code == 503
