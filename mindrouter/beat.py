"""Celery's beat where there may be several: one sends tasks, the others stand by."""

from __future__ import annotations

import contextlib
from typing import Any

import redis
from celery.beat import Scheduler
from django.conf import settings
from redis.exceptions import LockError, RedisError

LOCK = "mindrouter:beat"
#: After so long without a word of the one that sends, another one does.
LOCK_SECONDS = 5.0
PAUSE_SECONDS = 1.0


class GuardedScheduler(Scheduler):
    """Sends tasks only while it holds a lock in Redis, which it renews with each look.

    A process that was halted in the middle of a look may still send what it was about to: tasks
    bear being run twice. The schedule is kept in memory: who takes over sends at once what became
    due meanwhile.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        connection = redis.Redis.from_url(
            settings.REDIS_URL, socket_timeout=2.0, socket_connect_timeout=2.0
        )
        self._lock = connection.lock(LOCK, timeout=LOCK_SECONDS)
        super().__init__(*args, **options)

    def tick(self, *args: Any, **options: Any) -> float:
        """Send what is due; returns the seconds until the next look."""
        if not self._is_chosen():
            return PAUSE_SECONDS
        return min(PAUSE_SECONDS, super().tick(*args, **options))

    def close(self) -> None:
        super().close()
        with contextlib.suppress(LockError, RedisError):
            self._lock.release()  # another one need not wait

    def _is_chosen(self) -> bool:
        try:
            try:
                return bool(self._lock.reacquire())
            except LockError:  # another one's, or nobody's
                return bool(self._lock.acquire(blocking=False))
        except RedisError:
            return False
