"""Records of requests, appended to files on disk until the recorder has them in the database.

One JSON line per finished request. Before a request is forwarded it gets a start marker,
``{"open": {…}}``, so that the next process can close its record if this one dies; one that still
waits some 20 ms after it came gets one too. So no request reaches a backend without leaving a
record, whatever happens; only what a dying process takes with it from its own queue within 40 ms of
its arrival leaves none. Files are named ``<boot>-<number>``: ``.open`` while a process writes to
them (it holds a lock on the file for as long as it lives), ``.jsonl`` once closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from scheduler.core.decisions import Decision

logger = logging.getLogger(__name__)

MARKER = b'{"open":'
MAX_FILE_BYTES = 16 * 1024 * 1024
MAX_FILE_SECONDS = 3600.0
MAX_BACKLOG_LINES = 20_000
DIED = "the router process died"


class Attempt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One try at one backend. Times are epoch seconds."""

    backend: str
    status: int | None = None
    reason: str = ""
    started_at: float | None = None
    ended_at: float | None = None


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What becomes a row of decisions. Times are epoch seconds, None: not reached.

    The scheduler's decision goes in as the tuple that it is: spread over fields of its own, and
    explained, it took 5 µs of each request's time; the recorder has that time (``loading``).
    """

    request_id: str
    arrived_at: float
    client_request_id: str | None = None
    traceparent: str = ""  # the context of the client's trace, for spans
    user_id: int | None = None
    user: str = ""
    key_id: int | None = None
    group: str = ""
    end_user: str = ""
    task: str = ""
    model_requested: str = ""
    model_served: str = ""
    dialect: str = ""
    endpoint: str = ""
    stream: bool = False

    status: int | None = None
    outcome: str = ""
    reason: str = ""
    message: str = ""
    limits_shadowed: tuple[dict[str, Any], ...] = ()

    selected_backend_id: int | None = None
    selected_backend: str = ""
    decision: Decision | None = None  # of the latest attempt
    attempts: list[Attempt] = []
    wait_reason: str = ""
    position_at_arrival: int | None = None

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    usage_estimated: bool = False
    charged_tokens: float = 0.0

    queued_at: float | None = None
    dispatched_at: float | None = None
    first_byte_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    configuration_version: int | None = None


class _Marker(msgspec.Struct):
    open: Record


_encoder = msgspec.json.Encoder()
_record_decoder = msgspec.json.Decoder(Record)
_marker_decoder = msgspec.json.Decoder(_Marker)


def encode(record: Record | _Marker) -> bytes:
    """The record, or its start marker, as one line."""
    try:
        return _encoder.encode(record) + b"\n"
    except (UnicodeEncodeError, OverflowError):
        # Half a surrogate pair or a number beyond 64 bits, from a client's or backend's JSON.
        return _encoder.encode(encodable(msgspec.structs.asdict(record))) + b"\n"


def decode(line: bytes) -> Record:
    """The record of a line of ``encode``. Raises: msgspec.DecodeError, UnicodeDecodeError."""
    return _record_decoder.decode(line)


def encodable(value: Any) -> Any:
    """The same with what JSON cannot say replaced."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case int():
            return max(-(2**63), min(value, 2**63 - 1))
        case msgspec.Struct():
            return encodable(msgspec.structs.asdict(value))
        case dict():
            return {encodable(key): encodable(item) for key, item in value.items()}
        case list() | tuple():
            return [encodable(item) for item in value]
    return value


