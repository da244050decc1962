"""Records into the hourly totals of ``UsageHour``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from django.db import connection

from scheduler.causes import CAUSES, Facts, cause
from scheduler.core.decisions import SCORE_NAMES, Decision
from scheduler.models import Outcome, UsageHour
from scheduler.spool import Record

#: hour (epoch seconds), user id, group, key id, model
Key = tuple[int, int, str, int, str]
Amounts = tuple[float, ...]  # in the order of ``AMOUNTS``

HOUR_SECONDS = 3600
KEYS = ("hour", "user_id", "group", "key_id", "model")
AMOUNTS = (
    "requests",
    *(outcome.value for outcome in Outcome),
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "estimated_tokens",
    "charged_tokens",
    "queued",
    "wait_seconds",
    "service_seconds",
    *(f"slow_{one}" for one in CAUSES),
)
_OUTCOMES = [outcome.value for outcome in Outcome]
_MODEL_LOADED = SCORE_NAMES.index("model_loaded")
_LENGTHS = {
    name: UsageHour._meta.get_field(name).max_length  # type: ignore[union-attr]
    for name in ("group", "model")
}


def usage_of(record: Record) -> tuple[Key, Amounts]:
    """What one record adds, and to which row."""
    prompt, completion = record.prompt_tokens or 0, record.completion_tokens or 0
    sent, ended = record.dispatched_at, record.ended_at
    left = ended if sent is None else sent
    slow = cause(_facts(record))
    model = record.model_served or (record.model_requested if record.queued_at is not None else "")
    return (
        int(record.arrived_at // HOUR_SECONDS) * HOUR_SECONDS,
        record.user_id or 0,
        record.group[: _LENGTHS["group"]],
        record.key_id or 0,
        model[: _LENGTHS["model"]],
    ), (
        1,
        *(int(record.outcome == one) for one in _OUTCOMES),
        prompt,
        record.cached_tokens or 0,
        completion,
        prompt + completion if record.usage_estimated else 0,
        record.charged_tokens,
        int(record.queued_at is not None),
        _between(record.queued_at, left),
        _between(sent, ended),
        *(int(slow == one) for one in CAUSES),
    )


def _between(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else max(0.0, end - start)


def _facts(record: Record) -> Facts:
    decision = record.decision
    return Facts(
        outcome=record.outcome,
        reason=record.reason,
        stream=record.stream,
        wait_reason=record.wait_reason,
        loaded_points=None if decision is None else _loaded_points(decision),
        served_ahead={} if decision is None else decision.ahead,
        attempts=[(one.started_at, one.ended_at) for one in record.attempts],
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        queued_at=record.queued_at,
        dispatched_at=record.dispatched_at,
        first_token_at=record.first_token_at,
        ended_at=record.ended_at,
    )


def _loaded_points(decision: Decision) -> float | None:
    for backend_id, points in decision.points:
        if backend_id == decision.selected_backend_id:
            return points[_MODEL_LOADED]
    return None


def add(usages: Iterable[tuple[Key, Amounts]]) -> None:
    """Add to the rows, within the caller's transaction."""
    totals: dict[Key, Amounts] = {}
    for key, amounts in usages:
        known = totals.get(key)
        totals[key] = (
            amounts if known is None else tuple(map(sum, zip(known, amounts, strict=True)))
        )
    if not totals:
        return
    with connection.cursor() as cursor:
        # In one order everywhere, so that two who write wait for each other and never in a ring.
        cursor.executemany(_statement(), [_row(key, totals) for key in sorted(totals)])


def _row(key: Key, totals: Mapping[Key, Amounts]) -> tuple[Any, ...]:
    hour = datetime.fromtimestamp(key[0], tz=UTC)
    return (connection.ops.adapt_datetimefield_value(hour), *key[1:], *totals[key])


def _statement() -> str:
    quote = connection.ops.quote_name
    table = quote(UsageHour._meta.db_table)
    names = [quote(name) for name in (*KEYS, *AMOUNTS)]
    sums = ", ".join(f"{quote(n)} = {table}.{quote(n)} + excluded.{quote(n)}" for n in AMOUNTS)
    # Only names of columns are put in.
    return (
        f"INSERT INTO {table} ({', '.join(names)}) "  # noqa: S608
        f"VALUES ({', '.join(['%s'] * len(names))}) "
        f"ON CONFLICT ({', '.join(names[: len(KEYS)])}) DO UPDATE SET {sums}"
    )
