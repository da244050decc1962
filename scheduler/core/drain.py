"""How fast a class is served: the basis of Retry-After and of estimated waits (R16)."""

from __future__ import annotations

import math

MEMORY_SECONDS = 30.0
FORGOTTEN_SECONDS = 5 * MEMORY_SECONDS
STEP_SECONDS = 0.1  # dispatches closer together count as one moment
SHORTEST_SECONDS = 1.0  # a rate is not measured over less
RETRY_AFTER_UNKNOWN = 5
RETRY_AFTER_MAX = 60


class DrainRate:
    """Dispatches per second, the older the less they count."""

    __slots__ = ("_at", "_count", "_since")

    def __init__(self) -> None:
        self._count = 0.0
        self._at = float("-inf")
        self._since = 0.0

    def note(self, now: float) -> None:
        """One more was dispatched."""
        elapsed = now - self._at
        if elapsed < STEP_SECONDS:
            self._count += 1.0
            return
        if elapsed > FORGOTTEN_SECONDS:
            self._since = now
            self._count = 0.0
        self._count = self._count * math.exp(-elapsed / MEMORY_SECONDS) + 1.0
        self._at = now

    def per_second(self, now: float) -> float | None:
        """None: nothing has been measured yet, or nothing for a long time."""
        if now - self._at > FORGOTTEN_SECONDS:
            return None
        age = max(SHORTEST_SECONDS, now - self._since)
        span = MEMORY_SECONDS * (1.0 - math.exp(-age / MEMORY_SECONDS))
        return self._count * math.exp((self._at - now) / MEMORY_SECONDS) / span

    def seconds_for(self, jobs: int, now: float) -> float | None:
        """How long it takes to dispatch so many jobs."""
        rate = self.per_second(now)
        return jobs / rate if rate else None


def retry_after(seconds: float | None) -> int:
    """Whole seconds from 1 to 60 for a Retry-After header."""
    if seconds is None:
        return RETRY_AFTER_UNKNOWN
    return max(1, min(RETRY_AFTER_MAX, math.ceil(seconds)))
