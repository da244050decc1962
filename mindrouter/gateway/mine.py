"""What the owner of a key may know of the own requests and usage, and of nobody else's."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import DatabaseError, connection
from django.db.models import Sum
from django.utils import timezone

from accounts.models import BudgetPeriod, User
from mindrouter.gateway.errors import GatewayError
from scheduler.core.scheduler import QueuedView
from scheduler.explain import sentence
from scheduler.models import Decision
from scheduler.runtime import Runtime
from scheduler.serializers import DecisionDetailSerializer
from scheduler.services import case_of
from scheduler.snapshot import Key
from scheduler.spool import Record

Page = Callable[[Runtime, Key], Awaitable[bytes]]
_encode = msgspec.json.Encoder().encode


# ---- waiting and running: from memory


async def queue(runtime: Runtime, key: Key) -> bytes:
    """``GET /v1/queue/me``: the owner's requests that wait or run."""
    views = runtime.scheduler.queue(time.monotonic())
    waiting = {view.request_id: view for view in views if view.user_id == key.user_id}
    mine = [one for one in runtime.spool.open_records() if one.user_id == key.user_id]
    return _encode(
        {
            "waiting": [_waiting(one, waiting[one.request_id], runtime, views) for one in mine
                        if one.request_id in waiting],
            "running": [_running(one) for one in mine
                        if one.request_id not in waiting and one.attempts],
        }
    )  # fmt: skip


async def request(runtime: Runtime, key: Key, request_id: str) -> bytes:
    """``GET /v1/requests/{request_id}``. Raises: GatewayError."""
    record = runtime.spool.open_record(request_id)
    if record is None:
        return await _from_database(_ended, key.user_id, request_id)
    if record.user_id != key.user_id:
        raise _unknown(request_id)
    views = runtime.scheduler.queue(time.monotonic())
    view = next((view for view in views if view.request_id == request_id), None)
    if view is None:
        return _encode(_running(record))
    return _encode(_waiting(record, view, runtime, views))


def _running(record: Record) -> dict[str, Any]:
    attempt = record.attempts[-1] if record.attempts else None
    return {
        **_head(record, "running"),
        "backend": None if attempt is None else attempt.backend,
        "attempts": len(record.attempts),
    }


def _waiting(
    record: Record, view: QueuedView, runtime: Runtime, views: list[QueuedView]
) -> dict[str, Any]:
    ahead = [v for v in views if v.model_name == view.model_name and v.position < view.position]
    users = runtime.snapshot.users
    groups = Counter(users[v.user_id].group_name or "" for v in ahead if v.user_id in users)
    seconds = runtime.estimate(view.request_id)
    return {
        **_head(record, "waiting"),
        "position": view.position,
        "estimated_wait_seconds": seconds,
        "waited_seconds": max(0.0, time.monotonic() - view.enqueued_at),
        "ahead_by_group": dict(groups),
        "priority": {
            "deficit": view.deficit,
            "burst_credits": view.burst_credits,
            "weight": view.weight,
            "factor": view.factor,
            "wait_bonus": view.wait_bonus,
            "total": view.priority,
        },
    }


def _head(record: Record, state: str) -> dict[str, Any]:
    return {
        "request_id": record.request_id,
        "state": state,
        "model": record.model_requested,
        "end_user": record.end_user,
        "arrived_at": record.arrived_at,
    }


# ---- ended, and usage: from the database, in a thread


async def usage(runtime: Runtime, key: Key) -> bytes:
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
