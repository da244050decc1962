"""A backend's server-sent events on their way to the client.

Bytes go through as whole events, so that whatever the router adds (an error, say) never lands in
the middle of one. What is not needed is not parsed: an event is looked into only where a plain
search for a word says that it may matter.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from mindrouter.gateway.told import (
    NULL,
    has_error_line,
    read_event,
    read_usage,
    told_error,
    usage_beside,
)
from scheduler.core.jobs import Usage

#: An event that is still not whole after so many bytes is passed on as it comes.
MAX_EVENT_BYTES = 1 << 20

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n")
_LONGEST_END = 4
_CR = 13  # as a number, which is looked for ten times as fast as one byte in bytes
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_DONE = re.compile(rb"(?:^|[\r\n])data:[ \t]*\[DONE\][ \t]*(?=[\r\n]|$)")
#: The first thing a person would see: text, reasoning or a tool's name or arguments.
_CONTENT = re.compile(
    rb'"(?:content|reasoning_content|reasoning|text|arguments|name|refusal)"\s*:\s*"[^"]'
)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Events(Protocol):
    """What a relay must know of a stream in any form. ``EventStream`` says what each means."""

    @property
    def usage(self) -> Usage | None: ...
    @property
    def error(self) -> Any: ...
    @property
    def done(self) -> bool: ...
    @property
    def first_token_seen(self) -> bool: ...
    @property
    def torn(self) -> bool: ...
    @property
    def over(self) -> bool: ...
    @property
    def finished(self) -> bool: ...
    @property
    def estimated_tokens(self) -> int: ...

    def feed(self, data: bytes) -> bytes: ...
    def finish(self) -> bytes: ...


class EventStream:
    """Feeds on reads, gives whole events, and remembers what the record needs.

    ``hide_usage``: the router asked for the usage event and the client did not, so an event that
    carries nothing else is left out.
    """

    __slots__ = (
        "_begun",
        "_edge",
        "_ended",
        "_events",
        "_finish_seen",
        "_hide_usage",
        "_pending",
        "_pending_bytes",
        "done",
        "error",
        "estimated_tokens",
        "first_token_seen",
        "torn",
        "usage",
    )

    def __init__(self, *, hide_usage: bool) -> None:
        self.usage: Usage | None = None
        self.error: Any = None  # the backend's own error event, as parsed; never passed on
        self.done = False  # [DONE] has come
        self.first_token_seen = False
        self.torn = False  # the last bytes given are not the end of an event
        #: Output tokens where the backend does not tell: its events that carried content, which are
        #: about one token each.
        self.estimated_tokens = 0
        self._events = 0  # the same, though fewer than none where several ends come first
        self._begun = self._ended = False
        self._finish_seen = False
        self._hide_usage = hide_usage
        self._pending: list[bytes] = []  # an event that is not whole yet
        self._pending_bytes = 0
        self._edge = b""  # its last bytes: an end may be cut by a read

    def feed(self, data: bytes) -> bytes:
        """Bytes to pass on now: whole events only, possibly none; nothing after an error or
        ``[DONE]``."""
        if self.torn:
            return self._feed_torn(data)
        if not self._pending and data.endswith(b"\n\n"):
            if not self.first_token_seen or self._ended or _says_more_than_content(data):
                return self._look(data)
            self._events += data.count(b"\ndata:") + data.startswith(b"data:")
            self.estimated_tokens = self._events if self._events > 0 else 1
            return data
        recent = self._edge + data
        if not _EVENT_END.search(recent):
            return self._keep(data, recent)
        if self._pending:
            data = b"".join([*self._pending, data])
        end = _last_end(data)
        rest = data[end:]
        self._pending = [rest] if rest else []
        self._pending_bytes = len(rest)
        self._edge = rest[1 - _LONGEST_END :]
        return self._look(data[:end])

    def finish(self) -> bytes:
        """What is left when the backend has ended: an event that is whole but for its blank
        line. Half an event is of no use to anybody."""
        rest = b"".join(self._pending)
        self._pending.clear()
        if self._ended:
            return b""
        if self.torn or not rest.strip(b"\r\n"):  # blank lines are no event, and harm nobody
            return rest
        rest = self._without_mark(rest)
        told = read_event(rest) or told_error(rest)
        if told is None and not _DONE.search(rest):
            return b""
        return self._look(rest + b"\n\n")

    @property
    def over(self) -> bool:
        """Whether nothing may follow: the backend said that it was done, or told of an error."""
        return self.done or self.error is not None

    @property
    def finished(self) -> bool:
        """Whether the backend said that it had finished, by a finish reason or ``[DONE]``."""
        return self.done or self._finish_seen

    def _feed_torn(self, data: bytes) -> bytes:
        """The end of an event whose beginning is with the client, before any other: it is passed on
        by itself, lest it be lost with an error that follows."""
        recent = self._edge + data
        found = _EVENT_END.search(recent)
        if found is None:
            return self._keep(data, recent)
        end = found.end() - len(self._edge)
        tail = b"".join([*self._pending, data[:end]])
        self._pending.clear()
        self._pending_bytes = 0
        self._edge = b""
        tail = self._look(tail)
        self.torn = not tail  # where it tells of an error
        if self.over or end == len(data):
            return tail
        return tail + self.feed(data[end:])

    def _keep(self, data: bytes, recent: bytes) -> bytes:
        self._pending.append(data)
        self._pending_bytes += len(data)
        self._edge = recent[1 - _LONGEST_END :]
        if self._pending_bytes <= MAX_EVENT_BYTES:
            return b""
        block = b"".join(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        block = self._look(block)
        self.torn = bool(block)
        return block

    def _look(self, block: bytes) -> bytes:
        if self._ended:
            return b""
        self.torn = False
        block = self._without_mark(block)
        if b"[DONE]" in block:
            block = _up_to_done(block)
        told: Usage | None = None
        if b"error" in block and (b'"error"' in block or has_error_line(block)):
            block, told = self._until_error(block)
        if b'"usage"' in block and _USAGE.search(block):
            block = self._take_usage(block)
        if told is not None:
            self.usage = told
        finishes = block.count(b'"finish_reason"')
        # vLLM says null in each event but the last: to count that is cheaper than to search it.
        if finishes and finishes != block.count(b'"finish_reason":null'):
            finishes = len(_FINISH.findall(block))
        else:
            finishes = 0
        if finishes:
            self._finish_seen = True
        if b"[DONE]" in block and _DONE.search(block):
            self.done = True
        self._ended = self.over
        self._count(block, finishes)
        return block

    def _without_mark(self, block: bytes) -> bytes:
        """Without the byte order mark that a stream may begin with."""
        if self._begun:
            return block
        self._begun = True
        return block.removeprefix(BYTE_ORDER_MARK)

    def _count(self, block: bytes, finishes: int) -> None:
        """Count the events that carry content: all from the first one on, but for those that
        only end an answer or the stream."""
        events = 0
        if not self.first_token_seen:
            match = _CONTENT.search(block)
            if match is None:
                return
            self.first_token_seen = True
            events = 1
            block = block[match.start() :]
            finishes = len(_FINISH.findall(block))
        events += block.count(b"\ndata:") + block.startswith(b"data:") - finishes
        if b"\r" in block:  # which ends a line by itself, too
            events += block.count(b"\rdata:")
        if b"[DONE]" in block:
            events -= len(_DONE.findall(block))
        self._events += events
        self.estimated_tokens = max(1, self._events)

    def _take_usage(self, block: bytes) -> bytes:
        kept = []
        for event in split_events(block):
            parsed = read_event(event) if _USAGE.search(event) else None
            if parsed is not None and parsed.usage != NULL:
                self.usage = read_usage(parsed.usage) or self.usage
                if self._hide_usage and not parsed.choices and parsed.failure is None:
                    continue
            kept.append(event)
        return b"".join(kept)

    def _until_error(self, block: bytes) -> tuple[bytes, Usage | None]:
        """The events before the first one that tells of an error, and the usage that this tells."""
        kept = []
        told: Usage | None = None
        for event in split_events(block):
            parsed = read_event(event) if b'"error"' in event else None
            self.error = parsed and parsed.failure
            if self.error is None:
                self.error = told_error(event)
            if self.error is not None:
                told = usage_beside(event)
                break
            kept.append(event)
        return b"".join(kept), told


def _up_to_done(block: bytes) -> bytes:
    """Without what follows ``[DONE]``, which is of no answer."""
    found = _DONE.search(block)
    end = _EVENT_END.search(block, found.end()) if found else None
    return block[: end.end()] if end else block


def _says_more_than_content(data: bytes) -> bool:
    """Whether there may be anything in it but texts. vLLM says null in each event but the last: to
    count that is cheaper than to search. So is ``find`` than ``in``, which takes what it is given
    for a number first and raises an error within."""
    find = data.find
    return (
        find(b'"usage"') >= 0
        or find(b"error") >= 0
        or find(b"[DONE]") >= 0
        or (_CR in data and data.count(b"\r") != data.count(b"\r\n"))
        or data.count(b'"finish_reason"') != data.count(b'"finish_reason":null')
    )


def _last_end(data: bytes) -> int:
    """Where the last whole event of ``data`` ends; there is at least one.

    Searching backwards for the usual ends is cheap; exactness is left to the regular expression,
    which starts there.
    """
    start = max(data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n"), data.rfind(b"\r\r"), 0)
    end = 0
    for match in _EVENT_END.finditer(data, max(0, start - _LONGEST_END)):
        end = match.end()
    return end


def split_events(block: bytes) -> list[bytes]:
    """Whole events with their blank lines; what follows the last one comes last."""
    if b"\r" not in block:  # as nearly always, and much cheaper
        *whole, rest = block.split(b"\n\n")
        return [event + b"\n\n" for event in whole] + ([rest] if rest else [])
    events, start = [], 0
    for match in _EVENT_END.finditer(block):
        events.append(block[start : match.end()])
        start = match.end()
    if start < len(block):
        events.append(block[start:])
    return events
