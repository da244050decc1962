"""What an admin has captured of keys' prompts: which keys, who read it, and its end.

The rows are those of the app that is built on this one.
"""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from accounts.models import ApiKey


def captured_keys() -> QuerySet[ApiKey]:
    """Those whose prompts are stored now."""
    return ApiKey.objects.filter(capture_until__gt=timezone.now(), enabled=True)


def captures_of(key: ApiKey) -> Any:
    """What is stored of ``key``."""
    return apps.get_model("scheduler", "Capture").objects.filter(key_id=key.pk)


@transaction.atomic
def delete_captures(key: ApiKey) -> int:
    """Delete all that is stored of ``key``, also what is on its way; returns how many are gone."""
    ApiKey.objects.filter(pk=key.pk).update(captures_deleted_at=timezone.now())
    deleted: int = captures_of(key).delete()[0]
    note(key, f"all captured prompts deleted: {deleted}")
    return deleted


def note(key: ApiKey, what: str) -> None:
    """Say in the key's history what was done, though nothing of the key itself has changed."""
    history: Any = ApiKey.history
    history.bulk_history_create([key], update=True, default_change_reason=what)
