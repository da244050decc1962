"""Spans for OpenTelemetry, made from records once they are stored.

A request's span has one for its time in the queue and one for each attempt at a backend below it.
All times are in the record, so requests cost nothing more for being traced; the library is only
imported where ``OTEL_EXPORTER_OTLP_ENDPOINT`` says where spans go.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from django.conf import settings
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from scheduler.spool import Attempt, Record
from scheduler.trace_ids import Trace, attempt_span, queue_span, request_span, trace_of

_SCOPE = InstrumentationScope("mindrouter")
#: {our name of an operation: OpenTelemetry's}
_OPERATIONS = {
    "chat.completions": "chat",
    "responses": "chat",
    "messages": "chat",
    "ollama.chat": "chat",
    "completions": "text_completion",
    "ollama.generate": "text_completion",
    "ollama.embed": "embeddings",
    "ollama.embeddings": "embeddings",
}
_SERVER_ERROR = 500
_FAILED = frozenset({"failed", "aborted"})


class Tracer:
    """Sends spans in batches, in a thread of its own; what cannot be sent is dropped."""

    def __init__(self) -> None:
        given = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "mindrouter"}
        self._resource = Resource.create(given)
        self._processor = BatchSpanProcessor(OTLPSpanExporter())

    def add(self, records: list[Record]) -> None:
        for record in records:
            for span in spans_of(record, settings.OTEL_TRACES_SAMPLER_ARG, self._resource):
                self._processor.on_end(span)

    def stop(self) -> None:
        """Send what is left."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def spans_of(record: Record, ratio: float, resource: Resource) -> Iterator[ReadableSpan]:
    """The spans of one request; none where its trace is not recorded."""
    trace = trace_of(record.request_id, record.traceparent, ratio)
    if not trace.sampled or record.ended_at is None:
        return
    own = _context(trace, request_span(record.request_id))
    failed = record.outcome in _FAILED or (record.status or 0) >= _SERVER_ERROR
    yield ReadableSpan(
        f"{_operation(record)} {record.model_requested}".strip(),
        context=own,
        parent=_context(trace, trace.parent_id, is_remote=True) if trace.parent_id else None,
        kind=SpanKind.SERVER,
        attributes=_known(_of_request(record)),
        events=_events(record),
        status=Status(StatusCode.ERROR, record.message or record.reason) if failed else Status(),
        **_between(record.arrived_at, record.ended_at, resource),
    )
    if record.queued_at is not None:
        yield ReadableSpan(
            "queue",
            context=_context(trace, queue_span(record.request_id)),
            parent=own,
            attributes=_known(_of_queue(record)),
            **_between(record.queued_at, record.dispatched_at or record.ended_at, resource),
        )
    for number, attempt in enumerate(record.attempts, start=1):
        yield _of_attempt(record, attempt, number, trace, own, resource)


def _of_attempt(
    record: Record,
    attempt: Attempt,
    number: int,
    trace: Trace,
    parent: SpanContext,
    resource: Resource,
) -> ReadableSpan:
    start = record.arrived_at if attempt.started_at is None else attempt.started_at
    return ReadableSpan(
        f"{_operation(record)} {record.model_served or record.model_requested}".strip(),
        context=_context(trace, attempt_span(record.request_id, number)),
        parent=parent,
        kind=SpanKind.CLIENT,
        attributes=_known(
            {
                "gen_ai.operation.name": _operation(record),
                "gen_ai.request.model": record.model_served or record.model_requested,
                "mindrouter.backend": attempt.backend,
                "mindrouter.attempt": number,
                "http.response.status_code": attempt.status,
                "error.type": attempt.reason,
            }
        ),
        status=Status(StatusCode.ERROR, attempt.reason) if attempt.reason else Status(),
        **_between(start, attempt.ended_at or record.ended_at or start, resource),
    )


def _of_request(record: Record) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": _operation(record),
        "gen_ai.provider.name": "mindrouter",
        "gen_ai.request.model": record.model_requested,
        "gen_ai.response.model": record.model_served,
        "gen_ai.response.id": record.request_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "http.request.method": "POST",
        "http.response.status_code": record.status,
        "error.type": record.reason,
        "user.name": record.user,
        "mindrouter.group": record.group,
        "mindrouter.outcome": record.outcome,
        "mindrouter.stream": record.stream,
        "mindrouter.charged_tokens": record.charged_tokens,
        "mindrouter.usage_estimated": record.usage_estimated,
    }


def _of_queue(record: Record) -> dict[str, Any]:
    decision = record.decision
    return {
        "mindrouter.wait_reason": record.wait_reason,
        "mindrouter.position_at_arrival": record.position_at_arrival,
        "mindrouter.selection_reason": "" if decision is None else decision.reason,
        "mindrouter.backend": record.selected_backend,
    }


def _events(record: Record) -> list[Event]:
    times = (("first_byte", record.first_byte_at), ("first_token", record.first_token_at))
    return [Event(name, timestamp=_nanoseconds(at)) for name, at in times if at is not None]


def _operation(record: Record) -> str:
    return _OPERATIONS.get(record.endpoint, record.endpoint)


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value not in (None, "")}


def _context(trace: Trace, span_id: int, *, is_remote: bool = False) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(trace.trace_id, span_id, is_remote=is_remote, trace_flags=flags)


def _between(start: float, end: float, resource: Resource) -> dict[str, Any]:
    return {
        "start_time": _nanoseconds(start),
        "end_time": max(_nanoseconds(start), _nanoseconds(end)),
        "resource": resource,
        "instrumentation_scope": _SCOPE,
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
