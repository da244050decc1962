"""What the owner of a key may know of the own requests and usage, and of nobody else's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import msgspec
from django.db import DatabaseError, connection

from accounts.limits import Holder, iso, period_bounds
from mindrouter.gateway.errors import GatewayError
from scheduler import spending
from scheduler.budgets import site_zone, used_since
from scheduler.explain import sentence
from scheduler.models import Decision
from scheduler.serializers import DecisionDetailSerializer, number
from scheduler.services import case_of, described
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
    if "\0" in request_id:  # PostgreSQL would refuse to look for it
        raise _unknown(request_id)
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
    """``GET /v1/usage/me``: the user's token budget and what is used of its current period."""
    found = await runtime.use_of([Holder("user", key.user_id)])
    use = found[0] if found else None
    if use is None or use.budget_used is None or use.budget_resets_at is None:
        return await _from_database(_used_today, key.user_id)
    budget, used, reserved = use.limits.token_budget, use.budget_used, use.budget_reserved or 0.0
    return _encode(
        {
            "token_budget": budget,
            "used": number(used),
            "reserved": number(reserved),
            "remaining": number(max(0.0, (budget or 0) - used - reserved)),
            "resets_at": iso(use.budget_resets_at, site_zone()),
        }
    )


async def usage_by_model(runtime: Serving, key: Key) -> bytes:
    """``GET /v1/usage/me/models``: the user's exact totals of this month and what they cost."""
    return await _from_database(_month_by_model, key.user_id)


async def limits(runtime: Serving, key: Key) -> bytes:
    """``GET /v1/limits/me``: how every limit stands that concerns the key's requests."""
    user = runtime.snapshot.users[key.user_id]
    holders = [Holder("key", key.key_id), Holder("user", key.user_id)]
    if user.group_id is not None:
        holders.append(Holder("group", user.group_id))
    found = [one for use in await runtime.use_of(holders) for one in described(use)]
    return _encode({"limits": found})


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


def _used_today(user_id: int) -> bytes:
    """Of a user without a budget."""
    holder, day = Holder("user", user_id), period_bounds(time.time(), "day", site_zone())
    used = used_since(day[0], [holder])[holder]
    return _encode(
        {
            "token_budget": None,
            "used": number(used),
            "reserved": 0,
            "remaining": None,
            "resets_at": iso(day[1], site_zone()),
        }
    )


def _month_by_model(user_id: int) -> bytes:
    start, end = period_bounds(time.time(), "month", site_zone())
    since, until = (datetime.fromtimestamp(moment, site_zone()) for moment in (start, end))
    rows = spending.totals("model", since, until, user_id=user_id)
    return _encode(
        {"since": iso(start, site_zone()), "currency": spending.currency(), "models": rows}
    )
