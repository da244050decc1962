"""Any bytes as a backend's stream of events: what a client gets does not depend on how they came,
and is what an independent reader of events finds in them."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from mindrouter.gateway.events import EventStream
from scheduler.core.jobs import Usage
from tests.fuzz.cutting import ways_to_cut

LINE_END = re.compile(rb"\r\n|\n|\r")

BLANK_LINES = re.compile(
    rb"(?>\r\n|\r|\n){2,}"
)  # how many there are between two events says nothing


class Outcome(NamedTuple):
    passed: bytes
    usage: Usage | None
    error: Any
    done: bool
    finished: bool
    first_token_seen: bool
    estimated_tokens: int


def relayed(reads: list[bytes], *, hide_usage: bool) -> Outcome:
    stream = EventStream(hide_usage=hide_usage)
    passed = b"".join([*map(stream.feed, reads), stream.finish()])
    return Outcome(
        BLANK_LINES.sub(b"\n\n", passed),
        stream.usage,
        stream.error,
        stream.done,
        stream.finished,
        stream.first_token_seen,
        stream.estimated_tokens,
    )


class Event(NamedTuple):
    name: bytes
    data: bytes | None
    has_error_field: bool


def events_in(data: bytes) -> list[Event]:
    """Each event, read as the standard has it (WHATWG HTML, 9.2.6), but for those without data,
    which may tell of an error all the same."""
    found: list[Event] = []
    lines: list[bytes] = []
    *whole, _ = LINE_END.split(data)
    for line in whole:
        if line:
            lines.append(line)
        elif lines:
            found.append(event_of(lines))
            lines = []
    return found


def event_of(lines: list[bytes]) -> Event:
    fields = [line.partition(b":")[::2] for line in lines]
    fields = [(name, value.removeprefix(b" ")) for name, value in fields]
    data = [value for name, value in fields if name == b"data"]
    names = [value for name, value in fields if name == b"event"]
    has_error_field = any(line.startswith(b"error:") for line in lines)
    return Event(names[-1] if names else b"", b"\n".join(data) if data else None, has_error_field)


def data_in(events: list[Event]) -> list[bytes]:
    return [event.data for event in events if event.data is not None]


def is_an_error(event: Event) -> bool:
    fields = fields_of(event.data or b"")
    told = fields.get("error") is not None and not fields.get("choices")
    return told or event.name == b"error" or event.has_error_field


def fields_of(event: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(event.decode())  # bytes would be let off a byte order mark
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def check(data: bytes) -> None:
    for hide_usage in (False, True):
        first, *others = [relayed(way, hide_usage=hide_usage) for way in ways_to_cut(data)]
        for other in others:
            assert other == first, f"{other} is not {first}"
        came = events_in(data.removeprefix(b"\xef\xbb\xbf") + b"\n\n")
        whole, got = data_in(came), data_in(events_in(first.passed))
        if not hide_usage:
            assert got == whole[: len(got)], f"{got} of {whole}"
        errors = [number for number, event in enumerate(came) if is_an_error(event)]
        if errors:
            assert len(got) <= len(data_in(came[: errors[0]])), f"{got} of {came}"
            assert first.done or first.error is not None, f"{first} of {came}"
