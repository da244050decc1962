"""Whatever a network or a proxy can do to a connection, on streams, whole answers, a translated
form and embeddings: an answer that is whole arrives whole, and any other is a proper error."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from mindrouter.gateway import translating
from tests.faults.surfaces import Surface, every_form, every_form_of_stream
from tests.running import LONG, RunningRouter, until
from tests.stubs.openai_stub import EVENT_STREAM, JSON, Behaviour, Call, OpenAIStub, respond
from tests.stubs.scripted import ClientGone, StubConnection

OK = b"HTTP/1.1 200 OK\r\n"
Fault = Callable[[StubConnection], Awaitable[None]]


def streams(call: Call) -> bool:
    return call.is_stream and not call.path.endswith("/embeddings")


def content(call: Call) -> bytes:
    """A proper answer's body."""
    return b"".join(call.events()) if streams(call) else json.dumps(call.document()).encode()


def kind(call: Call) -> tuple[str, str]:
    return EVENT_STREAM[0] if streams(call) else JSON


def head(call: Call, *more: str, line: bytes = OK) -> bytes:
    """The beginning of a response, up to where its headers end or go on."""
    fields = ": ".join(kind(call)), *more
    return line + "".join(f"{field}\r\n" for field in fields).encode()


# ---- an answer that is whole


async def chunked(call: Call, *more: str) -> None:
    await call.connection.write(head(call, "Transfer-Encoding: chunked", *more), b"\r\n")
    await call.connection.chunk(content(call))


async def with_trailers(call: Call) -> None:
    await chunked(call, "Trailer: X-Trailer")
    await call.connection.end_chunked(b"X-Trailer: 1\r\n")


async def with_extensions(call: Call) -> None:
    body = content(call)
    await call.connection.write(head(call, "Transfer-Encoding: chunked"), b"\r\n")
    await call.connection.write(b'%x;a=b;c="d"\r\n%b\r\n0;e\r\n\r\n' % (len(body), body))


async def until_the_connection_ends(call: Call) -> None:
    await call.connection.write(head(call, "Connection: close"), b"\r\n", content(call))
    call.connection.close()


async def of_http_1_0(call: Call) -> None:
    line = b"HTTP/1.0 200 OK\r\n"
    await call.connection.write(head(call, line=line), b"\r\n", content(call))
    call.connection.close()


async def byte_by_byte(call: Call) -> None:
    body = content(call)
    fields = head(call, f"Content-Length: {len(body)}", line=b"HTTP/1.1 200\r\n")
    await call.connection.write_bytewise(fields + b"\r\n" + body)


async def after_hints(call: Call) -> None:
    for status in (b"100 Continue", b"102 Processing", b"103 Early Hints"):
        await call.connection.write(b"HTTP/1.1 ", status, b"\r\nLink: </x>\r\n\r\n")
        await asyncio.sleep(0)
    await chunked(call)
    await call.connection.end_chunked()


async def half_closed_behind_it(call: Call) -> None:
    await chunked(call)
    await call.connection.end_chunked()
    call.connection.half_close()
    await call.connection.stall()


async def under_the_name_of_no_coding(call: Call) -> None:
    await chunked(call, "Content-Encoding: identity")
    await call.connection.end_chunked()


async def of_a_kind_in_capitals(call: Call) -> None:
    name, value = kind(call)
    fields = f"{name.upper()}: {value.title()}\r\nTRANSFER-ENCODING: Chunked\r\n\r\n"
    await call.connection.write(OK, fields.encode())
    await call.connection.chunk(content(call))
    await call.connection.end_chunked()


WHOLE: list[Behaviour] = [
    with_trailers,
    with_extensions,
    until_the_connection_ends,
    of_http_1_0,
    byte_by_byte,
    after_hints,
    half_closed_behind_it,
    under_the_name_of_no_coding,
    of_a_kind_in_capitals,
]


@every_form
async def test_case_b06_v5_an_answer_that_is_whole_arrives_whole_however_it_is_sent(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub, max_concurrent=1)
    for behaviour in WHOLE:
        stub.then(behaviour)
        response = await surface.ask(router)
        found = response.status_code, surface.text(response)
        assert found == (200, surface.words), (behaviour.__name__, response.text)
        assert not {"link", "x-trailer", "content-encoding"} & set(response.headers)
    records = await router.records()
    assert {(one.outcome, one.prompt_tokens, len(one.attempts)) for one in records} == {
        ("completed", 7, 1)
    }
    assert len(stub.calls) == len(WHOLE)


# ---- an answer that is none


