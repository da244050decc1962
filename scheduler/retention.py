"""What is old is deleted, in small batches while requests are served: decisions, whose totals stay,
and captured prompts."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet

from scheduler.models import Capture, Decision
from scheduler.standing import setting

#: Rows deleted by one statement, which is a transaction of its own: what a killed run has deleted
#: stays deleted, and the next one goes on from there.
BATCH_ROWS = 1000
#: Batches of one run; what is left is for the next.
MOST_BATCHES = 20
#: Seconds between two batches: whoever waits to write to SQLite asks again within that time.
PAUSE = 0.1
#: Longer is for ever, and dates do not reach much further back.
MOST_DAYS = 36_500


def forget_decisions(now: datetime) -> int:
    """Delete what arrived more than ``decision_retention`` days ago, oldest first; returns how
    many rows that were. What is in them of ``UsageHour`` stays there."""
    days = setting("decision_retention")
    if days is None or days > MOST_DAYS:
        return 0
    old = Decision.objects.filter(arrived_at__lt=now - timedelta(days=days)).order_by("arrived_at")
    return _delete(old)


def forget_captures(now: datetime) -> int:
    """Delete the captured prompts whose date has come, the oldest first; returns how many. Whether
    their key is captured still, and for how long it is to be kept by now, changes no date."""
    return _delete(Capture.objects.filter(delete_at__lte=now).order_by("delete_at"))


def _delete(old: QuerySet[Any]) -> int:
    deleted = 0
    for _ in range(MOST_BATCHES):
        batch = list(old.values_list("pk", flat=True)[:BATCH_ROWS])
        if batch:
            deleted += old.model._default_manager.filter(pk__in=batch).delete()[0]  # noqa: SLF001
        if len(batch) < BATCH_ROWS:
            break
        time.sleep(PAUSE)
    return deleted
