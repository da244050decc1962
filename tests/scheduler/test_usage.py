"""Hourly totals: always the sum of the records, whatever is loaded twice or deleted later."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError
from django.db.models import Sum

from scheduler import usage
from scheduler.causes import CAUSES
from scheduler.loading import Loader, load
from scheduler.models import Decision, Outcome, SpoolCursor, UsageHour
from scheduler.spool import Record, Spool
from tests.factories import make_choice

pytestmark = pytest.mark.django_db


def spooled(folder: Path, *records: Record) -> None:
    spool = Spool(folder)
    for record in records:
        spool.close(record)
    spool.stop()


def record(request_id: str, arrived_at: float, **fields: Any) -> Record:
    return Record(
        request_id=request_id, arrived_at=arrived_at, **{"outcome": "completed", **fields}
    )


def test_an_hour_adds_up_what_its_requests_used_and_why_they_were_slow(tmp_path: Path) -> None:
    mine = {"user_id": 3, "user": "ada", "group": "staff", "key_id": 8, "model_served": "m"}
    spooled(
        tmp_path,
        record(
            "a", 7200.5, **mine, prompt_tokens=100, cached_tokens=60, completion_tokens=20,
            charged_tokens=130.5, queued_at=7201.0, dispatched_at=7203.0, ended_at=7204.0,
        ),
        record(
            "b", 10799.0, **mine, prompt_tokens=10, completion_tokens=5, usage_estimated=True,
            charged_tokens=15.0, queued_at=10799.0, wait_reason="others_ahead",
            dispatched_at=10809.0, ended_at=10810.5,
        ),
        record("c", 10800.0, **mine, outcome="failed"),
    )  # fmt: skip
    load(tmp_path)
    first, second = UsageHour.objects.order_by("hour").values()
    assert {name: value for name, value in first.items() if value and name != "id"} == {
        "hour": datetime(1970, 1, 1, 2, tzinfo=UTC),
        "user_id": 3,
        "group": "staff",
        "key_id": 8,
        "model": "m",
        "requests": 2,
        "completed": 2,
        "prompt_tokens": 110,
        "cached_tokens": 60,
        "completion_tokens": 25,
        "estimated_tokens": 15,
        "charged_tokens": 145.5,
        "queued": 2,
        "wait_seconds": 12.0,
        "service_seconds": 2.5,
        "slow_others_ahead": 1,
    }
    assert (second["hour"].hour, second["requests"], second["failed"]) == (3, 1, 1)


def test_what_a_client_called_a_model_that_is_not_there_makes_no_row(tmp_path: Path) -> None:
    spooled(
        tmp_path,
        *(
            record(str(n), 7200.0, model_requested=f"nonsense-{n}", outcome="refused",
                   reason="model_not_found")
            for n in range(5)
        ),
        record("left", 7200.0, model_requested="m", outcome="cancelled", queued_at=7200.0),
    )  # fmt: skip
    load(tmp_path)
    rows = UsageHour.objects.order_by("model")
    assert list(rows.values_list("model", "requests", "slow_no_backend")) == [
        ("", 5, 5),
        ("m", 1, 0),
    ]


def test_a_record_loaded_twice_counts_once(tmp_path: Path) -> None:
    both = (record("a", 7200.0, prompt_tokens=5), record("b", 7200.0, prompt_tokens=7))
    spooled(tmp_path, *both, both[0])
    load(tmp_path)
    spooled(tmp_path, *both, record("c", 7200.0, prompt_tokens=1))
    load(tmp_path)
    row = UsageHour.objects.get()
    assert (row.requests, row.prompt_tokens) == (3, 13)


def test_totals_and_rows_are_stored_together_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spooled(tmp_path, record("a", 7200.0))
    loader = Loader(tmp_path)

    def away(*_: object, **__: object) -> None:
        raise OperationalError("the database is away")

    with monkeypatch.context() as patch:
        patch.setattr(SpoolCursor.objects, "bulk_create", away)
        with pytest.raises(OperationalError):
            loader.load()
    assert UsageHour.objects.count() == 0
    loader.load()
    assert UsageHour.objects.get().requests == 1


def test_a_record_that_is_set_aside_adds_nothing(tmp_path: Path) -> None:
    spooled(tmp_path, record("a", 7200.0, prompt_tokens=1), record("bad", 7200.0, ended_at=-1e15))
    load(tmp_path)
    row = UsageHour.objects.get()
    assert (row.requests, row.prompt_tokens) == (1, 1)


def test_a_cold_load_is_seen_by_the_points_of_the_backend_that_was_chosen(tmp_path: Path) -> None:
    late = {"stream": True, "queued_at": 7200.0, "dispatched_at": 7200.0, "first_token_at": 7209.0}
    spooled(
        tmp_path,
        record("a", 7200.0, **late, decision=make_choice(selected_backend_id=1)),
        record("b", 7200.0, **late, decision=make_choice(selected_backend_id=2)),
    )
    load(tmp_path)
    row = UsageHour.objects.get()
    assert (row.slow_slow_backend, row.slow_cold_load) == (1, 1)


def random_record(chance: random.Random, number: int) -> Record:
    maybe: Callable[[Any], Any] = lambda value: value if chance.random() < 0.8 else None  # noqa: E731
    queued = maybe(7200.0 + chance.randrange(9000))
    sent = None if queued is None else maybe(queued + chance.randrange(20))
    return record(
        f"r{number}",
        7200.0 + chance.randrange(9000),
        outcome=chance.choice(Outcome.values),
        reason=chance.choice(["", "model_not_found", "queue_timeout"]),
        user_id=maybe(chance.randrange(3)),
        key_id=maybe(chance.randrange(4)),
        group=chance.choice(["", "staff", "student"]),
        model_requested=chance.choice(["m", "n"]),
        model_served="" if sent is None else chance.choice(["m", "n"]),
        wait_reason=chance.choice(["none", "own_backlog", "others_ahead", "paused"]),
        prompt_tokens=maybe(chance.randrange(20_000)),
        cached_tokens=maybe(chance.randrange(50)),
        completion_tokens=maybe(chance.randrange(900)),
        usage_estimated=chance.random() < 0.3,
        charged_tokens=chance.randrange(4000) / 4,
        queued_at=queued,
        dispatched_at=sent,
        ended_at=maybe(7200.0 + 9100 + chance.randrange(300)),
    )


def test_totals_equal_the_sums_of_the_records_and_outlive_them(tmp_path: Path) -> None:
    chance = random.Random(5)
    records = [random_record(chance, number) for number in range(1200)]
    for part in range(3):
        spooled(tmp_path, *records[part * 400 : part * 400 + 500])  # some of them twice
        load(tmp_path)
    columns = ("prompt_tokens", "cached_tokens", "completion_tokens", "charged_tokens")
    rows = Decision.objects.aggregate(**{name: Sum(name) for name in columns})
    hours = UsageHour.objects.aggregate(**{name: Sum(name) for name in usage.AMOUNTS})
    assert {name: hours[name] for name in columns} == rows
    assert hours["requests"] == 1200 == sum(hours[outcome] for outcome in Outcome.values)
    assert hours["estimated_tokens"] == sum(
        (one.prompt_tokens or 0) + (one.completion_tokens or 0)
        for one in records
        if one.usage_estimated
    )
    assert all(hours[f"slow_{one}"] for one in ("no_backend", "own_backlog", "others_ahead"))
    assert {f"slow_{one}" for one in CAUSES} < set(usage.AMOUNTS)
    before = list(UsageHour.objects.order_by("pk").values())
    Decision.objects.all().delete()
    assert list(UsageHour.objects.order_by("pk").values()) == before
