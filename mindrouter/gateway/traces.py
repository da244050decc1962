"""The context of a client's trace, passed on to the backend.

Spans are made later, by the recorder, from the record (``scheduler.tracing``): nothing is measured
or kept here for them.
"""

from __future__ import annotations

from django.conf import settings

from mindrouter.gateway.client import Client
from scheduler.spool import Record
from scheduler.trace_ids import TRACEPARENT, attempt_span, trace_of, traceparent

#: Whether the router makes spans of its own.
ON: bool = settings.TRACING
RATIO: float = settings.OTEL_TRACES_SAMPLER_ARG
MOST_STATE_BYTES = 512


def checked(header: bytes) -> str:
    """The client's ``traceparent``; empty where it is none."""
    text = header.decode("latin-1").strip()
    return text if TRACEPARENT.fullmatch(text) else ""


def headers_for_backend(client: Client, record: Record) -> bytes:
    """The lines of this attempt: the client's context as it came, or with our span in it."""
    context = record.traceparent
    if ON:
        trace = trace_of(record.request_id, context, RATIO)
        context = traceparent(trace, attempt_span(record.request_id, len(record.attempts)))
    lines = b"traceparent: %b\r\n" % context.encode()
    state = client.headers.get(b"tracestate", b"") if record.traceparent else b""
    if state and len(state) <= MOST_STATE_BYTES:
        lines += b"tracestate: %b\r\n" % state
    return lines
