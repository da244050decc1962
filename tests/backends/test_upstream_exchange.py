"""Requests as they go out, responses as they come in."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from backends.connection import HIGH_WATER_BYTES
from backends.incoming import Incoming
from backends.upstream import InvalidResponse
from tests.backends.conftest import Client, until_still
from tests.stubs.scripted import ScriptedStub, StubConnection, chunk, head


async def hello(conn: StubConnection) -> None:
    async for _ in conn:
        await conn.respond(200, b"hello", [("Content-Type", "text/plain")])


def raw(data: bytes):  # type: ignore[no-untyped-def]
    """Answer every request with these bytes."""

    async def script(conn: StubConnection) -> None:
        async for _ in conn:
            await conn.write(data)

    return script


def raw_then_close(data: bytes):  # type: ignore[no-untyped-def]
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.write(data)

    return script


# Requests


async def test_a_request_arrives_as_it_was_given(client: Client) -> None:
    async with await ScriptedStub.start(hello) as stub:
        response = await client.send(
            stub.url + "/llm/v1",
            "/v1/chat/completions",
            headers=b"content-type: application/json\r\nauthorization: Bearer k\r\n",
            body=b'{"a":1}',
        )
        assert await response.read_all(100) == b"hello"
        [request] = stub.requests
    assert (request.method, request.path) == ("POST", "/llm/v1/chat/completions")
    assert request.headers == [
        ("host", f"127.0.0.1:{stub.port}"),
        ("accept-encoding", "identity"),
        ("content-type", "application/json"),
        ("authorization", "Bearer k"),
        ("content-length", "7"),
    ]
    assert request.body == b'{"a":1}'


async def test_a_get_request_has_no_length_and_an_empty_post_has_zero(client: Client) -> None:
    async with await ScriptedStub.start(hello) as stub:
        await (await client.send(stub.url, method=b"GET", body=b"")).read_all(100)
        await (await client.send(stub.url, method=b"POST", body=b"")).read_all(100)
        lengths = [request.header("content-length") for request in stub.requests]
    assert lengths == [None, "0"]


@pytest.mark.parametrize("size", [1, 64 * 1024, 64 * 1024 + 1, 3_000_001])
async def test_a_body_in_parts_arrives_whole_at_every_size(client: Client, size: int) -> None:
    parts = [b"<", bytes(i % 251 for i in range(size)), b"", b">"]
    async with await ScriptedStub.start(hello) as stub:
        for _ in range(2):
            assert await (await client.send(stub.url, body=parts)).read_all(100) == b"hello"
        first, second = stub.requests
    assert first.body == second.body == b"".join(parts)
    assert client.pool.counters.opened == 1


async def test_a_slow_reader_of_a_large_request_holds_the_writing_back(client: Client) -> None:
    may_read = asyncio.Event()

    async def script(conn: StubConnection) -> None:
        request = await conn.read_head()
        conn.pause_reading()
        await may_read.wait()
        conn.resume_reading()
        await conn.read_body(request)
        await conn.respond(200, b"thanks")
        await conn.stall()

    body = b"x" * (32 << 20)
    async with await ScriptedStub.start(script) as stub:
        sending = asyncio.create_task(client.send(stub.url, body=body))
        await stub.until_requests(1)
        [connection] = client.pool._open[f"http://127.0.0.1:{stub.port}"]
        assert connection._transport is not None
        assert await until_still(connection._transport.get_write_buffer_size) < 1 << 20
        assert not sending.done()
        may_read.set()
        assert await (await sending).read_all(100) == b"thanks"
        assert stub.requests[0].body == body


async def test_an_answer_before_the_request_was_sent_is_delivered_and_not_reused(
    client: Client,
) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_head()
        conn.pause_reading()
        await conn.respond(413, b"too large")
        await conn.stall()

    async with await ScriptedStub.start(script) as stub:
        response = await client.send(stub.url, body=b"x" * (32 << 20))
        assert response.status == 413
        assert await response.read_all(100) == b"too large"
        assert client.idle(stub.url) == 0
        await client.until_open(stub.url, 0)


@pytest.mark.parametrize("pause", [0.0, 0.05])
async def test_an_early_answer_survives_the_reset_that_follows_it(
    client: Client, pause: float
) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_head()
        conn.pause_reading()
        await conn.respond(413, b"too large", [("Connection", "close")])
        await asyncio.sleep(pause)

    async with await ScriptedStub.start(script) as stub:
        for _ in range(20):
            response = await client.send(stub.url, body=b"x" * (8 << 20))
            assert response.status == 413
            assert await response.read_all(100) == b"too large"


async def test_an_answer_is_read_even_if_writing_has_failed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers and closes between two writes of one step, so that writing fails first."""
    answered = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listener.accept()
        sock.recv(10)  # what stays unread makes the close a reset
        sock.sendall(head(413, [("Content-Length", "9"), ("Connection", "close")]) + b"too large")
        sock.close()
        answered.set()

    def slices(parts: list[bytes]) -> Iterator[memoryview]:
        answered.wait(5)
        time.sleep(0.01)
        yield from (memoryview(b"x" * 1000) for _ in range(200))

    monkeypatch.setattr("backends.connection._slices", slices)
    server = threading.Thread(target=serve)
    server.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        response = await client.send(url, body=b"x" * 200_000)
        assert response.status == 413
        assert await response.read_all(100) == b"too large"
    finally:
        server.join()
        listener.close()


