"""Records on disk: complete, crash-proof, and never in a request's way."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from scheduler import spool as spool_module
from scheduler.spool import MARKER, Attempt, Record, Spool, decode, encode
from tests.factories import make_choice


def record(request_id: str = "r1", **fields: object) -> Record:
    return Record(request_id=request_id, arrived_at=1000.5, **fields)  # type: ignore[arg-type]


def finish(spool: Spool, one: Record) -> None:
    one.outcome, one.status = "completed", 200
    spool.close(one)


def lines(folder: Path, pattern: str = "*") -> list[bytes]:
    return [
        line for path in sorted(folder.glob(pattern)) for line in path.read_bytes().splitlines()
    ]


def finals(folder: Path) -> list[Record]:
    return [decode(line) for line in lines(folder) if line and not line.startswith(MARKER)]


def crash(spool: Spool) -> None:
    """What the end of a process does to its file: the lock goes, nothing else happens."""
    os.close(spool._file.handle)


def test_a_short_request_costs_one_line(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    one = record()
    spool.open(one)
    spool.announce()
    finish(spool, one)
    spool.announce()
    spool.announce()
    assert [decode(line) for line in lines(tmp_path)] == [one]
    spool.stop()


def test_a_request_open_at_the_second_announce_gets_one_start_marker(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    one = record(user="ada")
    spool.open(one)
    spool.announce()
    assert lines(tmp_path) == []
    for _ in range(3):
        spool.announce()
    assert lines(tmp_path) == [b'{"open":{"request_id":"r1","arrived_at":1000.5,"user":"ada"}}']
    finish(spool, one)
    assert len(lines(tmp_path)) == 2
    spool.stop()


def test_a_forwarded_request_has_its_start_marker_at_the_flush_and_once(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for number in range(3):
        one = record(f"r{number}")
        spool.open(one)
        for _ in range(number):
            spool.announce()
        one.selected_backend = "a"
        before = lines(tmp_path)
        spool.mark(one)
        assert lines(tmp_path) == before
        spool.flush()
        assert b'"selected_backend":"a"' in lines(tmp_path)[-1]
    for _ in range(3):
        spool.announce()
    # The last one had one before it was forwarded, as it had been waiting.
    assert [line.startswith(MARKER) for line in lines(tmp_path)] == [True] * 4
    spool.stop()


def test_a_final_record_is_in_the_file_when_close_returns(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    one = record(
        decision=make_choice(points=[(1, (150.0,)), (2, (80.0,))], names={1: "a"}),
        attempts=[Attempt(backend="a", status=502, reason="upstream_error", started_at=1000.75)],
    )
    spool.open(one)
    finish(spool, one)
    assert finals(tmp_path) == [one]
    spool.stop()


def test_folder_and_file_are_the_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    spool = Spool(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]
    spool.stop()


def test_stopping_closes_the_file_and_leaves_none_when_nothing_was_written(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.stop()
    assert list(tmp_path.iterdir()) == []
    spool = Spool(tmp_path)
    finish(spool, record())
    spool.stop()
    assert [path.suffix for path in tmp_path.iterdir()] == [".jsonl"]


def test_what_a_dead_process_left_open_is_closed_as_aborted(tmp_path: Path) -> None:
    dead = Spool(tmp_path)
    done, running = record("done"), record("running", user="ada", dispatched_at=1001.0)
    for one in (done, running):
        dead.open(one)
    dead.announce()
    dead.announce()
    finish(dead, done)
    crash(dead)

    spool = Spool(tmp_path)
    [kept, aborted] = sorted(finals(tmp_path), key=lambda one: one.request_id)
    assert kept == done
    assert (aborted.request_id, aborted.outcome, aborted.message, aborted.reason) == (
        "running",
        "aborted",
        "the router process died",
        "",
    )
    assert aborted.user == "ada"
    assert aborted.dispatched_at == 1001.0
    assert aborted.status is None
    assert aborted.ended_at is not None
    assert aborted.ended_at > 1_700_000_000
    assert [path.suffix for path in tmp_path.iterdir()].count(".open") == 1
    spool.stop()
    Spool(tmp_path).stop()
    assert len(finals(tmp_path)) == 2


def test_a_torn_last_line_is_no_record_but_its_request_is_aborted(tmp_path: Path) -> None:
    dead = Spool(tmp_path)
    one = record()
    dead.open(one)
    dead.announce()
    dead.announce()
    one.outcome = "completed"
    os.write(dead._file.handle, encode(one)[:30])
    crash(dead)
    spool = Spool(tmp_path)
    spool.stop()
    [aborted] = [decode(line) for line in lines(tmp_path, f"{spool._boot}*")]
    assert aborted.outcome == "aborted"


def test_a_living_process_is_left_alone(tmp_path: Path) -> None:
    living = Spool(tmp_path)
    one = record()
    living.open(one)
    living.announce()
    living.announce()
    other = Spool(tmp_path)
    other.stop()
    assert finals(tmp_path) == []
    finish(living, one)
    living.stop()
    assert finals(tmp_path) == [one]


def test_a_killed_process_loses_nothing_that_was_closed(tmp_path: Path) -> None:
    """A real process, killed by SIGKILL without a sync."""
    script = """
import os, signal, sys
from pathlib import Path
from scheduler.spool import Record, Spool
spool = Spool(Path(sys.argv[1]))
for number in range(100):
    record = Record(request_id=str(number), arrived_at=1.0)
    spool.open(record)
    if number < 90:
        record.outcome = "completed"
        spool.close(record)
