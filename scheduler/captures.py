"""Captured prompts and answers on their way from the gateway into the database.

They never lie on the disk in plain: a gateway encrypts them in a thread of its own, twice a second,
before it writes a file; the recorder loads the file and deletes it. What a process that is killed
had in memory is lost, and so is what comes while the folder is full: a request waits for none of
this. Each is deleted at its own date (``retention``), and with its key.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from accounts.captures import note
from accounts.models import ApiKey
from backends.crypto import seal, unseal
from scheduler.models import Capture

logger = logging.getLogger(__name__)

#: The folder, in the spool's.
CAPTURES = "captures"
#: What is kept of a body and of an answer, in bytes.
MOST_BYTES = 256 * 1024
#: Captures that wait in memory until they are written.
MOST_WAITING = 256
#: Captures of one file, which is read as a whole.
FILE_ROWS = 16
#: Bytes of files that wait for the recorder.
MOST_SPOOLED_BYTES = 1 << 30
COMPLAIN_SECONDS = 60.0
#: A file that is not whole after so many seconds is of a process that has died.
LEFT_SECONDS = 3600.0


class Captured(msgspec.Struct, kw_only=True):
    """What becomes a row of captures. Times are epoch seconds."""

    request_id: str
    key_id: int
    at: float
    delete_at: float
    request: bytes
    request_bytes: int
    answer: bytes
    answer_bytes: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Captured).decode


class CaptureSpool:
    """``put`` belongs to the event loop's thread, ``write`` to any other.

    The folder is made when there is something to put into it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lost = 0
        self._waiting: deque[Captured] = deque()
        self._writing = threading.Lock()  # the last ``write`` may begin while one is under way
        self._complained_at = -COMPLAIN_SECONDS

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def put(self, captured: Captured) -> None:
        """To be written within half a second."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(captured)
        else:
            self._lose(1, "they come faster than they can be written")

    def write(self) -> None:
        """Encrypt what waits and write it, each file whole or not at all."""
        with self._writing:
            while count := min(FILE_ROWS, len(self._waiting)):
                self._write([self._waiting.popleft() for _ in range(count)])

    def _write(self, found: list[Captured]) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            if sum(map(_size, self.directory.iterdir())) > MOST_SPOOLED_BYTES:
                self._lose(len(found), f"{self.directory} is full")
                return
            _write_whole(self.directory, b"".join(seal(_encode(one)) + b"\n" for one in found))
        except OSError as error:
            self._lose(len(found), str(error))

    def _lose(self, count: int, why: str) -> None:
        self.lost += count
        if time.monotonic() - self._complained_at >= COMPLAIN_SECONDS:
            self._complained_at = time.monotonic()
            logger.error("%d captured prompts are lost so far: %s", self.lost, why)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # loaded meanwhile, or renamed by another gateway process


def _write_whole(directory: Path, lines: bytes) -> None:
    new = directory / f"{time.time_ns():x}-{uuid.uuid4().hex[:12]}.new"
    try:
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(lines)
        new.rename(new.with_suffix(".sealed"))
    except OSError:
        new.unlink(missing_ok=True)
        raise


def kept() -> QuerySet[Capture]:
    """What is stored and not past its date, deleted or not yet; without reading it."""
    return Capture.objects.defer("request", "answer").filter(delete_at__gt=timezone.now())


def capture_of(request_id: str) -> Capture | None:
    """What is stored of a request, without reading it."""
    return kept().filter(request_id=request_id).first()


@transaction.atomic
def read_capture(request_id: str) -> Capture | None:
    """The same to be read, which the key's history then says. None: nothing is stored of it."""
    found = kept().defer(None).filter(request_id=request_id).first()
    if found is not None:
        note(ApiKey.objects.get(pk=found.key_id), f"captured prompt of {request_id} read")
    return found


def text_of(data: bytes | None) -> str | None:
    """What is stored, as text; None where it is none. A character that was cut is left out."""
    try:
        return None if data is None else getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return None


def load_captures(directory: Path) -> int:
    """Insert what the files in ``directory`` hold, and delete them; returns how many rows are new.

    Left out is what is past its date, whose key is gone, and what was captured before all of its
    key's was deleted. Raises: DatabaseError when the database cannot be had.
    """
    loaded = 0
    for path in sorted(directory.iterdir()) if directory.exists() else ():
        if path.suffix == ".sealed":
            loaded += _insert(_read(path))
            path.unlink()
        elif path.exists() and path.stat().st_mtime < time.time() - LEFT_SECONDS:
            path.unlink()
    return loaded


def _read(path: Path) -> list[Captured]:
    lines = path.read_bytes().splitlines()
    found = [_decode(plain) for line in lines if (plain := unseal(line)) is not None]
    if unread := len(lines) - len(found):
        logger.error("%d captured prompts can be read with no key that is set", unread)
    return found


@transaction.atomic
def _insert(found: Iterable[Captured]) -> int:
    # Held until the rows are in: whoever deletes a key meanwhile deletes them, too.
    keys = ApiKey.objects.select_for_update(no_key=True).filter(
        pk__in={one.key_id for one in found}
    )
    deleted = dict(keys.values_list("pk", "captures_deleted_at"))
    now = timezone.now()
    rows = [
        row
        for one in found
        if one.key_id in deleted
        and (row := _row(one)).delete_at > now
        and ((before := deleted[one.key_id]) is None or row.at > before)
    ]
    Capture.objects.bulk_create(rows, ignore_conflicts=True)
    return len(rows)


def _row(one: Captured) -> Capture:
    return Capture(
        request_id=one.request_id,
        key_id=one.key_id,
        at=datetime.fromtimestamp(one.at, UTC),
        delete_at=datetime.fromtimestamp(one.delete_at, UTC),
        request=one.request,
        request_bytes=one.request_bytes,
        answer=one.answer,
        answer_bytes=one.answer_bytes,
    )
