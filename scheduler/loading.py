"""Spool files into the database: what ``manage.py runrecorder`` repeats."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    OperationalError,
    connection,
    models,
    transaction,
)

from scheduler import usage
from scheduler.core.decisions import Decision as Choice
from scheduler.models import Decision, SpoolCursor
from scheduler.spool import MARKER, Attempt, Record, decode

logger = logging.getLogger(__name__)

Row = tuple[Any, ...]
Listener = Callable[[list[Record]], None]


class Entry(NamedTuple):
    """One record: its line, its row, and what it adds to which row of the totals."""

    line: bytes
    record: Record
    row: Row
    key: usage.Key
    amounts: usage.Amounts


class Charge(msgspec.Struct):
    """Of a record what its budgets have to know."""

    request_id: str
    arrived_at: float
    charged_tokens: float = 0.0
    user_id: int | None = None
    key_id: int | None = None
    group: str = ""
    model_served: str = ""


_charge_decoder = msgspec.json.Decoder(Charge)

BATCH_ROWS = 500
READ_BYTES = 4 * 1024 * 1024
_COLUMNS = [column for column in Decision._meta.fields if not column.primary_key]
_REQUEST_ID = [column.name for column in _COLUMNS].index("request_id")
_UNIQUE_VIOLATION = "23505"  # PostgreSQL's SQLSTATE
#: A passing matter: what the other one inserted is known at the next attempt.
_INSERTED_BY_ANOTHER = "Another recorder has inserted some of these records."
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
    """``load`` for a loop: asks the database only when a file has grown.

    ``stored`` are given the records that have just come into the database, each once; ``keep`` gets
    them before that is certain, and so each at least once.
    """

    def __init__(
        self, directory: Path, stored: Sequence[Listener] = (), keep: Listener | None = None
    ) -> None:
        self.directory = directory
        self._stored = stored
        self._keep = keep
        self._offsets: dict[str, int] = {}

    def load(self) -> int:
        """As the function ``load``."""
        paths = sorted([*self.directory.glob("*.jsonl"), *self.directory.glob("*.open")])
        try:
            return sum(self._load_file(path) for path in paths)
        except DatabaseError:
            self._offsets.clear()  # the cursors in the database are the truth
            raise

    def offsets(self) -> dict[str, int]:
        """{file: bytes of it that are loaded}"""
        return dict(self._offsets)

    def _load_file(self, path: Path) -> int:
        try:
            size = path.stat().st_size
            if self._offsets.get(path.stem) == size and path.suffix == ".open":
                return 0
            loaded = 0
            with path.open("rb") as file:
                for batch, offset in _batches(file, self._offset(path.stem)):
                    entries, fresh = _insert(path, batch, offset, self._keep)
                    self._offsets[path.stem] = offset
                    loaded += entries
                    for tell in self._stored:
                        tell(fresh)
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


def _batches(file: BinaryIO, offset: int) -> Iterator[tuple[list[bytes], int]]:
    """The lines from there on, at most ``BATCH_ROWS`` at a time, and the offset after them."""
    file.seek(offset)
    while lines := _whole_lines(file.read(READ_BYTES)):
        for start in range(0, len(lines), BATCH_ROWS):
            batch = lines[start : start + BATCH_ROWS]
            offset += sum(map(len, batch))
            yield batch, offset
        file.seek(offset)


def _whole_lines(data: bytes) -> list[bytes]:
    """The lines of ``data`` with their ends, without a last one that is still being written."""
    end = data.rfind(b"\n") + 1
    if not end and len(data) == READ_BYTES:
        return [data]  # no record is so long: what a broken disk left must not hold up the others
    return data[:end].splitlines(keepends=True)


def _insert(
    path: Path, lines: list[bytes], offset: int, keep: Listener | None
) -> tuple[int, list[Record]]:
    """Insert a batch, add it to the totals and move the file's cursor in one transaction, in which
    ``keep`` is given what is new.

    Returns how many records it has, and those that were not in the database before.
    """
    entries, bad = _parse(lines)
    try:
        fresh = _store(path.stem, entries, offset, keep)
    except _REFUSALS:
        # A row that the database refuses must not hold up the others.
        fresh, refused = _store_singly(path.stem, entries, offset, keep)
        bad += refused
    if bad:
        _set_aside(path, bad)
    return len(entries), [entry.record for entry in fresh]


def _store(name: str, entries: list[Entry], offset: int, keep: Listener | None) -> list[Entry]:
    """Returns those that were not in the database before."""
    with transaction.atomic():
        if fresh := _fresh(entries):
            rows = [one.row for one in fresh]
            if connection.vendor == "postgresql":
                _copy(rows)
            else:
                _insert_many(rows)
            usage.add((one.key, one.amounts) for one in fresh)
            if keep is not None:
                keep([one.record for one in fresh])
        SpoolCursor.objects.bulk_create(
            [SpoolCursor(file_name=name, offset=offset)],
            update_conflicts=True,
            unique_fields=["file_name"],
            update_fields=["offset"],
        )
    return fresh


def _fresh(entries: list[Entry]) -> list[Entry]:
    """Those that are not in the database yet, each once: they alone add to the totals."""
    first = {one.row[_REQUEST_ID]: one for one in reversed(entries)}
    known = set(
        Decision.objects.filter(request_id__in=list(first))
        .order_by()
        .values_list("request_id", flat=True)
    )
    return [
        one
        for one in entries
        if first[one.row[_REQUEST_ID]] is one and one.row[_REQUEST_ID] not in known
    ]


def _copy(rows: list[Row]) -> None:
    """By COPY, which also notices records that another recorder has inserted meanwhile."""
    table, names = _table_and_columns()
    try:
        with (
            connection.wrap_database_errors,
            connection.cursor() as cursor,
            cursor.copy(f"COPY {table} ({names}) FROM STDIN") as copy,
        ):
            for row in rows:
                copy.write_row(row)
    except IntegrityError as error:
        if getattr(error.__cause__, "sqlstate", None) == _UNIQUE_VIOLATION:
            raise OperationalError(_INSERTED_BY_ANOTHER) from error
        raise


def _insert_many(rows: list[Row]) -> None:
    """By plain SQL: through the models a row costs ten times as much."""
    table, names = _table_and_columns()
    places = ", ".join(["%s"] * len(_COLUMNS))
    # Only names of columns are put in.
    statement = (
        f"INSERT INTO {table} ({names}) VALUES ({places}) "  # noqa: S608
        "ON CONFLICT (request_id) DO NOTHING"
    )
    with connection.cursor() as cursor:
        cursor.executemany(statement, rows)
        if cursor.rowcount != len(rows):
            raise OperationalError(_INSERTED_BY_ANOTHER)


def _table_and_columns() -> tuple[str, str]:
    quote = connection.ops.quote_name
    return quote(Decision._meta.db_table), ", ".join(quote(one.attname) for one in _COLUMNS)


def _store_singly(
    name: str, entries: list[Entry], offset: int, keep: Listener | None
) -> tuple[list[Entry], list[bytes]]:
    """Returns those that are new, and the lines that the database refuses."""
    fresh: list[Entry] = []
    refused = []
    for entry in entries:
        try:
            fresh += _store(name, [entry], offset, keep)
        except _REFUSALS:
            refused.append(entry.line)
    _store(name, [], offset, keep)
    return fresh, refused


def _set_aside(path: Path, lines: list[bytes]) -> None:
    bad = path.with_suffix(".bad")
    logger.error("%d lines of %s are not records; they are in %s", len(lines), path.name, bad)
    with bad.open("ab") as file:
        file.writelines(lines)


def _parse(lines: list[bytes]) -> tuple[list[Entry], list[bytes]]:
    """The records, and the lines that are none. Start markers are passed over."""
    entries, bad = [], []
    for line in lines:
        if line.startswith(MARKER) or line == b"\n":
            continue
        try:
            entries.append(read(line))
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, OverflowError):
            bad.append(line)
    return entries, bad


def charges_to_load(directory: Path) -> Iterator[list[Charge]]:
    """What the requests cost that the spool files have and the database has not, at most
    ``BATCH_ROWS`` at a time: after an outage of the recorder there may be millions.

    Exact where it comes first in a transaction that sees one picture of the database. Raises:
    DatabaseError.
    """
    with contextlib.ExitStack() as files:
        # Opened first: a file that is loaded and deleted meanwhile can still be read.
        opened = []
        for path in sorted([*directory.glob("*.jsonl"), *directory.glob("*.open")]):
            with contextlib.suppress(FileNotFoundError):  # closed, and so renamed
                opened.append((path.stem, files.enter_context(path.open("rb"))))
        cursors = dict(SpoolCursor.objects.values_list("file_name", "offset"))
        latest: dict[str, Charge] = {}
        for name, file in opened:
            for lines, _ in _batches(file, cursors.get(name, 0)):
                # A line that lacked but its end is there twice, one behind the other.
                charges = {one.request_id: one for one in _charges(lines)}
                yield _not_stored(charges.keys() - latest.keys(), charges)
                latest = charges


def _charges(lines: list[bytes]) -> Iterator[Charge]:
    for line in lines:
        if not line.startswith(MARKER):
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                charge = _charge_decoder.decode(line)
                if charge.charged_tokens:
                    yield charge


def _not_stored(request_ids: set[str], charges: dict[str, Charge]) -> list[Charge]:
    """A file whose cursor is gone is loaded, and only waits to be deleted."""
    stored = set(
        Decision.objects.filter(request_id__in=request_ids)
        .order_by()
        .values_list("request_id", flat=True)
    )
    return [charges[request_id] for request_id in request_ids - stored]


# ---- one record


def read(line: bytes) -> Entry:
    """A record as the database takes it: its values in the order of the columns, and what it adds
    to the totals.

    Texts are cut to their columns' length. Raises: msgspec.DecodeError, ValueError.
    """
    clean = line
    if b"\\u0000" in line:
        clean = line.replace(b"\\u0000", b"\\ufffd")  # PostgreSQL stores no NUL
    record = decode(clean)
    values = _NOT_DECIDED if record.decision is None else explained(record.decision)
    row = tuple(
        [
            convert(values[name] if name in values else getattr(record, name))
            for name, convert in _CONVERSIONS
        ]
    )
    return Entry(line, record, row, *usage.usage_of(record))


def explained(decision: Choice) -> dict[str, Any]:
    """The columns that the scheduler's decision fills."""
    return {
        "candidate_backends": decision.candidate_backends,
        "backend_names": decision.backend_names,
        "scores": decision.scores,
        "score_parts": decision.score_parts,
        "constraints": decision.constraints,
        "selection_reason": decision.reason,
        "user_deficit": decision.user_deficit,
        "user_weight": decision.user_weight,
        "user_group": decision.user_group,
        "user_recent_usage": decision.user_recent_usage,
        "burst_credits": decision.burst_credits,
        "deprioritization_factor": decision.factor,
        "wait_bonus": decision.wait_bonus,
        "priority": decision.priority,
        "served_ahead": decision.ahead,
    }


