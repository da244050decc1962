"""What /metrics says of a loaded router, and to whom."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError
from prometheus_client.parser import text_string_to_metric_families

from mindrouter import metrics
from scheduler import counting, pulse, standing
from scheduler.core.views import ShareView
from scheduler.counting import COUNTS_FILE, OTHER, Counts, load_counts, save_counts
from scheduler.loading import Loader
from scheduler.spool import Attempt, Record
from tests.factories import make_admin, make_api_key
from tests.running import RunningRouter
from tests.stubs.openai_stub import OpenAIStub

Sample = tuple[str, frozenset[tuple[str, str]]]


def sample(name: str, **labels: str) -> Sample:
    return f"mindrouter_{name}", frozenset(labels.items())


def read(text: str) -> dict[Sample, float]:
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


async def scraped(router: RunningRouter) -> Mapping[Sample, float]:
    response = await router.client.get("/metrics", headers={"Authorization": ""})
    assert response.status_code == 200, response.text
    return read(response.text)


async def record_all(router: RunningRouter, settings: Any) -> None:
    """What the recorder does."""
    await router.idle()

    def load() -> None:
        path = settings.STATE_DIR / COUNTS_FILE
        counts = load_counts(path)
        Loader(settings.SPOOL_DIR, [counts.add]).load()
        save_counts(path, counts)

    await router.ask(load)


def record(**fields: Any) -> Record:
    """Asked at 100, queued at once, sent at 102, first token at 103, ended at 106."""
    times = {"queued_at": 100.0, "dispatched_at": 102.0, "first_token_at": 103.0, "ended_at": 106.0}
    defaults: dict[str, Any] = {
        "request_id": "r",
        "arrived_at": 100.0,
        "outcome": "completed",
        "group": "staff",
        "model_served": "m",
        "wait_reason": "others_ahead",
    }
    return Record(**(defaults | times | fields))


# ---- what is counted


def test_a_request_is_counted_by_group_and_model() -> None:
    counts = Counts()
    tokens = {"prompt_tokens": 70, "cached_tokens": 20, "completion_tokens": 30}
    counts.add([record(**tokens, charged_tokens=100.0)])
    assert counts.by_outcome.rows == {("staff", "m"): [1, 0, 0, 0, 0]}
    assert counts.tokens.rows == {("staff", "m"): [70, 20, 30]}
    assert counts.charged.rows == {("staff", "m"): [100.0]}
    assert counts.slots.rows == {("staff", "m"): [4.0]}
    # Waited 2 s: in the bucket up to 2.5, the seventh. First token after 3 s: up to 5, the seventh.
    assert counts.waits.rows == {("staff", "m"): [0] * 6 + [1] + [0] * 7 + [2.0]}
    assert counts.first_tokens.rows == {("m",): [0] * 6 + [1] + [0] * 6 + [3.0]}
    assert counts.leases.rows == {}  # no slot was free


def test_attempts_are_counted_by_what_became_of_them() -> None:
    counts = Counts()
    tried = [Attempt(backend="a", reason="upstream_error"), Attempt(backend="b", status=200)]
    counts.add([record(attempts=tried), record(attempts=tried[1:])])
    assert counts.attempts.rows == {("a", "upstream_error"): [1], ("b", "served"): [2]}
    assert counts.retries.rows == {(): [1]}


def test_a_refusal_by_a_limit_is_counted_and_its_tokens_are_not() -> None:
    counts = Counts()
    refused: dict[str, Any] = {"outcome": "refused", "queued_at": None, "dispatched_at": None}
    refused |= {"first_token_at": None, "model_served": "", "model_requested": "made-up"}
    counts.add([record(reason="quota_exceeded", prompt_tokens=9, **refused)])
    assert counts.requests.rows == {("refused", "quota_exceeded"): [1]}
    assert counts.limits.rows == {("staff", "quota_exceeded"): [1]}
    # A model that nobody has is no label.
    assert counts.by_outcome.rows == {("staff", "none"): [0, 1, 0, 0, 0]}
    assert counts.tokens.rows == {}


def test_labels_are_bounded() -> None:
    counts = Counts()
    number = counting.MOST_PAIRS + 50
    counts.add(record(model_served=f"m{n}", group=f"g{n}") for n in range(number))
    assert len(counts.by_outcome.rows) == counting.MOST_PAIRS + 1
    assert counts.by_outcome.rows[OTHER, OTHER] == [50, 0, 0, 0, 0]
    assert len(counts.first_tokens.rows) == counting.MOST_MODELS + 1
    figures = {(f"{n:03}",): 1.0 for n in range(7)}
    assert metrics._bounded(figures, 5)[OTHER,] == 2.0
    assert len(metrics._bounded(figures, 5)) == 6


def test_what_was_counted_outlives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "counts"
    counts = Counts()
    counts.add([record()])
    save_counts(path, counts)
    assert load_counts(path) == counts
    path.write_bytes(b"half a fi")
    assert load_counts(path) == Counts()


@pytest.mark.django_db
def test_a_record_that_is_loaded_again_is_counted_once(tmp_path: Path) -> None:
    from scheduler.models import SpoolCursor
    from scheduler.spool import encode

    (tmp_path / "x-1.open").write_bytes(encode(record()))
    counts = Counts()
    Loader(tmp_path, [counts.add]).load()
    SpoolCursor.objects.all().delete()
    Loader(tmp_path, [counts.add]).load()
    assert counts.requests.rows == {("completed", "none"): [1]}


# ---- what is told


async def test_a_scrape_tells_what_was_served(
    router: RunningRouter, stub: OpenAIStub, backend: int, settings: Any
) -> None:
    for _ in range(3):
        assert (await router.chat()).status_code == 200
    assert (await router.chat(model="nobody-has-it")).status_code == 404
    await record_all(router, settings)
    found = await scraped(router)
    assert found[sample("requests_total", outcome="completed", reason="none")] == 3
    assert found[sample("requests_total", outcome="refused", reason="model_not_found")] == 1
    by = {"group": "ada", "model": "m"}
    assert found[sample("group_requests_total", outcome="completed", **by)] == 3
    assert found[sample("wait_seconds_count", **by)] == 3
    assert found[sample("wait_seconds_bucket", le="+Inf", **by)] == 3
    assert found[sample("attempts_total", backend="a", result="served")] == 3
    [first, *_] = await router.records()
    assert found[sample("charged_tokens_total", **by)] == 3 * first.charged_tokens > 0
    assert found[sample("group_received_share", group="ada")] == 1.0
    assert found[sample("backend_slots", backend="a")] == 4
    assert found[sample("backend_state", backend="a", state="unknown")] == 1
    assert found[sample("scheduler_answers")] == 1
    assert found[sample("queued")] == 0


async def test_every_process_behind_the_port_is_told_of(router: RunningRouter) -> None:
    now = time.time()
    for pid, kind in ((1, "gateway"), (2, "gateway"), (3, "scheduler")):
        pulse.write(
            pulse.Pulse(
                kind=kind,
                pid=10_000_000 + pid,
                at=now,
                started_at=now,
                loop_lag=pid / 100,
                serving=pid,
                unwritten=0,
                lines_lost=0,
                write_errors=0,
                database_away=pid == 2,
                in_touch=True,
            )
        )
    found = await scraped(router)
    assert found[sample("processes", kind="scheduler")] == 1
    assert found[sample("loop_lag_seconds", process="scheduler-1")] == 0.03
    away = [v for (name, _), v in found.items() if name == "mindrouter_database_away"]
    assert sorted(away)[-2:] == [0, 1]


async def test_without_the_database_everything_else_is_told(
    router: RunningRouter, backend: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(view: object) -> None:
        raise DatabaseError("away")

    monkeypatch.setattr(standing, "group_figures", away)
    found = await scraped(router)
    assert sample("backend_slots", backend="a") in found
    assert not any(name.startswith("mindrouter_group_weight") for name, _ in found)


def share(recent: float, weight: float, queued: int = 1) -> ShareView:
    return ShareView(
        user_id=1,
        unit=1,
        group=None,
        weight=weight,
        deficit=0,
        burst_credits=0,
        factor=1,
        recent_tokens=recent,
        queued=queued,
        running=0,
        charged_tokens=0,
    )


def test_jains_index_compares_tokens_per_weight() -> None:
    assert metrics.jain_index([share(300, 3), share(100, 1)]) == 1.0
    assert metrics.jain_index([share(100, 1), share(0, 1)]) == 0.5
    # (1 + 3)² / (2 · (1 + 9)) = 0.8
    assert metrics.jain_index([share(100, 1), share(300, 1)]) == 0.8
    # Who has nothing to do is not compared.
    assert metrics.jain_index([share(100, 1), share(900, 1, queued=0)]) == 1.0
    assert metrics.jain_index([]) is None


# ---- to whom


async def test_only_near_addresses_read_metrics_without_a_key(
    router: RunningRouter, settings: Any
) -> None:
    settings.METRICS_ALLOWED = ["10.1.0.0/16"]
    anonymous = {"Authorization": ""}
    refused = await router.client.get("/metrics", headers=anonymous)
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    settings.METRICS_ALLOWED = ["127.0.0.0/8"]
    assert (await router.client.get("/metrics", headers=anonymous)).status_code == 200
    assert (await router.client.post("/metrics", headers=anonymous)).status_code == 405


async def test_what_a_proxy_forwards_is_not_near(router: RunningRouter, settings: Any) -> None:
    forwarded = {"Authorization": "", "X-Forwarded-For": "203.0.113.9"}
    assert (await router.client.get("/metrics", headers=forwarded)).status_code == 401
    settings.TRUSTED_PROXIES = ["127.0.0.1"]
    assert (await router.client.get("/metrics", headers=forwarded)).status_code == 401
    forwarded["X-Forwarded-For"] = "127.0.0.9"  # as the trusted proxy says
    assert (await router.client.get("/metrics", headers=forwarded)).status_code == 200


async def test_a_key_of_staff_reads_metrics_from_anywhere(
    router: RunningRouter, settings: Any
) -> None:
    settings.METRICS_ALLOWED = []
    key = await router.change(lambda: make_api_key(make_admin("root")))
    bearer = {"Authorization": f"Bearer {key}"}
    assert (await router.client.get("/metrics", headers=bearer)).status_code == 200
    assert (await router.client.get("/metrics")).status_code == 403  # ada is no staff
    wrong = {"Authorization": "Bearer wrong"}
    assert (await router.client.get("/metrics", headers=wrong)).status_code == 401


async def test_scrapes_do_not_hold_requests_up(router: RunningRouter, backend: int) -> None:
    """Collecting happens in a thread of its own: both are answered, in whichever order."""
    both = await asyncio.gather(router.client.get("/metrics"), router.chat())
    assert [one.status_code for one in both] == [200, 200]
