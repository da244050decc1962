"""What the owner of a key may know of the own requests and usage, and of nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import DatabaseError, connection
from django.db.models import Sum
from django.utils import timezone

from accounts.models import BudgetPeriod, User
from mindrouter.gateway.errors import GatewayError
from scheduler.explain import sentence
from scheduler.models import Decision
from scheduler.serializers import DecisionDetailSerializer
from scheduler.services import case_of
from scheduler.serving import Serving
from scheduler.snapshot import Key
from scheduler.spool import Record
from scheduler.waiting_list import Row, own_rows

Page = Callable[[Serving, Key], Awaitable[bytes]]
_encode = msgspec.json.Encoder().encode


# ---- waiting and running: from memory


async def queue(runtime: Serving, key: Key) -> bytes:
    """``GET /v1/queue/me``: the owner's requests that wait or run."""
    rows = await _own_rows(runtime, key.user_id)
    mine = {r.request_id: r for r in runtime.spool.open_records() if r.user_id == key.user_id}
    waiting = [_waiting(mine[row.request_id], row, ahead) for row, ahead in rows
               if row.request_id in mine]  # fmt: skip
    waiting_ids = {row.request_id for row, _ in rows}
    running = [_running(one) for one in mine.values()
               if one.attempts and one.request_id not in waiting_ids]  # fmt: skip
    return _encode({"waiting": waiting, "running": running})


async def request(runtime: Serving, key: Key, request_id: str) -> bytes:
    """``GET /v1/requests/{request_id}``. Raises: GatewayError."""
    record = runtime.spool.open_record(request_id)
    if record is None:
        return await _from_database(_ended, key.user_id, request_id)
    if record.user_id != key.user_id:
        raise _unknown(request_id)
    for row, ahead in await _own_rows(runtime, key.user_id):
        if row.request_id == request_id:
            return _encode(_waiting(record, row, ahead))
    return _encode(_running(record))


async def _own_rows(runtime: Serving, user_id: int) -> list[tuple[Row, dict[str, int]]]:
    """In a thread: with thousands waiting it takes a while to put them in order."""

    def look() -> list[tuple[Row, dict[str, int]]]:
        picture = runtime.queue_picture()
        return own_rows(picture.flows, picture.taken_at, user_id)

    return await asyncio.to_thread(look)


def _running(record: Record) -> dict[str, Any]:
    attempt = record.attempts[-1] if record.attempts else None
    return {
        **_head(record, "running"),
        "backend": None if attempt is None else attempt.backend,
        "attempts": len(record.attempts),
    }


def _waiting(record: Record, row: Row, ahead: dict[str, int]) -> dict[str, Any]:
    flow = row.flow
    return {
        **_head(record, "waiting"),
        "position": row.position,
        "estimated_wait_seconds": row.estimate_seconds,
        "waited_seconds": row.waited_seconds,
        "ahead_by_group": ahead,
        "priority": {
            "deficit": flow.deficit,
            "burst_credits": flow.burst_credits,
            "weight": flow.weight,
            "factor": flow.factor,
            "wait_bonus": flow.wait_bonus,
            "total": flow.priority,
        },
    }


def _head(record: Record, state: str) -> dict[str, Any]:
    return {
        "request_id": record.request_id,
        "state": state,
        "model": record.model_requested,
        "end_user": record.end_user,
        "task": record.task,
        "arrived_at": record.arrived_at,
    }


# ---- ended, and usage: from the database, in a thread


async def usage(runtime: Serving, key: Key) -> bytes:
    """``GET /v1/usage/me``: the budget of the current period and what is used of it."""
    return await _from_database(_usage, key.user_id)


async def _from_database(question: Callable[..., bytes], *args: Any) -> bytes:
    """Raises: GatewayError."""

    def ask() -> bytes:
        try:
            return question(*args)
        finally:
            connection.close()

    try:
        return await asyncio.to_thread(ask)
    except DatabaseError as error:
        message = "The records cannot be read right now."
        raise GatewayError("no_backend_available", message, retry_after=5) from error


def _ended(user_id: int, request_id: str) -> bytes:
    decision = Decision.objects.filter(request_id=request_id, user_id=user_id).first()
    if decision is None:
        raise _unknown(request_id)
    told = {"state": "ended", "explanation": sentence(case_of(decision))}
    return _encode({**told, **DecisionDetailSerializer(decision).data})


def _unknown(request_id: str) -> GatewayError:
    """Also of somebody else's. What has just ended takes some seconds to be found."""
    message = f"You have no request {request_id!r}, or its record is not stored yet."
    return GatewayError("not_found", message, headers=((b"retry-after", b"3"),))


def _usage(user_id: int) -> bytes:
    user = User.objects.select_related("group", "quota").get(pk=user_id)
    holders = (getattr(user, "quota", None), user.group)
    budget = _first_given("token_budget", holders)
    period = _first_given("budget_period", holders) or BudgetPeriod.DAY
    start, end = period_around(timezone.localtime(), period)
    spent = Decision.objects.filter(user=user.username, user_id=user_id, arrived_at__gte=start)
    used = spent.aggregate(sum=Sum("charged_tokens"))["sum"] or 0.0
    return _encode(
        {
            "token_budget": budget,
            "used": used,
            "reserved": 0,
            "remaining": None if budget is None else max(0.0, budget - used),
            "resets_at": end.isoformat(),
        }
    )


def _first_given(name: str, holders: tuple[Any, ...]) -> Any:
    """The quota's value where it has one, else the group's."""
    values = (getattr(holder, name, None) for holder in holders)
    return next((value for value in values if value is not None), None)


def period_around(moment: datetime, period: str) -> tuple[datetime, datetime]:
    """The calendar day, week (from Monday) or month that holds ``moment``, in its own zone."""
    day = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    if period == BudgetPeriod.WEEK:
        monday = day - timedelta(days=day.weekday())
        return monday, monday + timedelta(days=7)
    if period == BudgetPeriod.MONTH:
        first = day.replace(day=1)
        return first, (first + timedelta(days=32)).replace(day=1)
    return day, day + timedelta(days=1)
