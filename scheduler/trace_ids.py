"""The ids of a request's trace, all of them from its own id: nobody has to remember or tell them.

W3C Trace Context. A request's id is 32 hexadecimal digits, like a trace's. A client's context goes
before it; without one the request's id is the trace's.
"""

from __future__ import annotations

import re
from typing import NamedTuple

TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1
_LOW_64 = (1 << 64) - 1


class Trace(NamedTuple):
    """``trace_id`` and ``parent_id`` (the client's span; 0: none) as numbers."""

    trace_id: int
    parent_id: int
    sampled: bool


def trace_of(request_id: str, traceparent: str, ratio: float) -> Trace:
    """The client's trace and its decision whether to record it, or a trace of our own, of which
    ``ratio`` (0..1) are recorded."""
    told = TRACEPARENT.fullmatch(traceparent)
    if told is not None:
        return Trace(int(told[1], 16), int(told[2], 16), bool(int(told[3], 16) & _SAMPLED))
    trace_id = int(request_id, 16)
    # As the SDKs' TraceIdRatioBased, so that everybody decides alike.
    return Trace(trace_id, 0, (trace_id & _LOW_64) < round(ratio * (1 << 64)))


def request_span(request_id: str) -> int:
    return int(request_id[:16], 16) or 1


def queue_span(request_id: str) -> int:
    return int(request_id[16:], 16) or 1


def attempt_span(request_id: str, number: int) -> int:
    """Of the attempt of this number, from 1."""
    # Half a bit pattern away from the other two: ids of one request never meet.
    return (request_span(request_id) ^ queue_span(request_id) ^ (number << 32)) or number


def traceparent(trace: Trace, span_id: int) -> str:
    """What the next one down the line is sent."""
    return f"00-{trace.trace_id:032x}-{span_id:016x}-{int(trace.sampled):02x}"
