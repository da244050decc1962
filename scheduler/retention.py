"""Old decisions leave the log, in small batches while requests are served; their totals stay."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

from scheduler.models import Decision
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
    deleted = 0
    for _ in range(MOST_BATCHES):
        batch = list(old.values_list("pk", flat=True)[:BATCH_ROWS])
        if batch:
            deleted += Decision.objects.filter(pk__in=batch).delete()[0]
        if len(batch) < BATCH_ROWS:
            break
        time.sleep(PAUSE)
    return deleted
