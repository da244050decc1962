"""Streams that a backend writes in the client's own form: passed on as they are, and watched.

The same to a relay as an ``EventStream`` of OpenAI's form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from mindrouter.gateway.dialects.splitter import Splitter
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.told import told_error
from scheduler.core.jobs import Usage


class NativeStream(ABC):
    """Feeds on reads, gives whole events, and remembers what the record needs.

    Each dialect says in ``_look`` what an event means. ``prompt_tokens`` is the estimate that
    stands in where a backend tells of its output only.
    """

    END = b"\n\n"

    def __init__(self, *, prompt_tokens: int) -> None:
        self.usage: Usage | None = None
        self.error: Any = None  # the backend's own, as parsed, or a GatewayError; not passed on
        self.done = False  # the event that ends the form has come
        self.first_token_seen = False
        self.torn = False  # events are only ever passed on whole
        self._prompt_tokens = prompt_tokens
        self._split = Splitter(self.END)
        self._events = 0  # those with content

    def feed(self, data: bytes) -> bytes:
        """Whole events to pass on now; nothing after an error or the end."""
        try:
            events = self._split.events(data)
        except GatewayError as error:
            self.error = self.error or error
            return b""
        return b"".join(self._kept(events))

    def finish(self) -> bytes:
        """What is left when the backend has ended: an event that lacks but its end."""
        rest = self._split.rest()
        return b"".join(self._kept([rest + self.END])) if rest.strip() else b""

    @property
    def over(self) -> bool:
        return self.done or self.error is not None

    @property
    def finished(self) -> bool:
        """Whether the backend said that it had finished."""
        return self.done

    @property
    def estimated_tokens(self) -> int:
        """Output tokens so far: events that carry content are about one token each."""
        return self._events

    def _kept(self, events: list[bytes]) -> list[bytes]:
        kept = []
        for event in events:
            if self.over:
                break
            if not self._look(event):
                continue
            if b"error" in event and (told := told_error(event)) is not None:
                self.error = told
                break
            kept.append(event)
        return kept

    @abstractmethod
    def _look(self, event: bytes) -> bool:
        """Note what the event says. False: it is not to be passed on."""

    def _count(self) -> None:
        self.first_token_seen = True
        self._events += 1