def raw(data: bytes, *, then: Fault | None = None) -> Behaviour:
    async def behave(call: Call) -> None:
        await call.connection.write(data)
        if then is not None:
            await then(call.connection)
        else:
            await call.connection.stall()

    return behave


async def resets(connection: StubConnection) -> None:
    await asyncio.sleep(0.02)  # what was sent is to be read first
    connection.reset()


async def closes(connection: StubConnection) -> None:
    connection.close()


async def half_closes(connection: StubConnection) -> None:
    connection.half_close()
    await connection.stall()


def said_to_be(coding: str, pack: Callable[[bytes], bytes] = bytes) -> Behaviour:
    async def behave(call: Call) -> None:
        headers = [kind(call), *([("Content-Encoding", coding)] if coding else [])]
        await call.connection.respond(200, pack(content(call)), headers)

    return behave


def without_end(part: bytes) -> Behaviour:
    """A head that never comes to its end."""

    async def behave(call: Call) -> None:
        with contextlib.suppress(ClientGone):
            while True:
                await call.connection.write(part)
                await asyncio.sleep(0)

    return behave


def of_length(length: str) -> Behaviour:
    async def behave(call: Call) -> None:
        await call.connection.write(head(call, f"Content-Length: {length}"), b"\r\n", content(call))
        await call.connection.stall()

    return behave


def chunks(*pieces: bytes, then: Fault) -> Behaviour:
    """Nothing of the content yet but the beginning of a chunk."""

    async def behave(call: Call) -> None:
        await call.connection.write(head(call, "Transfer-Encoding: chunked"), b"\r\n", *pieces)
        await then(call.connection)

    return behave


def other_status(status: str) -> Behaviour:
    """With a proper answer's body behind it."""

    async def behave(call: Call) -> None:
        body = content(call)
        line = f"HTTP/1.1 {status}\r\n".encode()
        fields = head(call, f"Content-Length: {len(body)}", line=line)
        await call.connection.write(fields, b"\r\n", body)
        await call.connection.stall()

    return behave


async def endless_document(call: Call) -> None:
    await call.connection.start_chunked(200, [("Content-Type", "text/html")])
    with contextlib.suppress(ClientGone):
        while True:
            await call.connection.chunk(b"<p>" * 10_000)