# Responses


async def test_header_names_are_lower_case_and_values_are_kept(client: Client) -> None:
    lines = b"X-A: One\r\nx-b:  two \r\nX-A: Three\r\nContent-Length: 0\r\n"
    data = b"HTTP/1.1 404 Not Found\r\n" + lines + b"\r\n"
    async with await ScriptedStub.start(raw(data)) as stub:
        response = await client.send(stub.url)
        assert response.status == 404
        assert response.headers == [
            (b"x-a", b"One"),
            (b"x-b", b"two"),
            (b"x-a", b"Three"),
            (b"content-length", b"0"),
        ]
        assert response.header(b"x-a") == b"One"
        assert response.header(b"x-c") is None
        assert await response.read() == b""


async def test_content_encoding_is_passed_on_untouched(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.respond(200, b"\x1f\x8bnot gzip", [("Content-Encoding", "gzip")])

    async with await ScriptedStub.start(script) as stub:
        response = await client.send(stub.url)
        assert response.header(b"content-encoding") == b"gzip"
        assert await response.read_all(100) == b"\x1f\x8bnot gzip"


RESPONSES = {
    "length": (head(200, [("Content-Length", "11")]) + b"hello world", b"hello world", True),
    "no body": (head(200, [("Content-Length", "0")]), b"", True),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    "304 with a length": (b"HTTP/1.1 304 -\r\nContent-Length: 7\r\n\r\n", b"", True),
    "chunked": (
        head(200, [("Transfer-Encoding", "chunked")])
        + chunk(b"hello ")
        + chunk(b"world")
        + b"0\r\n\r\n",
        b"hello world",
        True,
    ),
    "chunked, extensions and trailers": (
        head(200, [("transfer-encoding", "Chunked")])
        + b"5;a=b\r\nhello\r\n0\r\nX-Trailer: 1\r\n\r\n",
        b"hello",
        True,
    ),
    "no reason phrase": (b"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\nx", b"x", True),
    "http/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", b"x", False),
    "http/1.0 keep-alive": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\nx",
        b"x",
        False,
    ),
    "connection close": (
        head(200, [("Connection", "keep-alive, Close"), ("Content-Length", "1")]) + b"x",
        b"x",
        False,
    ),
    "surplus bytes": (head(200, [("Content-Length", "1")]) + b"xy", b"x", False),
    "surplus response": (2 * (head(200, [("Content-Length", "1")]) + b"x"), b"x", False),
    "surplus after chunks": (
        head(200, [("Transfer-Encoding", "chunked")]) + b"1\r\nx\r\n0\r\n\r\nHTTP",
        b"x",
        False,
    ),
    "100 continue": (
        b"HTTP/1.1 100 Continue\r\n\r\n" + head(200, [("Content-Length", "1")]) + b"x",
        b"x",
        True,
    ),
    "103 early hints": (
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nContent-Length: 9\r\n\r\n"
        + head(200, [("Transfer-Encoding", "chunked")])
        + b"1\r\nx\r\n0\r\n\r\n",
        b"x",
        True,
    ),
}


