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


def events_in(data: bytes) -> list[bytes]:
    """The data of each event, read as the standard has it (WHATWG HTML, 9.2.6)."""
    found: list[bytes] = []
    lines: list[bytes] = []
    *whole, _ = LINE_END.split(data)
    for line in whole:
        if not line:
            if lines:
                found.append(b"\n".join(lines))
            lines = []
        elif line == b"data" or line.startswith(b"data:"):
            value = line[5:]
            lines.append(value[1:] if value.startswith(b" ") else value)
    return found


def is_an_error(event: bytes) -> bool:
    fields = fields_of(event)
    return fields.get("error") is not None and not fields.get("choices")


def fields_of(event: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(event)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def check(data: bytes) -> None:
    for hide_usage in (False, True):
        first, *others = [relayed(way, hide_usage=hide_usage) for way in ways_to_cut(data)]
        for other in others:
            assert other == first, f"{other} is not {first}"
        came = events_in(data.removeprefix(b"\xef\xbb\xbf") + b"\n\n")
        got = events_in(first.passed)
        if not hide_usage:
            assert got == came[: len(got)], f"{got} of {came}"
        errors = [number for number, event in enumerate(came) if is_an_error(event)]
        if errors:
            assert len(got) <= errors[0], f"{got} of {came}"