_FIGURES = (
    "user_deficit",
    "user_weight",
    "user_group",
    "user_recent_usage",
    "burst_credits",
    "deprioritization_factor",
    "wait_bonus",
    "priority",
)
#: What is stored of a request that never got a slot.
_NOT_DECIDED: dict[str, Any] = {
    **dict.fromkeys(_FIGURES),
    "candidate_backends": [],
    "backend_names": {},
    "scores": {},
    "score_parts": {},
    "constraints": {},
    "selection_reason": "",
    "served_ahead": {},
}


def _conversion(column: models.Field[Any, Any]) -> Callable[[Any], Any]:
    match column:
        case models.DateTimeField():
            return _time
        case models.JSONField() if column.name == "attempts":
            return _attempts
        case models.JSONField():
            return _json
        case models.CharField():
            return _shortened(column.max_length)
    return _same


def _same(value: Any) -> Any:
    return value


def _time(seconds: float | None) -> Any:
    if seconds is None:
        return None
    return connection.ops.adapt_datetimefield_value(datetime.fromtimestamp(seconds, tz=UTC))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _attempts(attempts: list[Attempt]) -> str:
    described = []
    for attempt in attempts:
        values = {name: getattr(attempt, name) for name in attempt.__struct_fields__}
        for name in ("started_at", "ended_at"):
            if values[name] is not None:
                values[name] = datetime.fromtimestamp(values[name], tz=UTC).isoformat()
        described.append(values)
    return _json(described)


def _shortened(length: int | None) -> Callable[[str | None], str | None]:
    return lambda text: text and text[:length]


_CONVERSIONS = [(column.name, _conversion(column)) for column in _COLUMNS]
