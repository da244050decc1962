"""What the records add up to since ever, for metrics.

The recorder counts what it stores: each request once, whichever process served it, and nothing of
it on the request's way. The sums are kept in a file, so that they only grow, also over restarts. A
recorder that is killed between storing records and writing the file leaves those uncounted, at most
``loading.BATCH_ROWS`` of each look.

Labels are bounded: beyond its first ``cap`` keys each table counts under "other".
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from scheduler.pulse import replace_file
from scheduler.spool import Record

logger = logging.getLogger(__name__)

Labels = tuple[str, ...]

COUNTS_FILE = "counts.msgpack"  # in the folder of states
OTHER = "other"
NONE = "none"  # as a label, where there is no group, model or reason
MOST_REASONS = 60
MOST_MODELS = 100
MOST_BACKENDS = 200
MOST_PAIRS = 200  # of groups and models
#: Upper bounds in seconds.
WAIT_BUCKETS = (0.001, 0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
FIRST_TOKEN_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
LEASE_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5)
OUTCOMES = ("completed", "refused", "cancelled", "failed", "aborted")
TOKENS = ("prompt", "cached", "completion")
LIMITS = frozenset(
    {"rate_limit_exceeded", "concurrency_limit_exceeded", "quota_exceeded", "queue_full"}
)


class Table(msgspec.Struct):
    """Sums under labels."""

    cap: int
    width: int
    rows: dict[Labels, list[float]] = {}

    def row(self, *labels: str) -> list[float]:
        """The sums of these labels, or of "other"."""
        found = self.rows.get(labels)
        if found is None:
            if len(self.rows) >= self.cap:
                labels = (OTHER,) * len(labels)
            found = self.rows.setdefault(labels, [0] * self.width)
        return found


def _histogram(buckets: Sequence[float]) -> int:
    """How many sums it takes: one for each bucket, what lies above, and the seconds."""
    return len(buckets) + 2


def _observe(row: list[float], buckets: Sequence[float], seconds: float) -> None:
    row[bisect.bisect_left(buckets, seconds)] += 1
    row[-1] += seconds


def _table(cap: int, width: int = 1) -> Table:
    return msgspec.field(default_factory=lambda: Table(cap, width, {}))


class Counts(msgspec.Struct):
    """Each table's labels and sums are named beside it."""

    requests: Table = _table(MOST_REASONS)  # outcome, reason
    by_outcome: Table = _table(MOST_PAIRS, len(OUTCOMES))  # group, model
    tokens: Table = _table(MOST_PAIRS, len(TOKENS))  # group, model
    charged: Table = _table(MOST_PAIRS)  # group, model
    slots: Table = _table(MOST_PAIRS)  # group, model: seconds
    waits: Table = _table(MOST_PAIRS, _histogram(WAIT_BUCKETS))  # group, model
    first_tokens: Table = _table(MOST_MODELS, _histogram(FIRST_TOKEN_BUCKETS))  # model
    leases: Table = _table(1, _histogram(LEASE_BUCKETS))  # none
    attempts: Table = _table(2 * MOST_BACKENDS)  # backend, result
    retries: Table = _table(1)  # none
    limits: Table = _table(MOST_PAIRS)  # group, reason

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            self._add(record)

    def _add(self, record: Record) -> None:
        self.requests.row(record.outcome, record.reason or NONE)[0] += 1
        group = record.group or NONE
        # What a client called a model that nobody has is no label.
        asked = record.model_requested if record.queued_at is not None else ""
        pair = group, record.model_served or asked or NONE
        if record.outcome in OUTCOMES:
            self.by_outcome.row(*pair)[OUTCOMES.index(record.outcome)] += 1
        if record.reason in LIMITS:
            self.limits.row(group, record.reason)[0] += 1
        self._add_usage(record, pair)
        self._add_times(record, pair)
        for attempt in record.attempts:
            self.attempts.row(attempt.backend, attempt.reason or "served")[0] += 1
        self.retries.row()[0] += max(0, len(record.attempts) - 1)

    def _add_usage(self, record: Record, pair: Labels) -> None:
        if record.dispatched_at is None:
            return  # its tokens are what was estimated
        tokens = self.tokens.row(*pair)
        tokens[0] += record.prompt_tokens or 0
        tokens[1] += record.cached_tokens or 0
        tokens[2] += record.completion_tokens or 0
        self.charged.row(*pair)[0] += record.charged_tokens
        if record.ended_at is not None:
            self.slots.row(*pair)[0] += max(0.0, record.ended_at - record.dispatched_at)

    def _add_times(self, record: Record, pair: Labels) -> None:
        left = record.ended_at if record.dispatched_at is None else record.dispatched_at
        if record.queued_at is not None and left is not None:
            waited = max(0.0, left - record.queued_at)
            _observe(self.waits.row(*pair), WAIT_BUCKETS, waited)
            if record.wait_reason in ("", "none") and record.dispatched_at is not None:
                _observe(self.leases.row(), LEASE_BUCKETS, waited)
        if record.first_token_at is not None:
            seconds = max(0.0, record.first_token_at - record.arrived_at)
            _observe(self.first_tokens.row(pair[1]), FIRST_TOKEN_BUCKETS, seconds)


def load_counts(path: Path) -> Counts:
    """What was counted so far; nothing where the file is missing, broken or of another shape."""
    try:
        counts = msgspec.msgpack.decode(path.read_bytes(), type=Counts)
    except FileNotFoundError:
        return Counts()
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("What was counted so far cannot be read, counting from 0: %s", error)
        return Counts()
    fresh = Counts()
    for name in fresh.__struct_fields__:
        known, now = getattr(counts, name), getattr(fresh, name)
        if (known.cap, known.width) == (now.cap, now.width):
            setattr(fresh, name, known)
    return fresh


def save_counts(path: Path, counts: Counts) -> None:
    """Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_file(path, msgspec.msgpack.encode(counts))
