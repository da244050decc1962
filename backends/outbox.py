"""What leaves at the end of a turn of the event loop: one write right behind the other.

A write wakes whoever waits for it. Where that is a process of this machine, the kernel interrupts
a sleeping core for each, which took a fifth of a request's time; whoever gets the next one right
behind the first is still awake.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

#: With so many waiting they leave before the turn's end, for the sake of those who wait for them.
MOST_WAITING = 32


class Sender(Protocol):
    """Has something to send, and keeps it until it is told to."""

    def send_unsent(self) -> None: ...


def _nothing() -> None:
    pass


class Outbox:
    """Of one event loop. The first to come in a turn leaves at once, as it may stay the only one.

    ``before`` is called before anything leaves: what must be written down first, is then.
    """

    __slots__ = ("_has_sent", "_waiting", "before")

    def __init__(self, before: Callable[[], None] = _nothing) -> None:
        self.before = before
        self._waiting: deque[Sender] = deque()
        self._has_sent = False  # in this turn

    def add(self, sender: Sender) -> None:
        """Have it send now or by the end of the turn; senders keep their order."""
        if self._has_sent:
            self._waiting.append(sender)
            if len(self._waiting) >= MOST_WAITING:
                self.flush()
        else:
            self._has_sent = True
            asyncio.get_running_loop().call_soon(self._end_turn)
            self.before()
            sender.send_unsent()

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

    def _end_turn(self) -> None:
        self._has_sent = False
        if self._waiting:
            self.flush()
