"""Decisions for others besides the database: lines of JSON to a file, standard output or a webhook.

The recorder writes them in the transaction that stores their records, before it commits: whatever
happens, a decision that is in the database has been written, and what is written again after a
crash or a rollback carries the same ``request_id``. For a webhook they go into files of an outbox
first, from which a thread sends them, oldest first; its position outlives a restart.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import httpx
import msgspec
from django.conf import settings

from scheduler.loading import explained
from scheduler.pulse import replace_file
from scheduler.spool import Record, encodable

logger = logging.getLogger(__name__)

STDOUT = "stdout"
SEGMENT_BYTES = 16 * 1024 * 1024
BATCH_BYTES = 1024 * 1024
TIMEOUT_SECONDS = 10.0
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0
COMPLAIN_SECONDS = 60.0


class Stream(Protocol):
    """Where decisions go."""

    @property
    def lost(self) -> int:
        """Decisions that could not be written."""

    @property
    def waiting_bytes(self) -> int:
        """What is written and not sent."""

    def write(self, records: list[Record]) -> None:
        """Never raises: a broken stream holds no records up."""

    def stop(self) -> None:
        """No other call may follow."""


def line_of(record: Record) -> bytes:
    """A decision as one line: the record's fields, and what the scheduler's choice was."""
    fields = msgspec.structs.asdict(record)
    del fields["decision"]
    if record.decision is not None:
        fields |= explained(record.decision)
    try:
        return msgspec.json.encode(fields) + b"\n"
    except (UnicodeEncodeError, OverflowError):
        return msgspec.json.encode(encodable(fields)) + b"\n"


def open_stream() -> Stream | None:
    """What ``DECISION_STREAM`` names; None: nothing. Raises: OSError."""
    target = settings.DECISION_STREAM
    if not target:
        return None
    if target == STDOUT:
        return FileStream(sys.stdout.buffer)
    if target.startswith(("http://", "https://")):
        return Webhook(
            target,
            settings.DECISION_STREAM_SECRET,
            settings.STATE_DIR / "outbox",
            int(settings.DECISION_STREAM_MAX_BYTES),
        )
    return FileStream(Path(target))


class FileStream:
    """A file, which is opened for each batch, so that it may be rotated; or an open one."""

    waiting_bytes = 0

    def __init__(self, target: Path | BinaryIO) -> None:
        self._target = target
        self.lost = 0

    def write(self, records: list[Record]) -> None:
        data = b"".join(map(line_of, records))
        try:
            if isinstance(self._target, Path):
                _append(self._target, data)
            else:
                self._target.write(data)
                self._target.flush()
        except OSError as error:
            self.lost += len(records)
            logger.error("%d decisions were not written to the stream: %s", len(records), error)

    def stop(self) -> None:
        pass


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class Webhook:
    """Posts batches of lines, signed, again and again until each is taken.

    ``X-MindRouter-Signature`` is ``sha256=`` and the HMAC-SHA256, by the secret, of the value of
    ``X-MindRouter-Timestamp``, a full stop, and the body.
    """

    def __init__(self, url: str, secret: str, folder: Path, most_bytes: int) -> None:
        self._url = url
        self._secret = secret.encode()
        self._outbox = Outbox(folder, most_bytes)
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._complained_at = float("-inf")
        self._sender = threading.Thread(target=self._send_all, name="decision-stream", daemon=True)
        self._sender.start()

    @property
    def lost(self) -> int:
        return self._outbox.lost

    @property
    def waiting_bytes(self) -> int:
        return self._outbox.waiting_bytes()

    def write(self, records: list[Record]) -> None:
        self._outbox.put(records)
        self._news.set()

    def stop(self) -> None:
        """What is not sent stays in the outbox for the next start."""
        self._stopping.set()
        self._news.set()
        self._sender.join(TIMEOUT_SECONDS + 1.0)

    def _send_all(self) -> None:
        failures = 0
        with httpx.Client(timeout=TIMEOUT_SECONDS) as client:
            while not self._stopping.is_set():
                try:
                    failures = 0 if self._send_some(client) else failures + 1
                except OSError as error:
                    failures += 1
                    self._complain(f"the outbox cannot be used: {error}")
                if failures:
                    pause = FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10)
                    self._stopping.wait(min(LONGEST_PAUSE_SECONDS, pause))

    def _send_some(self, client: httpx.Client) -> bool:
        """Wait for a batch and send it. False: it was not taken."""
        self._news.clear()
        batch = self._outbox.next_batch()
        if not batch:
            self._news.wait()
            return True
        if not self._post(client, batch):
            return False
        self._outbox.sent(len(batch))
        return True

    def _post(self, client: httpx.Client, batch: bytes) -> bool:
        timestamp = str(int(time.time()))
        headers = {
            "Content-Type": "application/x-ndjson",
            "X-MindRouter-Timestamp": timestamp,
            "X-MindRouter-Signature": signature(self._secret, timestamp, batch),
            "X-MindRouter-Delivery": self._outbox.place(),
        }
        try:
            answer = client.post(self._url, content=batch, headers=headers)
            if answer.is_success:
                return True
            why = f"it answered {answer.status_code}"
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
        self._complain(why)
        return False

    def _complain(self, why: str) -> None:
        if time.monotonic() - self._complained_at >= COMPLAIN_SECONDS:
            self._complained_at = time.monotonic()
            logger.warning("Decisions wait for the webhook: %s", why)


def signature(secret: bytes, timestamp: str, body: bytes) -> str:
    """What a receiver compares with the header, after looking at the timestamp's age."""
    return (
        "sha256=" + hmac.new(secret, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    )


class Outbox:
    """Files of lines, numbered, of which those that are sent are deleted.

    One thread puts, another one takes. Each process begins a file of its own, so that half a line
    of a dead one is nobody's beginning.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self.lost = 0
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        numbers = sorted(self._numbers())
        self._reading, self._offset = self._stored_position()
        self._writing = max([self._reading, *numbers]) + 1
        if numbers and self._reading < numbers[0]:
            self._reading, self._offset = numbers[0], 0

    # ---- the recorder's thread

    def put(self, records: list[Record]) -> None:
        data = b"".join(map(line_of, records))
        try:
            if self.waiting_bytes() + len(data) > self._most_bytes:
                raise OSError(f"{self._most_bytes} bytes wait already")
            path = self._path(self._writing)
            if path.exists() and path.stat().st_size >= SEGMENT_BYTES:
                self._writing += 1
            _append(self._path(self._writing), data)
        except OSError as error:
            self.lost += len(records)
            logger.error("%d decisions were not put into the outbox: %s", len(records), error)

    def waiting_bytes(self) -> int:
        waiting = 0
        for number in self._numbers():
            with contextlib.suppress(FileNotFoundError):
                waiting += self._path(number).stat().st_size
        return max(0, waiting - self._offset)

    # ---- the sender's thread

    def next_batch(self) -> bytes:
        """Whole lines that are not sent; empty: there are none."""
        while True:
            is_last = self._reading >= self._writing  # asked first: it may become full meanwhile
            data = self._read()
            end = data.rfind(b"\n") + 1
            if end or is_last:
                return data[:end]
            self._path(self._reading).unlink(missing_ok=True)
            self._move(self._reading + 1, 0)

    def sent(self, length: int) -> None:
        self._move(self._reading, self._offset + length)

    def place(self) -> str:
        """Where the next batch begins; the same for each attempt at it."""
        return f"{self._reading}-{self._offset}"

    def _read(self) -> bytes:
        try:
            with self._path(self._reading).open("rb") as file:
                file.seek(self._offset)
                # At least one line, however long it is.
                return file.read(BATCH_BYTES) + file.readline()
        except FileNotFoundError:
            return b""

    def _move(self, number: int, offset: int) -> None:
        self._reading, self._offset = number, offset
        replace_file(self._folder / "position.json", msgspec.json.encode((number, offset)))

    def _stored_position(self) -> tuple[int, int]:
        try:
            stored = (self._folder / "position.json").read_bytes()
            return msgspec.json.decode(stored, type=tuple[int, int])
        except (FileNotFoundError, msgspec.MsgspecError):
            return 0, 0

    def _numbers(self) -> Iterator[int]:
        return (int(path.stem) for path in self._folder.glob("*.jsonl"))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.jsonl"
