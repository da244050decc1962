"""Spool files into the database: what ``manage.py runrecorder`` repeats."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from django.db import DatabaseError, DataError, IntegrityError, models, transaction

from scheduler.models import Decision, SpoolCursor
from scheduler.spool import MARKER, Record, decode

logger = logging.getLogger(__name__)

BATCH_ROWS = 500
READ_BYTES = 4 * 1024 * 1024
_COLUMNS = Decision._meta.fields  # noqa: SLF001  Django's documented way
_FIELDS = tuple(column.name for column in _COLUMNS if column.name != "id")
_TIMES = {column.name for column in _COLUMNS if isinstance(column, models.DateTimeField)}
_LENGTHS = {column.name: column.max_length for column in _COLUMNS}
#: What the database says to one row that it will not take, whatever its state.
_REFUSALS = (DataError, IntegrityError, ValueError, TypeError, OverflowError)


def load(directory: Path) -> int:
    """Insert what the spool files in ``directory`` have beyond the stored cursors.

    Returns the number of lines loaded. Loading a line again changes nothing: the request id is
    unique and the row that is there stays. A closed file is deleted once it is wholly loaded.
    Raises: DatabaseError when the database cannot be had.
    """
    return Loader(directory).load()


class Loader:
    """``load`` for a loop: asks the database only when a file has grown."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._offsets: dict[str, int] = {}

    def load(self) -> int:
        """As the function ``load``."""
        paths = sorted([*self.directory.glob("*.jsonl"), *self.directory.glob("*.open")])
        try:
            return sum(self._load_file(path) for path in paths)
        except DatabaseError:
            self._offsets.clear()  # the cursors in the database are the truth
            raise

    def _load_file(self, path: Path) -> int:
        try:
            size = path.stat().st_size
            if self._offsets.get(path.stem) == size and path.suffix == ".open":
                return 0
            offset = self._offset(path.stem)
            loaded = 0
            with path.open("rb") as file:
                file.seek(offset)
                while lines := _whole_lines(file.read(READ_BYTES)):
                    for batch in _batches(lines):
                        offset += sum(map(len, batch))
                        loaded += _insert(path, batch, offset)
                        self._offsets[path.stem] = offset
                    file.seek(offset)
        except FileNotFoundError:
            return 0  # closed, and so renamed, since the folder was listed
        if path.suffix == ".jsonl":
            self._delete(path)
        return loaded

    def _offset(self, name: str) -> int:
        if name not in self._offsets:
            cursor = SpoolCursor.objects.filter(file_name=name).first()
            self._offsets[name] = cursor.offset if cursor else 0
        return self._offsets[name]

    def _delete(self, path: Path) -> None:
        """The cursor first: a file without one is loaded again, which changes nothing."""
        SpoolCursor.objects.filter(file_name=path.stem).delete()
        path.unlink(missing_ok=True)
        self._offsets.pop(path.stem, None)


def _whole_lines(data: bytes) -> list[bytes]:
    """The lines of ``data`` with their ends, without a last one that is still being written."""
    end = data.rfind(b"\n") + 1
    return data[:end].splitlines(keepends=True)


def _batches(lines: list[bytes]) -> Iterable[list[bytes]]:
    return (lines[i : i + BATCH_ROWS] for i in range(0, len(lines), BATCH_ROWS))


def _insert(path: Path, lines: list[bytes], offset: int) -> int:
    """Insert a batch and move the file's cursor in one transaction."""
    pairs, bad = _parse(lines)
    rows = [row for _, row in pairs]
    try:
        _store(path.stem, rows, offset)
    except _REFUSALS:
        # A row that the database refuses must not hold up the others.
        bad += _store_singly(path.stem, pairs, offset)
    if bad:
        _set_aside(path, bad)
    return len(rows)


def _store(name: str, rows: list[Decision], offset: int) -> None:
    with transaction.atomic():
        Decision.objects.bulk_create(rows, ignore_conflicts=True)
        SpoolCursor.objects.bulk_create(
            [SpoolCursor(file_name=name, offset=offset)],
            update_conflicts=True,
            unique_fields=["file_name"],
            update_fields=["offset"],
        )


def _store_singly(name: str, pairs: list[tuple[bytes, Decision]], offset: int) -> list[bytes]:
    refused = []
    for line, row in pairs:
        try:
            with transaction.atomic():
                Decision.objects.bulk_create([row], ignore_conflicts=True)
        except _REFUSALS:
            refused.append(line)
    _store(name, [], offset)
    return refused


def _set_aside(path: Path, lines: list[bytes]) -> None:
    bad = path.with_suffix(".bad")
    logger.error("%d lines of %s are not records; they are in %s", len(lines), path.name, bad)
    with bad.open("ab") as file:
        file.writelines(lines)


def _parse(lines: list[bytes]) -> tuple[list[tuple[bytes, Decision]], list[bytes]]:
    """Rows with their lines, and the lines that are no records. Start markers are passed over."""
    pairs, bad = [], []
    for line in lines:
        if line.startswith(MARKER) or line == b"\n":
            continue
        try:
            pairs.append((line, to_decision(decode(line))))
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, OverflowError):
            bad.append(line)
    return pairs, bad


def to_decision(record: Record) -> Decision:
    """The row of a record: times become datetimes, texts are cut to their columns' length."""
    return Decision(**{name: _value(name, getattr(record, name)) for name in _FIELDS})


def _value(name: str, value: Any) -> Any:
    if name in _TIMES:
        return _time(value)
    if isinstance(value, str):
        # PostgreSQL stores no NUL.
        return value.replace("\0", "\ufffd")[: _LENGTHS.get(name)]
    if name == "attempts":
        return [_attempt(attempt) for attempt in value]
    return value


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, tz=UTC)


def _attempt(attempt: Any) -> dict[str, Any]:
    values = {field: getattr(attempt, field) for field in attempt.__struct_fields__}
    for field in ("started_at", "ended_at"):
        at = _time(values[field])
        values[field] = at and at.isoformat()
    return values
