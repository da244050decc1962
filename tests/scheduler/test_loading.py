"""Spool files into the database: every record once, whatever fails in between."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection
from pytest_django import DjangoAssertNumQueries

from scheduler import loading
from scheduler.core.decisions import SCORE_NAMES, SlotsTaken
from scheduler.loading import Loader, charges_to_load, load
from scheduler.models import Decision, SpoolCursor, UsageHour
from scheduler.spool import Attempt, Record, Spool
from tests.factories import make_choice, make_decision

pytestmark = pytest.mark.django_db


def finish(spool: Spool, request_id: str, **fields: object) -> None:
    spool.close(
        Record(request_id=request_id, arrived_at=1000.5, outcome="completed", **fields)  # type: ignore[arg-type]
    )


def stored() -> list[str]:
    return sorted(Decision.objects.values_list("request_id", flat=True))


def test_records_of_a_file_still_being_written_are_loaded_as_they_come(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    finish(spool, "a")
    assert load(tmp_path) == 1
    finish(spool, "b")
    assert load(tmp_path) == 1
    assert load(tmp_path) == 0
    assert stored() == ["a", "b"]
    spool.stop()


def test_a_closed_file_goes_with_its_cursor_once_loaded(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    finish(spool, "a")
    load(tmp_path)
    assert SpoolCursor.objects.count() == 1
    finish(spool, "b")
    spool.stop()
    assert load(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []
    assert SpoolCursor.objects.count() == 0
    assert stored() == ["a", "b"]


def test_a_line_still_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "boot-1.open"
    path.write_bytes(b'{"request_id":"a","arrived_at":1,"outcome":"completed"}\n{"request_id":"b",')
    assert load(tmp_path) == 1
    with path.open("ab") as file:
        file.write(b'"arrived_at":2,"outcome":"refused"}\n')
    assert load(tmp_path) == 1
    assert stored() == ["a", "b"]


def test_start_markers_are_no_records(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.open(Record(request_id="a", arrived_at=1.0))
    spool.announce()
    spool.announce()
    assert load(tmp_path) == 0
    assert stored() == []
    spool.stop()


def test_a_record_loaded_twice_is_there_once_and_the_first_stays(tmp_path: Path) -> None:
    make_decision("a", user="first")
    spool = Spool(tmp_path)
    finish(spool, "a", user="second")
    finish(spool, "b")
    spool.stop()
    load(tmp_path)
    assert stored() == ["a", "b"]
    assert Decision.objects.get(request_id="a").user == "first"


def test_rows_and_cursor_move_together_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path)
    finish(spool, "a")
    loader = Loader(tmp_path)

    def away(*_: object, **__: object) -> None:
        raise OperationalError("database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(SpoolCursor.objects, "bulk_create", away)
        with pytest.raises(OperationalError):
            loader.load()
    assert stored() == []
    assert loader.load() == 1
    assert stored() == ["a"]
    spool.stop()


def test_what_another_recorder_inserted_meanwhile_is_neither_doubled_nor_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_decision("a", user="first")
    spool = Spool(tmp_path)
    finish(spool, "a", user="second")
    finish(spool, "b")
    spool.stop()
    loader = Loader(tmp_path)
    with monkeypatch.context() as patch:
        # As it looked a moment before the other one committed.
        patch.setattr(loading, "_fresh", lambda entries: entries)
        with pytest.raises(OperationalError, match="Another recorder"):
            loader.load()
    assert stored() == ["a"]
    assert loader.load() == 2
    assert stored() == ["a", "b"]
    assert Decision.objects.get(request_id="a").user == "first"
    assert UsageHour.objects.get().requests == 1
    assert list(tmp_path.iterdir()) == []


def test_many_lines_are_inserted_in_bounded_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "BATCH_ROWS", 10)
    monkeypatch.setattr(loading, "READ_BYTES", 1000)
    sizes = []
    store = loading._store

    def counting(name: str, rows: list[loading.Entry], *others: Any) -> list[loading.Entry]:
        sizes.append(len(rows))
        return store(name, rows, *others)

    monkeypatch.setattr(loading, "_store", counting)
    spool = Spool(tmp_path)
    for number in range(105):
        finish(spool, f"r{number:03}")
    spool.stop()
    assert load(tmp_path) == 105
    assert len(stored()) == 105
    assert max(sizes) == 10
    assert sum(sizes) == 105


def test_what_an_outage_of_the_recorder_left_is_looked_through_in_bounded_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "BATCH_ROWS", 10)
    monkeypatch.setattr(loading, "READ_BYTES", 1000)
    make_decision("r003")
    spool = Spool(tmp_path)
    for number in range(105):
        finish(spool, f"r{number:03}", charged_tokens=number % 3, user_id=1)
    spool.stop()
    batches = list(charges_to_load(tmp_path))
    assert max(map(len, batches)) == 7  # of ten lines, those that cost something
    found = {one.request_id: one.charged_tokens for batch in batches for one in batch}
    assert len(found) == sum(map(len, batches)) == 70
    assert sum(found.values()) == 105
    load(tmp_path)
    assert list(charges_to_load(tmp_path)) == []


def test_a_line_that_was_written_again_for_its_lost_end_costs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = b'{"request_id":"a","arrived_at":1,"outcome":"completed","charged_tokens":5}\n'
    (tmp_path / "boot-1.jsonl").write_bytes(line * 2 + line.replace(b'"a"', b'"b"'))
    monkeypatch.setattr(loading, "BATCH_ROWS", 1)
    found = [one.request_id for batch in charges_to_load(tmp_path) for one in batch]
    assert found == ["a", "b"]


def test_what_a_broken_disk_left_without_a_line_end_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "READ_BYTES", 1000)
    path = tmp_path / "boot-1.jsonl"
    path.write_bytes(bytes(2500) + b'\n{"request_id":"a","arrived_at":1,"outcome":"completed"}\n')
    load(tmp_path)
    assert stored() == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["boot-1.bad"]


def test_a_line_that_is_no_record_is_set_aside_and_holds_up_nobody(tmp_path: Path) -> None:
    path = tmp_path / "boot-1.jsonl"
    path.write_bytes(
        b'nonsense\n\n{"request_id":"a","arrived_at":1,"outcome":"completed"}\n{"arrived_at":1}\n'
    )
    assert load(tmp_path) == 1
    assert stored() == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["boot-1.bad"]
    assert (tmp_path / "boot-1.bad").read_bytes() == b'nonsense\n{"arrived_at":1}\n'


def test_a_record_the_database_refuses_is_set_aside_and_holds_up_nobody(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    finish(spool, "a")
    finish(spool, "too-big", prompt_tokens=2**64)
    finish(spool, "before-the-calendar", ended_at=-1e15)
    finish(spool, "b")
    spool.stop()
    path = next(tmp_path.glob("*.jsonl"))
    path.write_bytes(path.read_bytes().replace(str(2**63 - 1).encode(), str(2**64).encode()))
    load(tmp_path)
    assert stored() == ["a", "b"]
    [bad] = tmp_path.iterdir()
    assert bad.suffix == ".bad"
    assert bad.read_bytes().count(b"\n") == 2


def test_nothing_new_asks_the_database_nothing(
    tmp_path: Path, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    spool = Spool(tmp_path)
    finish(spool, "a")
    loader = Loader(tmp_path)
    loader.load()
    with django_assert_num_queries(0):
        loader.load()
    spool.stop()


def test_a_row_carries_every_field_of_its_record(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.close(
        Record(
            request_id="r1",
            arrived_at=1000.5,
            outcome="failed",
            stream=True,
            decision=make_choice(
                failures=(
                    (3, "fail_window", "failed 2.0 s ago"),
                    (3, "capacity", SlotsTaken(2, 1, 3)),
                    (9, "model_available", "does not have m"),
                ),
                names={1: "a", 2: "b", 3: "c", 4: "in another room"},
                factor=0.5,
                user_group="student",
                ahead={"student\0": (2, 50.0)},
            ),
            attempts=[
                Attempt(backend="a", status=502, reason="upstream_error", started_at=1001.0),
            ],
            message="a\0b" * 3,
            model_requested="m" * 400,
            ended_at=1002.0,
        )
    )
    spool.stop()
    load(tmp_path)
    row = Decision.objects.get()
    assert row.stream is True
    assert row.client_request_id is None
    assert row.constraints == {
        "3": {"fail_window": "failed 2.0 s ago", "capacity": "2 + 1 of 3 slots in use"},
        "9": {"model_available": "does not have m"},
    }
    assert row.backend_names == {"1": "a", "2": "b", "3": "c"}
    assert row.selection_reason == "score"
    assert (row.user_group, row.user_weight, row.deprioritization_factor) == ("student", 1, 0.5)
    assert row.arrived_at == datetime(1970, 1, 1, 0, 16, 40, 500_000, tzinfo=UTC)
    assert row.ended_at == datetime(1970, 1, 1, 0, 16, 42, tzinfo=UTC)
    assert row.queued_at is None
    assert row.scores == {"1": 150.0, "2": 0.0}
    assert row.score_parts == {
        "1": dict(zip(SCORE_NAMES, [100.0, 50.0, 0, 0, 0, 0, 0], strict=True)),
        "2": dict.fromkeys(SCORE_NAMES, 0.0),
    }
    assert row.candidate_backends == [1, 2]
    assert row.attempts == [
        {
            "backend": "a",
            "status": 502,
            "reason": "upstream_error",
            "started_at": "1970-01-01T00:16:41+00:00",
            "ended_at": None,
        }
    ]
    assert row.message == "a\ufffdb" * 3
    assert row.model_requested == "m" * 300
    assert row.served_ahead == {"student\ufffd": [2, 50.0]}


def test_a_request_that_never_got_a_slot_has_no_figures_of_a_decision(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    finish(spool, "a", wait_reason="backends_full", position_at_arrival=4)
    spool.stop()
    load(tmp_path)
    row = Decision.objects.get()
    assert (row.candidate_backends, row.scores, row.constraints, row.backend_names) == (
        [], {}, {}, {},
    )  # fmt: skip
    assert (row.selection_reason, row.user_weight, row.priority) == ("", None, None)
    assert (row.wait_reason, row.position_at_arrival) == ("backends_full", 4)


def test_a_record_and_a_saved_decision_are_stored_alike(tmp_path: Path) -> None:
    """Loading writes plain SQL; what it writes is what the model would have written."""
    at = datetime(2026, 6, 1, 12, 0, 0, 250_000, tzinfo=UTC)
    choice = make_choice()
    make_decision(
        "a",
        arrived_at=at,
        status=200,
        attempts=[],
        candidate_backends=[1, 2],
        backend_names={"1": "a", "2": "b"},
        scores={"1": 150.0, "2": 0.0},
        score_parts=choice.score_parts,
        selection_reason="score",
        user_deficit=0.0,
        user_weight=1.0,
        user_recent_usage=0.0,
        burst_credits=0.0,
        deprioritization_factor=1.0,
        wait_bonus=0.0,
        priority=0.0,
    )
    spool = Spool(tmp_path)
    spool.close(
        Record(
            request_id="b",
            arrived_at=at.timestamp(),
            decision=choice,
            status=200,
            user="ada",
            dialect="openai",
            endpoint="chat",
            outcome="completed",
        )
    )
    spool.stop()
    load(tmp_path)
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM scheduler_decision ORDER BY request_id")
        names = [column[0] for column in cursor.description]
        saved, loaded = (dict(zip(names, row, strict=True)) for row in cursor.fetchall())
    for name in ("id", "request_id"):
        del saved[name], loaded[name]
    # Blanks in JSON mean nothing.
    assert _without_blanks(loaded) == _without_blanks(saved)


def _without_blanks(row: dict[str, object]) -> dict[str, object]:
    return {k: v.replace(" ", "") if isinstance(v, str) else v for k, v in row.items()}


def test_records_and_their_decisions_fill_every_column() -> None:
    columns = {field.name for field in Decision._meta.fields} - {"id"}
    decided = set(loading.explained(make_choice()))
    assert decided == set(loading._NOT_DECIDED)
    assert columns == decided | set(Record.__struct_fields__) - {"decision", "traceparent"}
