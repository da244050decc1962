"""When the events of many streams are read and sent in batches, instead of one by one.

A router that has passed an event on goes to sleep until the next one wakes it, and each write
wakes a client that sleeps likewise: with thousands of events a second that is a fifth of what they
cost. Network cards wait a moment for the same reason (interrupt moderation). Where fewer than 16
come within 4 ms, nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

#: How far apart batches are: the longest that the event loop sleeps behind one.
BATCH_SECONDS = 0.002
#: Batches begin when SAMPLE_EVENTS come within SAMPLE_SECONDS.
SAMPLE_EVENTS = 16
SAMPLE_SECONDS = 0.004
#: After a batch with fewer than these, events go one by one again.
LEAST_EVENTS = 2


class Pace:
    """Of one event loop, which counts the events it passes on."""

    __slots__ = ("_clock", "_since", "events", "is_batching")

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.is_batching = False  # an event is to wait for the others of its turn
        #: Of the sample or of the batch. Whoever passes one on counts it here and, when the sample
        #: is whole, asks ``begins``, which is cheaper than a call for each.
        self.events = 0
        self._clock = clock
        self._since = clock()  # when that began; a batch begins at the end of a rest

    def begins(self) -> bool:
        """At the end of a sample: whether batches begin, with its last event."""
        now = self._clock()
        self.is_batching = now - self._since <= SAMPLE_SECONDS
        self._since = now
        self.events = LEAST_EVENTS if self.is_batching else 0
        return self.is_batching

    def rest(self) -> float:
        """At the end of a turn with events: the seconds to wait until the next one."""
        now = self._clock()
        left = max(0.0, self._since + BATCH_SECONDS - now)
        self.is_batching = self.events >= LEAST_EVENTS
        self.events = 0
        if not self.is_batching:
            left = 0.0
        self._since = now + left
        return left
