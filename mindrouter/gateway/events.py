"""A backend's server-sent events on their way to the client.

Bytes go through as whole events, so that whatever the router adds (an error, say) never lands in
the middle of one. What is not needed is not parsed: an event is looked into only where a plain
search for a word says that it may matter.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import msgspec

from scheduler.core.jobs import Usage

#: An event that is still not whole after so many bytes is passed on as it comes.
MAX_EVENT_BYTES = 1 << 20

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n")
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_DONE = re.compile(rb"^data:\s*\[DONE\]\s*$", re.MULTILINE)
#: The first thing a person would see: text, reasoning or a tool's name or arguments.
_CONTENT = re.compile(
    rb'"(?:content|reasoning_content|reasoning|text|arguments|name|refusal)"\s*:\s*"[^"]'
)
_DATA_LINE = re.compile(rb"^data:", re.MULTILINE)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class UsageFields(msgspec.Struct):
    """``usage`` as OpenAI writes it; a backend's null or absent numbers stay None."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None

    def usage(self) -> Usage | None:
        if self.prompt_tokens is None or self.prompt_tokens < 0:
            return None
        details = self.prompt_tokens_details
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=max(0, self.completion_tokens or 0),
            cached_tokens=max(0, (details and details.cached_tokens) or 0),
        )


class _Event(msgspec.Struct):
    usage: UsageFields | None = None
    choices: list[msgspec.Raw] | None = None
    error: Any = None


_event_decoder = msgspec.json.Decoder(_Event)


def read_event(event: bytes) -> _Event | None:
    """The JSON of one event's data lines, or None where it is none that concerns us."""
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    try:
        return _event_decoder.decode(b"\n".join(lines))
    except (msgspec.MsgspecError, RecursionError):
        return None


class EventStream:
    """Feeds on reads, gives whole events, and remembers what the record needs.

    ``hide_usage``: the router asked for the usage event and the client did not, so an event that
    carries nothing else is left out.
    """

    __slots__ = (
        "_carry",
        "_hide_usage",
        "_recent",
        "content_events",
        "error",
        "first_token_seen",
        "usage",
    )

    def __init__(self, *, hide_usage: bool) -> None:
        self.usage: Usage | None = None
        self.error: Any = None  # the backend's own error event, as parsed
        self.first_token_seen = False
        self.content_events = 0  # about one token each
        self._hide_usage = hide_usage
        self._carry = b""
        self._recent: deque[bytes] = deque(maxlen=3)

    def feed(self, data: bytes) -> bytes:
        """Bytes to pass on now: whole events only, possibly none."""
        if self._carry:
            data = self._carry + data
            self._carry = b""
        if not data.endswith(b"\n\n"):
            data = self._whole(data)
            if not data:
                return b""
        return self._look(data)

    def finish(self) -> bytes:
        """What is left when the backend has ended: an event it did not close."""
        rest, self._carry = self._carry, b""
        if not rest.strip():
            return b""
        return self._look(rest + b"\n\n" if _DATA_LINE.search(rest) else rest)

    @property
    def finished(self) -> bool:
        """Whether the backend said that it had finished, by a finish reason or ``[DONE]``."""
        tail = b"".join(self._recent)
        return bool(_DONE.search(tail) or _FINISH.search(tail))

    @property
    def estimated_tokens(self) -> int:
        """Output tokens where the backend does not tell: its events that carried content."""
        return self.content_events

    def _whole(self, data: bytes) -> bytes:
        """Cut ``data`` behind its last whole event and keep the rest back."""
        end = 0
        for match in _EVENT_END.finditer(data, max(0, _last_end(data) - 4)):
            end = match.end()
        if end == 0 and len(data) > MAX_EVENT_BYTES:
            return data
        self._carry = data[end:]
        return data[:end]

    def _look(self, block: bytes) -> bytes:
        if b'"usage"' in block and _USAGE.search(block):
            block = self._take_usage(block)
            if not block:
                return b""
        if b'"error"' in block or block.startswith(b"error:"):
            self._take_error(block)
        self._recent.append(block)
        if self.first_token_seen:
            self.content_events += block.count(b"data:")
            if b"finish_reason" in block and _FINISH.search(block):
                self.content_events -= 1
            if b"[DONE]" in block:
                self.content_events -= 1
        elif match := _CONTENT.search(block):
            self.first_token_seen = True
            rest = block[match.start() :]
            self.content_events = 1 + rest.count(b"data:") - rest.count(b"[DONE]")
            self.content_events -= len(_FINISH.findall(rest))
        return block

    def _take_usage(self, block: bytes) -> bytes:
        kept = []
        for event in split_events(block):
            parsed = read_event(event) if _USAGE.search(event) else None
            if parsed is not None and parsed.usage is not None:
                self.usage = parsed.usage.usage() or self.usage
                if self._hide_usage and parsed.choices == []:
                    continue
            kept.append(event)
        return b"".join(kept)

    def _take_error(self, block: bytes) -> None:
        for event in split_events(block):
            # llama.cpp's older form is a field of its own
            parsed = read_event(
                event.replace(b"error:", b"data:", 1) if block[:6] == b"error:" else event
            )
            if parsed is not None and parsed.error is not None and not parsed.choices:
                self.error = parsed.error
                return


def _last_end(data: bytes) -> int:
    """Where the last event end begins, roughly: searching backwards is cheap, and exactness is
    left to the regular expression that starts there."""
    return max(data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n"), data.rfind(b"\r\r"), 0)


def split_events(block: bytes) -> list[bytes]:
    """Whole events with their blank lines; what follows the last one comes last."""
    events, start = [], 0
    for match in _EVENT_END.finditer(block):
        events.append(block[start : match.end()])
        start = match.end()
    if start < len(block):
        events.append(block[start:])
    return events