NONE: dict[str, Behaviour] = {
    "plain called gzip": said_to_be("gzip"),
    "gzip called gzip": said_to_be("gzip", gzip.compress),
    "gzip called nothing": said_to_be("", gzip.compress),
    "called br": said_to_be("br"),
    "called two codings": said_to_be("identity, gzip"),
    "a coding of the transfer": raw(OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n"),
    "both framings": raw(OK + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n"),
    "two lengths": raw(OK + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcd"),
    "a negative length": of_length("-1"),
    "a length with a sign": of_length("+5"),
    "a length that is none": of_length("0x10"),
    "a length beyond all": of_length("9" * 30),
    "an upgrade": other_status("101 Switching Protocols"),
    "no content with a content": other_status("204 No Content"),
    "nothing modified with a content": other_status("304 Not Modified"),
    "a status of two digits": other_status("99 Odd"),
    "a status of four digits": other_status("2000 OK"),
    "another version": raw(b"HTTP/3.0 200 OK\r\n\r\n"),
    "an empty object": respond(200, b"{}", JSON),
    "null where the answer should be": respond(200, b'{"choices":null,"usage":null}', JSON),
    "another object": respond(200, b'{"status":"ok"}', JSON),
    "a web page": respond(200, b"<p>", ("Content-Type", "text/html")),
    "a web page without end": endless_document,
    "a line without end": without_end(b"x" * 4096),
    "headers without end": without_end(b"X-Header: 1\r\n" * 100),
    "hints without end": without_end(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 4),
    "an end within the head": raw(OK + b"Content-Type", then=closes),
    "a reset within the head": raw(OK + b"Content-Type", then=resets),
    "half an end within the head": raw(OK + b"Content-Type", then=half_closes),
    "a reset within a chunk's size": chunks(b"1", then=resets),
    "a reset within a chunk": chunks(b"1f\r\n{", then=resets),
    "an end within a chunk's size": chunks(b"1f\r", then=closes),
    "half an end within a chunk": chunks(b"1f\r\n{", then=half_closes),
    "a size that is none": chunks(b"zz\r\n{}\r\n", then=half_closes),
    "a negative size": chunks(b"-1\r\n{}\r\n", then=half_closes),
    "a size beyond all": chunks(b"f" * 17 + b"\r\n{}", then=half_closes),
}


@every_form
async def test_case_b06_v5_whatever_is_no_answer_is_an_error_that_costs_only_its_own_request(
    router: RunningRouter, stub: OpenAIStub, surface: Surface, settings: Any
) -> None:
    settings.BACKEND_MAX_ATTEMPTS = 1
    await surface.backend(router, stub, max_concurrent=1)
    for name, behaviour in NONE.items():
        stub.then(behaviour)
        response = await asyncio.wait_for(surface.ask(router), LONG)
        assert response.status_code == 502, (name, response.status_code, response.text)
        assert surface.refusal(response, 502), name
        assert "127.0.0.1" not in response.text
    response = await surface.ask(router)
    assert (response.status_code, surface.text(response)) == (200, surface.words)
    *failed, _ = await router.records()
    assert len(failed) == len(NONE)
    assert {(one.outcome, one.charged_tokens) for one in failed} == {("failed", 0)}
    assert {one.reason for one in failed} == {"upstream_invalid", "upstream_ended_early"}
    assert len(stub.calls) == len(NONE) + 1


BREAKS: dict[str, tuple[bytes, Fault]] = {
    "a reset within a chunk's size": (b"1", resets),
    "a reset within a chunk": (b"1f\r\ndata: {", resets),
    "an end within a chunk's size": (b"1", closes),
    "half an end": (b"", half_closes),
    "half an end within a chunk": (b"1f\r\ndata: {", half_closes),
    "a size that is none": (b"zz\r\n", half_closes),
    "a size beyond all": (b"f" * 17 + b"\r\n", half_closes),
    "no end of a chunk": (b"2\r\n: x", half_closes),
    "another response": (b"HTTP/1.1 200 OK\r\n\r\n", half_closes),
}


@every_form_of_stream
async def test_case_b06_a_stream_whose_coding_breaks_ends_with_an_error_behind_what_came(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub, max_concurrent=1)

    def breaks(data: bytes, then: Fault) -> Behaviour:
        async def behave(call: Call) -> None:
            await call.start_stream()
            await call.role()
            await call.say("Hello")
            await call.connection.write(data)
            await then(call.connection)

        return behave

    for name, (data, then) in BREAKS.items():
        stub.then(breaks(data, then))
        response = await asyncio.wait_for(surface.ask(router), LONG)
        assert (response.status_code, surface.text(response)) == (200, "Hello"), name
        assert surface.error_at_the_end(response), name
    records = await router.records()
    assert len(records) == len(stub.calls) == len(BREAKS)
    assert {(one.outcome, one.completion_tokens) for one in records} == {("failed", 1)}


async def test_a_whole_answer_without_end_in_another_form_is_given_up_at_its_bound(
    router: RunningRouter, stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translating, "MAX_ANSWER_BYTES", 1 << 20)
    await router.backend(stub, "a", engine="sglang")

    async def endless(call: Call) -> None:
        await call.connection.start_chunked(200, [JSON])
        with contextlib.suppress(ClientGone):
            while True:
                await call.connection.chunk(b'["' + b"x" * 65536)

    stub.behaviour = endless
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": False}
    response = await router.client.post("/api/chat", json=asked)
    assert response.status_code == 502, response.text
    assert (await router.record()).reason == "upstream_invalid"


# ---- connections that nobody accepts


@contextlib.contextmanager
def full(stub: OpenAIStub) -> Iterator[None]:
    """While so many wait to be accepted that the system takes no more."""
    with contextlib.ExitStack() as waiting:
        for _ in range(4):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", stub.server.port))
        yield


@every_form
async def test_case_b21_b24_a_backend_whose_queue_of_connections_is_full_is_passed_over(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    async with OpenAIStub.slow(backlog=0) as deaf:
        number = await surface.backend(router, deaf, "deaf", connect_timeout=0.1, priority=10)
        await surface.backend(router, stub, "b")
        with full(deaf):
            response = await surface.ask(router)
    assert (response.status_code, surface.text(response)) == (200, surface.words)
    record = await router.record()
    assert [one["reason"] for one in record.attempts] == ["upstream_connect_failed", ""]
    assert router.state_of(number) == "failed"


@every_form
async def test_case_b21_a_connection_that_is_accepted_late_is_waited_for(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    async with OpenAIStub.slow(backlog=8) as slow:
        await surface.backend(router, slow)
        asked = asyncio.create_task(surface.ask(router))
        await until(lambda: router.in_flight == 1, LONG)
        assert slow.calls == []
        await slow.server.accept()
        response = await asked
    assert (response.status_code, surface.text(response)) == (200, surface.words)
    assert len((await router.record()).attempts) == 1