@pytest.mark.parametrize("case", RESPONSES)
@pytest.mark.parametrize("bytewise", [False, True])
async def test_a_body_is_read_to_its_end_and_the_connection_kept_if_it_may_be(
    client: Client, case: str, bytewise: bool
) -> None:
    data, body, kept = RESPONSES[case]

    async def script(conn: StubConnection) -> None:
        async for _ in conn:
            await (conn.write_bytewise(data) if bytewise else conn.write(data))

    async with await ScriptedStub.start(script) as stub:
        response = await client.send(stub.url)
        assert response.status in (200, 204, 304)
        assert await response.read_all(100) == body
        assert response.complete
        assert await response.read() == b""
        if kept:
            assert client.idle(stub.url) == 1
        else:  # byte by byte, the surplus comes while the connection is already idle
            await client.until_open(stub.url, 0)
            assert client.idle(stub.url) == 0


async def test_an_interim_response_leaves_no_header_behind(client: Client) -> None:
    data, _, _ = RESPONSES["103 early hints"]
    async with await ScriptedStub.start(raw(data)) as stub:
        response = await client.send(stub.url)
        assert response.headers == [(b"transfer-encoding", b"chunked")]


async def test_a_body_without_length_ends_with_the_connection(client: Client) -> None:
    async with await ScriptedStub.start(raw_then_close(head(200) + b"until the end")) as stub:
        response = await client.send(stub.url)
        assert await response.read_all(100) == b"until the end"
        assert response.complete
        assert client.idle(stub.url) == 0


@pytest.mark.parametrize("sent_all_the_same", [b"", b"surplus!!"])
async def test_the_answer_to_a_head_request_has_no_body(
    client: Client, sent_all_the_same: bytes
) -> None:
    data = head(200, [("Content-Length", "9")]) + sent_all_the_same
    async with await ScriptedStub.start(raw(data)) as stub:
        response = await client.send(stub.url, method=b"HEAD", body=b"")
        assert response.header(b"content-length") == b"9"
        assert await response.read_all(100) == b""


async def test_chunks_of_one_read_come_together_and_later_ones_later(client: Client) -> None:
    go_on = asyncio.Event()

    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.write(head(200, [("Transfer-Encoding", "chunked")]), chunk(b"a"), chunk(b"b"))
        await conn.stall(go_on)
        await conn.write(chunk(b"c"), b"0\r\n\r\n")
        await conn.stall()

    async with await ScriptedStub.start(script) as stub:
        response = await client.send(stub.url)
        assert await response.read() == b"ab"
        assert not response.complete
        go_on.set()
        assert await response.read() == b"c"
        assert await response.read() == b""


async def test_split_characters_are_never_touched(client: Client) -> None:
    text = 'data: {"content":"Größe 漢字😀!\u2028\x85"}\n\n'.encode()

    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.stream([text[i : i + 1] for i in range(len(text))], delay=0.0005)

    async with await ScriptedStub.start(script) as stub:
        assert await (await client.send(stub.url)).read_all(1000) == text


