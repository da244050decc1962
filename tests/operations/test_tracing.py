"""Traces: the client's context reaches the backend, and spans a collector that speaks OTLP."""

from __future__ import annotations

import gzip
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace.sampling import Decision as Sampled
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from mindrouter.gateway import traces
from scheduler.spool import Attempt, Record
from scheduler.trace_ids import attempt_span, queue_span, request_span, trace_of
from scheduler.tracing import Tracer
from tests.factories import make_choice
from tests.operations.test_metrics import record
from tests.running import RunningRouter
from tests.stubs.openai_stub import OpenAIStub

ID = "0123456789abcdef0f1e2d3c4b5a6978"
CLIENTS = "00-" + "1" * 16 + "2" * 16 + "-3333333333333333-01"


class Collector:
    """What listens at /v1/traces: OTLP over HTTP in protobuf, as the specification has it."""

    def __init__(self) -> None:
        self.requests: queue.Queue[ExportTraceServiceRequest] = queue.Queue()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                # Before the answer, which says that they have been taken.
                collector.requests.put(ExportTraceServiceRequest.FromString(body))
                fits = self.path == "/v1/traces"
                fits = fits and self.headers["Content-Type"] == "application/x-protobuf"
                self.send_response(200 if fits else 400)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    running = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
    yield running
    running.close()


def exported(collector: Collector, *records: Record) -> list[Any]:
    """The spans that arrive when these records are stored, in the order of their start."""
    tracer = Tracer()
    tracer.add(list(records))
    tracer.stop()
    if collector.requests.empty():
        return []
    told = collector.requests.get()
    [resource] = told.resource_spans
    names = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert names["service.name"] == "mindrouter"
    return sorted(resource.scope_spans[0].spans, key=lambda one: one.start_time_unix_nano)


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def retried(**fields: Any) -> Record:
    tried = [
        Attempt(backend="a", status=500, reason="upstream_error", started_at=102.0, ended_at=102.5),
        Attempt(backend="b", status=200, started_at=102.5, ended_at=106.0),
    ]
    values: dict[str, Any] = {"request_id": ID, "endpoint": "chat.completions", "attempts": tried}
    values |= {"model_requested": "alias", "status": 200, "decision": make_choice()}
    values |= {"prompt_tokens": 70, "completion_tokens": 30, "cached_tokens": 20, "user": "ada"}
    return record(**(values | fields))


def test_a_request_is_a_span_with_its_queue_and_attempts_below(collector: Collector) -> None:
    request, waiting, first, second = exported(collector, retried())
    assert [one.name for one in (request, waiting, first, second)] == [
        "chat alias",
        "queue",
        "chat m",
        "chat m",
    ]
    assert {one.trace_id.hex() for one in (request, waiting, first, second)} == {ID}
    assert request.parent_span_id == b""
    assert {one.parent_span_id for one in (waiting, first, second)} == {request.span_id}
    times = [(one.start_time_unix_nano, one.end_time_unix_nano) for one in (waiting, second)]
    assert times == [(100 * 10**9, 102 * 10**9), (102_500_000_000, 106 * 10**9)]
    assert (request.kind, first.kind) == (2, 3)  # SERVER, CLIENT
    assert (request.status.code, first.status.code) == (0, 2)  # unset, error
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "alias",
        "gen_ai.response.model": "m",
        "gen_ai.usage.input_tokens": 70,
        "gen_ai.usage.output_tokens": 30,
        "gen_ai.usage.cache_read.input_tokens": 20,
        "mindrouter.group": "staff",
        "http.response.status_code": 200,
    }.items() <= attributes(request).items()
    assert attributes(waiting)["mindrouter.wait_reason"] == "others_ahead"
    assert attributes(first)["error.type"] == "upstream_error"
    assert attributes(second)["mindrouter.backend"] == "b"
    assert [one.name for one in request.events] == ["first_token"]


def test_spans_join_the_clients_trace(collector: Collector) -> None:
    request, *_ = exported(collector, retried(traceparent=CLIENTS))
    assert request.trace_id.hex() == "1111111111111111" + "2222222222222222"
    assert request.parent_span_id.hex() == "3333333333333333"


def test_what_the_client_does_not_record_is_not_recorded(collector: Collector) -> None:
    assert exported(collector, retried(traceparent=CLIENTS[:-1] + "0")) == []


def test_a_refused_request_is_one_span(collector: Collector) -> None:
    fields: dict[str, Any] = {"queued_at": None, "dispatched_at": None, "attempts": []}
    fields |= {"outcome": "refused", "status": 503, "reason": "queue_full", "first_token_at": None}
    [span] = exported(collector, retried(**fields))
    assert (span.status.code, attributes(span)["error.type"]) == (2, "queue_full")


@given(st.integers(1, 2**128 - 1), st.floats(0, 1))
def test_traces_are_chosen_as_other_programs_choose_them(trace_id: int, ratio: float) -> None:
    theirs = TraceIdRatioBased(ratio).should_sample(None, trace_id, "x").decision
    ours = trace_of(f"{trace_id:032x}", "", ratio).sampled
    assert ours == (theirs is Sampled.RECORD_AND_SAMPLE)


@given(st.integers(0, 2**128 - 1))
def test_the_ids_of_a_requests_spans_differ(number: int) -> None:
    name = f"{number:032x}"
    attempts = [attempt_span(name, one) for one in range(1, 6)]
    assert len(set(attempts)) == 5
    assert all(0 < one < 2**64 for one in [request_span(name), queue_span(name), *attempts])


# ---- to the backend


async def test_a_clients_context_passes_to_the_backend_as_it_came(
    router: RunningRouter, stub: OpenAIStub, backend: int
) -> None:
    headers = {"traceparent": CLIENTS, "tracestate": "vendor=1"}
    router.client.headers.update(headers)
    assert (await router.chat()).status_code == 200
    sent = stub.calls[0].headers
    assert (sent["traceparent"], sent["tracestate"]) == (CLIENTS, "vendor=1")


@pytest.mark.parametrize(
    "wrong",
    ["", "00-0-0-01", "00-" + "0" * 32 + CLIENTS[35:], "ff" + CLIENTS[2:], CLIENTS + "-x"],
)
async def test_what_is_no_context_passes_to_nobody(
    router: RunningRouter, stub: OpenAIStub, backend: int, wrong: str
) -> None:
    router.client.headers.update({"traceparent": wrong, "tracestate": "vendor=1"})
    assert (await router.chat()).status_code == 200
    assert not {"traceparent", "tracestate"} & set(stub.calls[0].headers)


async def test_where_the_router_traces_the_backend_gets_the_attempts_span(
    router: RunningRouter, stub: OpenAIStub, backend: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "ON", True)
    answer = await router.chat()
    request_id = answer.headers["x-request-id"]
    span = f"{attempt_span(request_id, 1):016x}"
    assert stub.calls[0].headers["traceparent"] == f"00-{request_id}-{span}-01"
    router.client.headers.update({"traceparent": CLIENTS})
    answer = await router.chat()
    span = f"{attempt_span(answer.headers['x-request-id'], 1):016x}"
    told = stub.calls[1].headers["traceparent"]
    assert told == f"{CLIENTS[:36]}{span}-01"


def test_where_nobody_takes_spans_their_library_is_not_loaded() -> None:
    program = (
        "import sys, django; django.setup()\n"
        "from scheduler.management.commands import runrecorder\n"
        "import mindrouter.asgi\n"
        "assert runrecorder.make_tracer() is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"