class _File:
    """A spool file being written; locked, so that others can tell that its writer lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Locked before it gets its name, so that nobody ever sees it unlocked.
        new = path.with_suffix(".new")
        self.handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        fcntl.flock(self.handle, fcntl.LOCK_EX)
        new.rename(path)
        self.size = 0
        self.opened_at = time.monotonic()

    def finish(self) -> None:
        """Make it durable and mark it closed; an empty file is removed."""
        try:
            os.fsync(self.handle)
            if self.size:
                self.path.rename(self.path.with_suffix(".jsonl"))
            else:
                self.path.unlink()
        finally:
            os.close(self.handle)


class Spool:
    """The spool of one process.

    All belongs to one thread, the event loop's, but for ``sync`` and, behind all else, ``stop``. A
    full or broken disk never raises here: lines are kept in memory, the oldest are dropped beyond a
    bound, and writing is tried again with each ``announce``.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.write_errors = 0
        self.lines_lost = 0
        self._boot = f"{int(time.time()):x}-{uuid.uuid4().hex[:12]}"
        self._number = 0
        self._open: dict[str, Record] = {}
        self._fresh: dict[str, Record] = {}  # without a marker so far
        self._due: dict[str, Record] = {}  # likewise, and to get one at the next ``announce``
        self._lines: list[bytes] = []  # told, to be written by the next ``flush``
        self._backlog: deque[bytes] = deque(maxlen=MAX_BACKLOG_LINES)
        self._torn = False
        self._dirty = False
        self._complained_at = -60.0
        self._retired: list[_File] = []
        self._syncing = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = self._new_file()
        self._recover()

    def open(self, record: Record) -> None:
        """A request has come. A start marker follows if it is still open at the second
        ``announce`` from now."""
        self._open[record.request_id] = self._fresh[record.request_id] = record

    def mark(self, record: Record) -> None:
        """It is about to be forwarded: its start marker is with the operating system once ``flush``
        returns, also if it had one before, which could not say where it goes."""
        self._unannounce(record)
        self._lines.append(_marker(record))

    @property
    def unwritten(self) -> int:
        """Lines that are kept in memory until the disk takes them."""
        return len(self._backlog)

    @property
    def is_full(self) -> bool:
        """Whether the next line that is kept in memory costs another one."""
        return len(self._backlog) == MAX_BACKLOG_LINES

    def open_record(self, request_id: str) -> Record | None:
        """The record of a request that has not ended, as far as it is filled in."""
        return self._open.get(request_id)

    def open_records(self) -> list[Record]:
        """The records of all that have not ended."""
        return list(self._open.values())

    def close(self, record: Record, *, at_once: bool = True) -> None:
        """A request has ended. Its final record is with the operating system on return; if not
        ``at_once``, then once ``flush`` returns."""
        self._open.pop(record.request_id, None)
        self._unannounce(record)
        self._lines.append(encode(record))
        if at_once:
            self.flush()

    def flush(self) -> None:
        """Write what was told: one write for all of it, as each is a system call."""
        if self._lines:
            lines, self._lines = self._lines, []
            self._write(lines)

    def _unannounce(self, record: Record) -> None:
        if self._fresh.pop(record.request_id, None) is None:
            self._due.pop(record.request_id, None)

    def announce(self) -> None:
        """Write the start markers that are due and what could not be written before; change to a
        new file when this one is old. To be called about every 20 ms."""
        self._lines += map(_marker, self._due.values())
        self.flush()
        self._due, self._fresh = self._fresh, {}
        if self._backlog:
            self._flush_backlog()
        file = self._file
        if file.size >= MAX_FILE_BYTES or (
            file.size and time.monotonic() - file.opened_at >= MAX_FILE_SECONDS
        ):
            self._rotate()

    def sync(self) -> None:
        """Make all that was written durable. Blocks for the disk: call it from a thread."""
        with self._syncing:
            try:
                while self._retired:
                    self._retired.pop().finish()
                if self._dirty:
                    self._dirty = False
                    os.fsync(self._file.handle)
            except OSError as error:
                self._complain(error)

    def stop(self) -> None:
        """Write and sync what is left and close the file. No other call may follow."""
        self.flush()
        if self._backlog:
            self._flush_backlog()
        self.lines_lost += len(self._backlog)
        self._retired.append(self._file)
        self._dirty = False
        self.sync()

    # ---- writing

    def _write(self, lines: Sequence[bytes]) -> None:
        if self._backlog:
            self._keep(lines)
            return
        data = b"".join(lines)
        try:
            written = os.write(self._file.handle, data)
        except OSError as error:
            self._keep(lines)
            self._complain(error)
            return
        self._file.size += written
        self._dirty = True
        if written < len(data):
            self._keep_rest(lines, written)

    def _keep_rest(self, lines: Sequence[bytes], written: int) -> None:
        """Of these lines only so many bytes were written; those that are whole are not again."""
        for number, line in enumerate(lines):
            if written < len(line):
                self._torn = written > 0
                self._keep(lines[number:])
                return
            written -= len(line)

    def _keep(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            if len(self._backlog) == MAX_BACKLOG_LINES:
                self.lines_lost += 1
            self._backlog.append(line)

    def _flush_backlog(self) -> None:
        """Write the kept lines in order, as far as it goes. A torn line is ended first, and
        written again as a whole; the loader skips its first part."""
        waiting, self._backlog = self._backlog, deque(maxlen=MAX_BACKLOG_LINES)
        while waiting and not self._backlog:
            line = waiting.popleft()
            torn, self._torn = self._torn, False
            self._write([b"\n" + line if torn else line])
        self._backlog.extend(waiting)

    def _complain(self, error: OSError) -> None:
        self.write_errors += 1
        if time.monotonic() - self._complained_at >= 60:
            self._complained_at = time.monotonic()
            logger.error("Cannot write records, kept in memory until it works: %s", error)

    # ---- files

    def _new_file(self) -> _File:
        self._number += 1
        return _File(self.directory / f"{self._boot}-{self._number}.open")

    def _rotate(self) -> None:
        """Go on in a new file, which gets a marker for every open request: the old one is deleted
        once it is loaded."""
        old = self._file
        try:
            self._file = self._new_file()
        except OSError as error:
            self._complain(error)
            return
        self._retired.append(old)
        waiting = self._fresh.keys() | self._due.keys()
        self._lines += [_marker(one) for key, one in self._open.items() if key not in waiting]
        self.flush()

    def _recover(self) -> None:
        """Close the records that dead processes left open, then those processes' files."""
        with contextlib.ExitStack() as locks:
            left = [path for path in sorted(self.directory.glob("*.open")) if _claim(path, locks)]
            open_records: dict[str, Record] = {}
            closed: set[str] = set()
            for path in left:
                _read_left(path, open_records, closed)
            now = time.time()
            for request_id in open_records.keys() - closed:
                record = open_records[request_id]
                record.outcome, record.message, record.ended_at = "aborted", DIED, now
                self._lines.append(encode(record))
            self.flush()
            self.sync()
            for path in left:
                path.rename(path.with_suffix(".jsonl"))


def _marker(record: Record) -> bytes:
    return encode(_Marker(record))


def _claim(path: Path, locks: contextlib.ExitStack) -> bool:
    """Lock a file whose writer is dead, until ``locks`` ends. False: it has an owner."""
    try:
        file = locks.enter_context(path.open("rb"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return False
    return path.exists()  # else another process recovered it before we had the lock


def _read_left(path: Path, open_records: dict[str, Record], closed: set[str]) -> None:
    """Sort a dead process's lines into started and finished ones; broken lines are passed over."""
    for line in path.read_bytes().splitlines():
        try:
            if line.startswith(MARKER):
                record = _marker_decoder.decode(line).open
                open_records[record.request_id] = record
            elif line:
                closed.add(decode(line).request_id)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