spool.announce()
spool.announce()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -9
    Spool(tmp_path).stop()
    outcomes = {int(one.request_id): one.outcome for one in finals(tmp_path)}
    assert outcomes == {n: "completed" if n < 90 else "aborted" for n in range(100)}


def test_a_full_file_is_followed_by_one_that_names_what_is_still_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "MAX_FILE_BYTES", 200)
    spool = Spool(tmp_path)
    long, short = record("long"), record("short", message="x" * 200)
    spool.open(long)
    spool.announce()
    spool.announce()
    finish(spool, short)
    spool.announce()
    spool.sync()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl", ".open"]
    # The closed file is loaded and deleted; then the process dies.
    next(tmp_path.glob("*.jsonl")).unlink()
    crash(spool)
    Spool(tmp_path).stop()
    assert [(one.request_id, one.outcome) for one in finals(tmp_path)] == [("long", "aborted")]


def test_an_old_file_is_followed_by_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path)
    finish(spool, record())
    spool.announce()
    spool.sync()
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(spool_module, "MAX_FILE_SECONDS", 0)
    spool.announce()
    spool.sync()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl", ".open"]
    spool.stop()


class Disk:
    """Stands for ``os.write`` on a disk with ``room`` bytes left."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.writes = 0
        self._write = os.write

    def write(self, handle: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(handle, data[: self.room])
        self.writes += 1
        self.room -= written
        return written


def test_what_is_told_before_a_flush_is_written_by_one_write_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path)
    disk = Disk(room=10_000)
    monkeypatch.setattr(os, "write", disk.write)
    records = [record(str(number)) for number in range(3)]
    for one in records:
        spool.mark(one)
        spool.close(one, at_once=False)
    assert disk.writes == 0
    spool.flush()
    spool.flush()
    assert disk.writes == 1
    assert [line.startswith(MARKER) for line in lines(tmp_path)] == [True, False] * 3
    assert [decode(line) for line in lines(tmp_path)[1::2]] == records
    spool.stop()


@pytest.mark.parametrize("ending", ["announce", "close", "stop"])
def test_what_nobody_flushes_is_written_by_the_next_one_who_writes(
    tmp_path: Path, ending: str
) -> None:
    spool = Spool(tmp_path)
    spool.close(record("first"), at_once=False)
    assert lines(tmp_path) == []
    if ending == "close":
        spool.close(record("second"))
    else:
        getattr(spool, ending)()
    assert decode(lines(tmp_path)[0]) == record("first")
    if ending != "stop":
        spool.stop()


@pytest.mark.parametrize("room", range(0, 200, 7))
def test_of_a_write_that_was_cut_short_the_whole_lines_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    spool = Spool(tmp_path)
    disk = Disk(room=room)
    monkeypatch.setattr(os, "write", disk.write)
    records = [record(str(number)) for number in range(4)]
    for one in records:
        spool.close(one, at_once=False)
    spool.flush()
    disk.room = 10_000
    spool.announce()
    spool.stop()
    whole = [decode(line) for line in lines(tmp_path) if line.endswith(b"}")]
    # One that lacks nothing but its line's end comes twice, which the loader is used to.
    size = len(encode(records[0]))
    cut, missing = divmod(room, size)[0], size - room % size
    again = [records[cut]] if missing == 1 and cut < len(records) else []
    assert whole == records[:cut] + again + records[cut:]
    assert spool.lines_lost == 0


def test_a_full_disk_stops_no_request_and_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path)
    disk = Disk(room=40)
    monkeypatch.setattr(os, "write", disk.write)
    records = [record(str(number)) for number in range(5)]
    for one in records:
        spool.open(one)
        finish(spool, one)
    spool.announce()
    assert spool.write_errors == 1
    disk.room = 10_000
    spool.announce()
    spool.stop()
    whole = [line for line in lines(tmp_path) if line.endswith(b"}")]
    assert [decode(line) for line in whole] == records
    assert spool.lines_lost == 0
    assert [r.message for r in caplog.records] == [
        "Cannot write records, kept in memory until it works: [Errno 28] No space left on device"
    ]


def test_lines_kept_in_memory_are_bounded_and_the_lost_ones_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "MAX_BACKLOG_LINES", 3)
    spool = Spool(tmp_path)
    disk = Disk(room=0)
    monkeypatch.setattr(os, "write", disk.write)
    for number in range(5):
        finish(spool, record(str(number)))
    disk.room = 10_000
    spool.announce()
    assert [one.request_id for one in finals(tmp_path)] == ["2", "3", "4"]
    assert spool.lines_lost == 2
    spool.stop()


def test_texts_and_numbers_that_json_cannot_carry_are_replaced(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    finish(
        spool,
        record(
            message="half \ud83d",
            prompt_tokens=2**70,
            decision=make_choice(ahead={"a\udc00": (1, 2.0)}),
            attempts=[Attempt(backend="\ud800")],
        ),
    )
    spool.stop()
    [one] = finals(tmp_path)
    assert one.message == "half ?"
    assert one.prompt_tokens == 2**63 - 1
    assert one.decision == make_choice(
        points=[(1, (100, 50, 0, 0, 0, 0, 0)), (2, (0,) * 7)], ahead={"a?": (1, 2)}
    )
    assert one.attempts[0].backend == "?"


def test_a_record_of_a_newer_version_is_read_without_its_new_fields() -> None:
    line = encode(record())
    assert decode(line.replace(b"{", b'{"new_field":1,', 1)) == record()
    with pytest.raises(msgspec.DecodeError):
        decode(b'{"arrived_at":1.0}')