async def test_read_all_stops_at_its_limit(client: Client) -> None:
    async with await ScriptedStub.start(hello) as stub:
        assert await (await client.send(stub.url)).read_all(5) == b"hello"
        with pytest.raises(InvalidResponse):
            await (await client.send(stub.url)).read_all(4)


async def test_read_all_closes_the_connection_of_an_endless_body(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.start_chunked()
        while True:
            await conn.chunk(b"x" * 1000)
            await asyncio.sleep(0)

    async with await ScriptedStub.start(script) as stub:
        with pytest.raises(InvalidResponse):
            await (await client.send(stub.url)).read_all(100_000)
        await stub.until_open(0)
        assert client.open(stub.url) == 0


async def test_a_reader_that_waits_stops_the_server_from_sending(client: Client) -> None:
    total = 64 << 20
    sent = 0

    async def script(conn: StubConnection) -> None:
        nonlocal sent
        async for _ in conn:
            await conn.write(head(200, [("Content-Length", str(total))]))
            while sent < total:
                await conn.write(b"x" * 65536)
                sent += 65536

    async with await ScriptedStub.start(script) as stub:
        response = await client.send(stub.url)
        assert await until_still(lambda: sent) < 32 << 20
        assert 0 < response.buffered <= HIGH_WATER_BYTES + (1 << 18)
        received = 0
        while part := await response.read():
            received += len(part)
        assert received == total
        assert client.idle(stub.url) == 1


async def test_two_tasks_may_not_read_one_response(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.start_chunked()
        await conn.stall()

    async with await ScriptedStub.start(script) as stub:
        with await client.send(stub.url) as response:
            first = asyncio.create_task(response.read())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError):
                await response.read()
            first.cancel()


async def test_a_cancelled_read_loses_nothing(client: Client) -> None:
    go_on = asyncio.Event()

    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.start_chunked()
        await conn.stall(go_on)
        await conn.write(chunk(b"a"), b"0\r\n\r\n")

    async with await ScriptedStub.start(script) as stub:
        response = await client.send(stub.url)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await response.read()
        go_on.set()
        assert await response.read_all(10) == b"a"


async def test_an_answer_that_begins_like_the_one_before_needs_no_parser(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[tuple[bytes, bytes]] = []

    class Watched(Incoming):
        __slots__ = ()

        def on_header(self, name: bytes, value: bytes) -> None:
            parsed.append((name, value))
            super().on_header(name, value)

    monkeypatch.setattr("backends.connection.Incoming", Watched)

    def answer(day: str, body: bytes) -> bytes:
        return head(200, [("Date", day), ("Content-Length", str(len(body)))]) + body

    answers = [
        [answer("today", b"one")],
        [answer("today", b"three")],  # known
        [answer("today", b"")],  # known
        [answer("today", b"12345678")[:-3], b"678"],  # not whole at once
        [answer("today", b"x")],  # forgotten by then
        [answer("tomorrow", b"yz")],  # another head
        [answer("tomorrow", b"0123456789")],  # known
    ]

    async def script(conn: StubConnection) -> None:
        left = iter(answers)
        async for _ in conn:
            for i, part in enumerate(next(left)):
                if i:
                    await half.wait()
                await conn.write(part)

    half = asyncio.Event()
    async with await ScriptedStub.start(script) as stub:
        seen = []
        for parts in answers:
            before = len(parsed)
            response = await client.send(stub.url)
            if len(parts) > 1:
                half.set()
            body = await response.read_all(100)
            assert body == b"".join(parts).partition(b"\r\n\r\n")[2]
            day = response.header(b"date")
            seen.append((day, response.header(b"content-length"), len(parsed) - before))
        assert len(stub.connections) == 1
    assert seen == [
        (b"today", b"3", 2),
        (b"today", b"5", 0),
        (b"today", b"0", 0),
        (b"today", b"8", 2),
        (b"today", b"1", 2),
        (b"tomorrow", b"2", 2),
        (b"tomorrow", b"10", 0),
    ]
