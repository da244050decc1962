"""What leaves at the end of a turn of the event loop: one write right behind the other.

A write wakes whoever waits for it. Where that is a process of this machine, the kernel interrupts
a sleeping core for each, which took a fifth of a request's time; whoever gets the next one right
behind the first is still awake. With many events of streams the loop itself sleeps for a moment
behind them, so that more come at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import sleep
from typing import Protocol

from backends.pace import Pace

logger = logging.getLogger(__name__)

#: With so many waiting they leave before the turn's end, for the sake of those who wait for them.
MOST_WAITING = 32


class Sender(Protocol):
    """Has something to send, and keeps it until it is told to."""

    def send_unsent(self) -> None: ...


def _nothing() -> None:
    pass


class Outbox:
    """Of one event loop. The first to come in a turn leaves at once, as it may stay the only one;
    gathered events leave at its end.

    ``before`` is called before anything leaves: what must be written down first, is then.
    """

    __slots__ = ("_may_rest", "_turn_ends", "_waiting", "before", "pace")

    def __init__(self, before: Callable[[], None] = _nothing) -> None:
        self.before = before
        self.pace = Pace()  # of the events that are sent or gathered
        self._waiting: deque[Sender] = deque()
        self._turn_ends = False  # something has come in this turn, whose end will be heard of
        self._may_rest = False  # events have come, and nothing else since

    def add(self, sender: Sender) -> None:
        """Have it send now or by the end of the turn; senders keep their order."""
        self._may_rest = False  # whom a request is for waits already
        if self._turn_ends:
            self._append(sender)
        else:
            self._hear_of_the_end()
            self.before()
            sender.send_unsent()

    def gather(self, sender: Sender) -> None:
        """Have it send an event with the others of this turn, even if it is the first: while
        ``pace`` has batches."""
        if not self._turn_ends:
            self._hear_of_the_end()
            self._may_rest = True
        self._append(sender)

    def flush(self) -> None:
        """Have all of them send now."""
        waiting = self._waiting
        if waiting:
            self.before()
        while waiting:
            sender = waiting.popleft()
            try:
                sender.send_unsent()
            except Exception:  # which is no fault of those behind it, nor of who flushes
                logger.exception("%r cannot send", sender)

    def _append(self, sender: Sender) -> None:
        self._waiting.append(sender)
        if len(self._waiting) >= MOST_WAITING:
            self.flush()

    def _hear_of_the_end(self) -> None:
        self._turn_ends = True
        asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn_ends = False
        if self._waiting:
            self.flush()
        if self._may_rest:
            # Behind all that this turn has woken: a request, say, whose task is still to run.
            asyncio.get_running_loop().call_soon(self._rest)

    def _rest(self) -> None:
        if self._may_rest and not self._turn_ends:
            self._may_rest = False
            if seconds := self.pace.rest():
                sleep(seconds)
