"""Rows for tests: plain functions with sensible values; any field can be given by name."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

from django.utils import timezone

from accounts.models import ApiKey, Boost, Group, Quota, User
from backends.models import Backend, BackendModel
from scheduler.core.decisions import Decision as Choice
from scheduler.models import Capture, Decision

_numbers = itertools.count(1)


def make_group(name: str = "", **fields: Any) -> Group:
    """A group of weight 1."""
    fields.setdefault("scheduler_weight", 1)
    return Group.objects.create(name=name or f"group-{next(_numbers)}", **fields)


def make_user(username: str = "", *, password: str | None = None, **fields: Any) -> User:
    """A user without a group and, unless one is given, without a usable password."""
    user = User(username=username or f"user-{next(_numbers)}", **fields)
    user.set_password(password)
    user.save()
    return user


def make_admin(username: str = "", **fields: Any) -> User:
    """A superuser."""
    return make_user(username, is_staff=True, is_superuser=True, **fields)


def make_quota(user: User, **fields: Any) -> Quota:
    return Quota.objects.create(user=user, **fields)


def make_boost(**fields: Any) -> Boost:
    """A boost of ``group`` or ``user``: twice the weight for an hour from now."""
    start = fields.setdefault("starts_at", timezone.now())
    defaults = {
        "name": f"boost-{next(_numbers)}",
        "factor": 2,
        "ends_at": start + timedelta(hours=1),
    }
    return Boost.objects.create(**(defaults | fields))


def make_api_key(user: User, key: str = "", **fields: Any) -> str:
    """Store a key for ``user`` and return the key itself."""
    key = key or ApiKey.generate()
    row = ApiKey(user=user, name=fields.pop("name", f"key-{next(_numbers)}"), **fields)
    row.set_key(key)
    row.save()
    return key


def make_backend(name: str = "", *, models: tuple[str, ...] = (), **fields: Any) -> Backend:
    """A backend with ``models`` given by hand."""
    number = next(_numbers)
    fields.setdefault("base_url", f"http://127.0.0.1:{10000 + number}")
    backend = Backend.objects.create(name=name or f"backend-{number}", **fields)
    for model_name in models:
        BackendModel.objects.create(backend=backend, name=model_name)
    return backend


def make_choice(**values: Any) -> Choice:
    """A decision of the scheduler for backend 1, of the only candidates 1 and 2."""
    defaults: dict[str, Any] = {
        "selected_backend_id": 1,
        "points": ((1, (100.0, 50.0, 0.0, 0.0, 0.0, 0.0, 0.0)), (2, (0.0,) * 7)),
        "failures": (),
        "reason": "score",
        "user_deficit": 0.0,
        "user_weight": 1.0,
        "user_group": None,
        "user_recent_usage": 0.0,
        "burst_credits": 0.0,
        "factor": 1.0,
        "wait_bonus": 0.0,
        "priority": 0.0,
        "position_at_arrival": 1,
        "wait_reason": "none",
        "ahead": {},
        "names": {1: "a", 2: "b"},
    }
    return Choice(**(defaults | values))


def make_decision(request_id: str = "", **fields: Any) -> Decision:
    """A completed request that arrived at noon on 1 June 2026."""
    defaults: dict[str, Any] = {
        "user": "ada",
        "dialect": "openai",
        "endpoint": "chat",
        "outcome": "completed",
        "status": 200,
        "arrived_at": datetime(2026, 6, 1, 12, tzinfo=UTC),
    }
    request_id = request_id or f"req-{next(_numbers)}"
    return Decision.objects.create(request_id=request_id, **(defaults | fields))


def make_capture(key: ApiKey, request_id: str, **fields: Any) -> Capture:
    """A captured request of ``key``, kept for a week."""
    now = timezone.now()
    defaults: dict[str, Any] = {
        "at": now,
        "delete_at": now + timedelta(days=7),
        "request": b'{"model": "m"}',
        "request_bytes": 14,
    }
    return Capture.objects.create(request_id=request_id, key_id=key.pk, **(defaults | fields))
