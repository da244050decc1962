"""What a network and a server can do wrong: silence, early ends, lies and floods."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from backends import dial
from backends.connection import HIGH_WATER_BYTES
from backends.upstream import (
    ConnectFailed,
    EndedEarly,
    FirstByteTimeout,
    InvalidResponse,
    Stalled,
    UpstreamError,
)
from tests.backends.conftest import Client
from tests.stubs.scripted import ScriptedStub, StubConnection, chunk, head

CHUNKED = head(200, [("Transfer-Encoding", "chunked")])


def after_request(*writes: bytes) -> Callable[[StubConnection], Awaitable[None]]:
    """Answer one request with these writes, then wait for the client to go."""

    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        for data in writes:
            await conn.write(data)
            await asyncio.sleep(0.002)
        await conn.stall()

    return script


async def read_until_fault(client: Client, url: str, **limits: float) -> tuple[bytes, Exception]:
    """Return the body bytes that came, and the fault that ended them."""
    body = b""
    try:
        response = await client.send(url, **limits)  # type: ignore[arg-type]
        while part := await response.read():
            body += part
    except UpstreamError as error:
        await client.until_open(url, 0)
        return body, error
    raise AssertionError("no fault")


# Connecting


async def test_a_refused_connection_is_a_failed_connect(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ConnectFailed) as caught:
        await client.send(url)
    assert caught.value.reason == "upstream_connect_failed"
    assert not caught.value.local
    assert client.open(url) == 0


async def test_an_unknown_name_is_a_failed_connect(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(host: str, port: int) -> list[dial.Address]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(dial, "_lookup", unknown)
    with pytest.raises(ConnectFailed, match="not known"):
        await client.send("http://nowhere.invalid")
    assert client.open("http://nowhere.invalid") == 0


async def test_a_connect_that_hangs_ends_at_its_limit(client: Client) -> None:
    with socket.socket() as listener, socket.socket() as filler:
        url = _fill(listener, filler)
        started = time.monotonic()
        with pytest.raises(ConnectFailed):
            await client.send(url, connect=0.1)
        assert 0.09 < time.monotonic() - started < 5
        assert client.open(url) == 0


def _fill(listener: socket.socket, filler: socket.socket) -> str:
    """Make a listener that lets further connects hang."""
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    filler.connect(listener.getsockname())
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_connect_during_a_standstill_of_this_process_is_no_fault(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        task = asyncio.create_task(client.send(url, connect=0.05))
        await asyncio.sleep(0)
        time.sleep(1)  # noqa: ASYNC251  (this is the standstill)
        await asyncio.sleep(0.02)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("dead_first", [False, True], ids=["one address", "a dead one before it"])
async def test_a_standstill_of_this_process_during_the_look_up_is_no_fault(
    dead_first: bool, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.respond(200, b"here")

    # As if the answer to each connect took a turn of the loop: on one machine it is there at once.
    monkeypatch.setattr(dial, "_is_writable", lambda sock: False)
    with socket.socket() as listener, socket.socket() as filler:
        _fill(listener, filler)
        async with await ScriptedStub.start(script) as stub:

            async def during_a_standstill(host: str, port: int) -> list[dial.Address]:
                time.sleep(1)  # noqa: ASYNC251  (this is the standstill)
                await asyncio.sleep(0.01)  # the name server's answer lay in the kernel
                dead = dial.Address(socket.AF_INET, listener.getsockname())
                alive = dial.Address(socket.AF_INET, ("127.0.0.1", stub.port))
                return [dead, alive] if dead_first else [alive]

            monkeypatch.setattr(dial, "_lookup", during_a_standstill)
            response = await client.send(f"http://llm.test:{stub.port}", connect=0.5)
            assert await response.read_all(10) == b"here"


async def test_a_lookup_that_hangs_ends_at_its_limit_and_is_shared(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups = 0
    release = asyncio.Event()

    async def slow(host: str, port: int) -> list[dial.Address]:
        nonlocal lookups
        lookups += 1
        await release.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure")

    monkeypatch.setattr(dial, "_lookup", slow)
    results = await asyncio.gather(
        *(client.send("http://llm.test", connect=0.05) for _ in range(10)), return_exceptions=True
    )
    assert [type(result) for result in results] == [ConnectFailed] * 10
    assert lookups == 1
    release.set()
    async with asyncio.timeout(5):
        while client.pool._dialer._lookups:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_an_address_that_swallows_packets_leaves_time_for_the_next(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.respond(200, b"here")

    with socket.socket() as listener, socket.socket() as filler:
        _fill(listener, filler)

        async with await ScriptedStub.start(script) as stub:

            async def two(host: str, port: int) -> list[dial.Address]:
                dead = dial.Address(socket.AF_INET, listener.getsockname())
                return [dead, dial.Address(socket.AF_INET, ("127.0.0.1", stub.port))]

            monkeypatch.setattr(dial, "_lookup", two)
            response = await client.send(f"http://llm.test:{stub.port}", connect=0.4)
            assert await response.read_all(10) == b"here"
            assert stub.requests[0].header("host") == f"llm.test:{stub.port}"


async def test_a_name_and_an_ipv6_literal_are_connected_to(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        async for _ in conn:
            await conn.respond(200, b"here")

    async with await ScriptedStub.start(script) as stub:
        response = await client.send(f"http://localhost:{stub.port}")
        assert await response.read_all(10) == b"here"
    async with await ScriptedStub.start(script, host="::1") as stub:
        assert await (await client.send(stub.url)).read_all(10) == b"here"
        assert stub.requests[0].header("host") == f"[::1]:{stub.port}"


async def test_a_shortage_on_this_side_is_told_apart_from_a_dead_server(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_descriptor(address: dial.Address, seconds: float) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(dial, "_connect", no_descriptor)
    with pytest.raises(ConnectFailed) as caught:
        await client.send("http://127.0.0.1:1")
    assert caught.value.local


async def test_sockets_find_dead_hosts_and_send_at_once(client: Client) -> None:
    async with await ScriptedStub.start(after_request(CHUNKED)) as stub:
        with await client.send(stub.url):
            [connection] = client.pool._open[stub.url]
            assert connection._transport is not None
            sock = connection._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


# Silence


async def test_silence_before_the_head_ends_at_the_first_byte_limit(client: Client) -> None:
    async with await ScriptedStub.start(after_request()) as stub:
        started = time.monotonic()
        body, error = await read_until_fault(client, stub.url, first_byte=0.1, between=0.02)
        assert 0.1 <= time.monotonic() - started < 5
        assert (body, type(error)) == (b"", FirstByteTimeout)
        assert isinstance(error, UpstreamError)
        assert error.reason == "upstream_timeout"
        await stub.until_open(0)


async def test_a_long_silence_within_the_first_byte_limit_is_no_fault(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await asyncio.sleep(0.2)
        await conn.respond(200, b"late")

    async with await ScriptedStub.start(script) as stub:
        response = await client.send(stub.url, first_byte=5, between=0.05)
        assert await response.read_all(10) == b"late"


@pytest.mark.parametrize(
    "drip",
    [b"HTTP/1.1 100 Continue\r\n\r\n" * 16, b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 500],
    ids=["interim responses", "a slow head"],
)
async def test_neither_interim_responses_nor_a_slow_head_extend_the_limit(
    client: Client, drip: bytes
) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.write_bytewise(drip, 0.01)  # for 4 s

    async with await ScriptedStub.start(script) as stub:
        started = time.monotonic()
        _, error = await read_until_fault(client, stub.url, first_byte=0.5)
        assert time.monotonic() - started < 3
        assert type(error) is FirstByteTimeout


async def test_a_server_that_does_not_take_the_request_ends_at_the_first_byte_limit(
    client: Client,
) -> None:
    async def script(conn: StubConnection) -> None:
        conn.pause_reading()
        await asyncio.sleep(5)

    async with await ScriptedStub.start(script) as stub:
        with pytest.raises(FirstByteTimeout):
            await client.send(stub.url, body=b"x" * (32 << 20), first_byte=0.2)
        await client.until_open(stub.url, 0)


async def test_the_first_byte_limit_runs_from_the_end_of_a_slow_upload(client: Client) -> None:
    """So much is read in each step that the sender goes on several times in a second."""

    async def script(conn: StubConnection) -> None:
        request = await conn.read_head()
        for step in range(80):
            conn.pause_reading()
            await asyncio.sleep(0.05)
            conn.resume_reading()
            while len(conn.received) < step << 18:
                await conn.more()
        await conn.read_body(request)
        await conn.respond(200, b"ok")

    async with await ScriptedStub.start(script, receive_buffer=64 << 10) as stub:
        started = time.monotonic()
        response = await client.send(stub.url, body=b"x" * (32 << 20), first_byte=2)
        assert await response.read_all(10) == b"ok"
        assert time.monotonic() - started >= 4


async def test_a_head_that_comes_before_a_long_thought_is_no_fault(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.start_chunked()
        await asyncio.sleep(0.2)
        await conn.write(chunk(b"first"), b"0\r\n\r\n")

    async with await ScriptedStub.start(script) as stub:
        response = await client.send(stub.url, first_byte=5, between=0.05)
        assert response.status == 200
        assert await response.read_all(10) == b"first"


async def test_a_head_without_a_body_ends_at_the_first_byte_limit(client: Client) -> None:
    async with await ScriptedStub.start(after_request(CHUNKED)) as stub:
        started = time.monotonic()
        response = await client.send(stub.url, first_byte=0.15, between=0.05)
        with pytest.raises(FirstByteTimeout):
            await response.read()
        assert 0.15 <= time.monotonic() - started < 5


async def test_a_late_head_leaves_the_time_between_chunks_for_the_body(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await asyncio.sleep(0.1)
        await conn.start_chunked()
        await asyncio.sleep(1.2)
        await conn.write(chunk(b"first"), b"0\r\n\r\n")

    async with await ScriptedStub.start(script) as stub:
        response = await client.send(stub.url, first_byte=1.2, between=20)
        assert await response.read_all(10) == b"first"


async def test_silence_in_the_body_ends_at_the_limit_between_chunks(client: Client) -> None:
    async with await ScriptedStub.start(after_request(CHUNKED + chunk(b"a"), chunk(b"b"))) as stub:
        started = time.monotonic()
        body, error = await read_until_fault(client, stub.url, between=0.1)
        assert 0.1 <= time.monotonic() - started < 5
        assert (body, type(error)) == (b"ab", Stalled)
        await stub.until_open(0)


async def test_the_limit_between_chunks_holds_from_the_first_one_on(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await asyncio.sleep(0.25)
        await conn.write(CHUNKED, chunk(b"a"))
        await conn.stall()

    async with await ScriptedStub.start(script) as stub:
        started = time.monotonic()
        body, error = await read_until_fault(client, stub.url, first_byte=20, between=0.1)
        assert (body, type(error)) == (b"a", Stalled)
        assert time.monotonic() - started < 5


async def test_a_slow_but_steady_stream_is_no_fault(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.stream([b"x"] * 30, delay=0.05)

    async with await ScriptedStub.start(script) as stub:
        response = await client.send(stub.url, between=1.2)
        assert await response.read_all(40) == b"x" * 30


async def test_a_slow_reader_is_not_the_servers_silence(client: Client) -> None:
    size = 4 << 20

    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.write(CHUNKED, chunk(b"x" * size), chunk(b"y"))
        await conn.stall()

    async with await ScriptedStub.start(script) as stub:
        response = await client.send(stub.url, between=1)
        body = b""
        while len(body) < size // 2:
            body += await response.read()
        await asyncio.sleep(1.4)  # the buffer is full, so that reading has stopped
        while not body.endswith(b"y"):
            body += await response.read()
        assert len(body) == size + 1
        with pytest.raises(Stalled):
            await response.read()


async def test_after_a_pause_for_a_slow_reader_the_silence_counts_anew(client: Client) -> None:
    async with await ScriptedStub.start(
        after_request(CHUNKED + chunk(b"x" * (HIGH_WATER_BYTES + 1)))
    ) as stub:
        with await client.send(stub.url, between=10) as response:
            [connection] = client.pool._open[stub.url]
            async with asyncio.timeout(5):
                while not connection._reading_paused:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            connection._stamp -= 1000
            connection._check()
            connection._check()
            while response.buffered:
                await response.read()
            connection._check()
            connection._check()
            assert not connection.closed


@pytest.mark.parametrize("moment", ["in a task", "in a callback"])
async def test_bytes_that_came_while_this_process_stood_still_are_no_silence(
    client: Client, moment: str
) -> None:
    """Where the loop stands still decides whether it looks at timers or at sockets next."""
    listener = socket.create_server(("127.0.0.1", 0))
    read_on, sent = threading.Event(), threading.Event()

    def serve() -> None:
        sock, _ = listener.accept()
        sock.recv(65536)
        sock.sendall(CHUNKED + chunk(b"a"))
        read_on.wait()
        sock.sendall(chunk(b"b") + b"0\r\n\r\n")
        sent.set()
        sock.recv(1)
        sock.close()

    def stand_still() -> None:
        read_on.set()
        sent.wait(5)
        time.sleep(1.3)

    ours, theirs = socket.socketpair()
    server = threading.Thread(target=serve)
    server.start()
    response = await client.send(f"http://127.0.0.1:{listener.getsockname()[1]}", between=1)
    assert await response.read() == b"a"
    if moment == "in a task":
        stand_still()
    else:
        loop = asyncio.get_running_loop()
        loop.add_reader(ours, lambda: (loop.remove_reader(ours), stand_still()))
        theirs.send(b"x")
    try:
        assert await response.read_all(10) == b"b"
    finally:
        read_on.set()
        await client.pool.close()
        server.join()
        for sock in (listener, ours, theirs):
            sock.close()


# Early ends


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("coding", ["chunked", "length"])
async def test_a_body_that_is_cut_gives_what_came_and_then_the_fault(
    client: Client, how: str, coding: str
) -> None:
    cut = asyncio.Event()

    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        if coding == "chunked":
            await conn.write(CHUNKED, *[chunk(b"token ")] * 40)
        else:
            await conn.write(head(200, [("Content-Length", "360")]), b"token " * 40)
        await conn.stall(cut)
        getattr(conn, how)()

    async with await ScriptedStub.start(script) as stub:
        response = await client.send(stub.url)
        body = await response.read()
        cut.set()
        with pytest.raises(EndedEarly) as caught:
            await response.read()
        assert body == b"token " * 40
        assert caught.value.reason == "upstream_ended_early"
        assert not response.complete
        await client.until_open(stub.url, 0)


async def test_a_cut_in_the_same_read_as_the_last_chunk_gives_the_chunk_first(
    client: Client,
) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.write(CHUNKED, chunk(b"last"))

    async with await ScriptedStub.start(script) as stub:
        response = await client.send(stub.url)
        await stub.until_open(0)
        assert await response.read() == b"last"
        for _ in range(2):
            with pytest.raises(EndedEarly):
                await response.read()


async def test_a_reset_ends_a_body_without_length_early(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.write(head(200), b"some")
        await asyncio.sleep(0.05)
        conn.reset()

    async with await ScriptedStub.start(script) as stub:
        body, error = await read_until_fault(client, stub.url)
        assert (body, type(error)) == (b"some", EndedEarly)


@pytest.mark.parametrize("part", [b"", b"HTTP/1.1 200 OK\r\nContent-"])
@pytest.mark.parametrize("how", ["close", "reset", "half_close"])
async def test_an_end_before_the_head_is_an_early_end(
    client: Client, part: bytes, how: str
) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.write(part)
        getattr(conn, how)()
        await conn.stall()

    async with await ScriptedStub.start(script) as stub:
        body, error = await read_until_fault(client, stub.url)
        assert (body, type(error)) == (b"", EndedEarly)


async def test_a_server_that_closes_on_accept_is_an_early_end(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        conn.reset()

    async with await ScriptedStub.start(script) as stub:
        for _ in range(20):
            _, error = await read_until_fault(client, stub.url)
            assert type(error) in (EndedEarly, ConnectFailed)


# Not HTTP, lies and floods

OK = b"HTTP/1.1 200 OK\r\n"
CODED = b"Transfer-Encoding: chunked\r\n"
GARBAGE = {
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "html": b"<html>hello</html>",
    "binary": bytes(range(256)),
    "a request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "http/0.9": b"HTTP/0.9 200 OK\r\nContent-Length: 0\r\n\r\n",
    "http/2": b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "status 0": b"HTTP/1.1 000 OK\r\nContent-Length: 0\r\n\r\n",
    "status 42": b"HTTP/1.1 42 OK\r\nContent-Length: 0\r\n\r\n",
    "status 999": b"HTTP/1.1 999 OK\r\nContent-Length: 0\r\n\r\n",
    "upgrade": b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    "upgrade without a protocol": b"HTTP/1.1 101 Switching\r\n\r\n",
    "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "folded header": OK + b"A: b\r\n c\r\nContent-Length: 0\r\n\r\n",
    "space in a name": OK + b"A : b\r\nContent-Length: 0\r\n\r\n",
    "nul in a value": OK + b"A: \0\r\nContent-Length: 0\r\n\r\n",
    "two lengths": OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxy",
    "a list of lengths": OK + b"Content-Length: 1, 2\r\n\r\nxy",
    "negative length": OK + b"Content-Length: -1\r\n\r\nx",
    "length with a sign": OK + b"Content-Length: +1\r\n\r\nx",
    "length of 30 digits": OK + b"Content-Length: " + b"9" * 30 + b"\r\n\r\nx",
    "length and chunks": OK + b"Content-Length: 1\r\n" + CODED + b"\r\n",
    "chunks and length": OK + CODED + b"Content-Length: 1\r\n\r\n",
    "gzip coding": OK + b"Transfer-Encoding: gzip\r\n\r\nx",
    "gzip and chunks": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunks twice": OK + CODED * 2 + b"\r\n0\r\n\r\n",
    "endless header": OK + b"A: " + b"a" * 300_000,
    "large head": OK + b"A: %b\r\n" % (b"a" * 1000) * 70 + b"\r\n",
    "many headers": OK + b"A: b\r\n" * 300 + b"\r\n",
    "endless status line": b"HTTP/1.1 200 " + b"a" * 300_000,
    "empty lines": b"\r\n" * 100_000,
    "interim flood": b"HTTP/1.1 103 Early Hints\r\n\r\n" * 30,
}


@pytest.mark.parametrize("case", GARBAGE)
async def test_what_is_no_response_is_refused(client: Client, case: str) -> None:
    async with await ScriptedStub.start(after_request(GARBAGE[case])) as stub:
        async with asyncio.timeout(5):
            body, error = await read_until_fault(client, stub.url)
        assert (body, type(error)) == (b"", InvalidResponse)
        assert isinstance(error, UpstreamError)
        assert error.reason == "upstream_invalid"
        assert len(stub.requests) == 1
        await stub.until_open(0)


async def test_a_refused_response_says_what_was_wrong_with_it(client: Client) -> None:
    for case, words in [("upgrade", "status 101"), ("gzip coding", "other than chunked")]:
        async with await ScriptedStub.start(after_request(GARBAGE[case])) as stub:
            with pytest.raises(InvalidResponse, match=words):
                await client.send(stub.url)


BROKEN_BODIES = {
    "chunk size is no number": b"zz\r\nabc\r\n",
    "negative chunk size": b"-1\r\nabc\r\n",
    "chunk longer than it says": b"2\r\nabc\r\n",
    "chunk size overflows": b"f" * 20 + b"\r\nabc\r\n",
    "bare line feed": b"2\nab\n",
    "endless chunk extension": b"2;" + b"a" * 300_000,
    "endless trailer": b"0\r\nA: " + b"a" * 300_000,
    "flood of trailers": b"0\r\n" + b"A: b\r\n" * 60_000,
}


@pytest.mark.parametrize("case", BROKEN_BODIES)
async def test_a_body_that_breaks_its_coding_gives_what_was_right_and_then_the_fault(
    client: Client, case: str
) -> None:
    script = after_request(CHUNKED + chunk(b"right"), BROKEN_BODIES[case])
    async with await ScriptedStub.start(script) as stub:
        async with asyncio.timeout(5):
            body, error = await read_until_fault(client, stub.url)
        assert body in (b"right", b"rightab")
        assert type(error) is InvalidResponse
        await stub.until_open(0)


async def test_an_endless_head_is_given_up_while_it_still_grows(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.write(OK + b"A: ")
        while True:
            await conn.write(b"a" * 1000)
            await asyncio.sleep(0)

    async with await ScriptedStub.start(script) as stub:
        _, error = await read_until_fault(client, stub.url)
        assert type(error) is InvalidResponse
