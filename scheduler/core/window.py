"""What each unit has used lately (R9): a sliding window of 30 buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.core.units import UnitState

BUCKETS = 30
_NOTHING = 1e-6  # tokens; less than this is what rounding leaves


@dataclass(slots=True)
class Bucket:
    started_at: float
    tokens: dict[UnitState, float] = field(default_factory=dict)


class UsageWindow:
    """Settled tokens by unit over the last ``span`` seconds, in steps of a thirtieth of it.

    ``forget`` is called with each unit that has nothing left in the window.
    """

    def __init__(self, span: float, forget: Callable[[UnitState], None]) -> None:
        self.total = 0.0
        self.buckets: deque[Bucket] = deque()
        self._turns_at = float("-inf")  # when the newest bucket is full
        self._forget = forget
        self.resize(span)

    def resize(self, span: float) -> None:
        self._span = span
        self._width = span / BUCKETS
        self.expires_at = self.buckets[0].started_at + span if self.buckets else float("inf")

    def add(self, unit: UnitState, tokens: float, now: float) -> None:
        """Count ``tokens``; with 0 the unit is merely remembered for as long as the window."""
        if now >= self._turns_at:
            self._turn(now)
        counted = self.buckets[-1].tokens
        counted[unit] = counted.get(unit, 0.0) + tokens
        unit.recent += tokens
        self.total += tokens

    def _turn(self, now: float) -> None:
        start = now // self._width * self._width
        self.put_back(Bucket(start))

    def expire(self, now: float) -> None:
        """Drop what is too old. Apart from ``add``, so that it forgets no unit in use."""
        if now < self.expires_at:
            return
        while self.buckets and self.buckets[0].started_at + self._span <= now:
            self._expire(self.buckets.popleft())
        if self.buckets:
            self.expires_at = self.buckets[0].started_at + self._span
        else:
            self.expires_at = float("inf")
            self._turns_at = float("-inf")

    def _expire(self, bucket: Bucket) -> None:
        for unit, tokens in bucket.tokens.items():
            self.total -= tokens
            unit.recent -= tokens
            if unit.recent < _NOTHING:
                unit.recent = 0.0
                self._forget(unit)
        if self.total < _NOTHING or not self.buckets:
            self.total = 0.0

    def put_back(self, bucket: Bucket) -> None:
        """Add a bucket, also one from a checkpoint. To be called from the oldest to the newest."""
        self.buckets.append(bucket)
        self.expires_at = self.buckets[0].started_at + self._span
        self._turns_at = bucket.started_at + self._width
        for unit, tokens in bucket.tokens.items():
            unit.recent += tokens
            self.total += tokens
