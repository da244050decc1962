"""Keeping connections, reusing them, and losing none."""

from __future__ import annotations

import asyncio
import gc
import socket
from pathlib import Path

import pytest

from backends.upstream import ConnectFailed, EndedEarly, Origin, Upstream
from tests.backends.conftest import Client
from tests.stubs.scripted import ScriptedStub, StubConnection


async def hello(conn: StubConnection) -> None:
    async for _ in conn:
        await conn.respond(200, b"hello")


async def read(client: Client, url: str) -> bytes:
    return await (await client.send(url)).read_all(1000)


def open_sockets() -> int:
    return sum(1 for fd in Path("/proc/self/fd").iterdir() if _is_socket(fd))


def _is_socket(fd: Path) -> bool:
    try:
        return str(fd.readlink()).startswith("socket:")
    except FileNotFoundError:
        return False


# Reuse


async def test_requests_in_turn_share_one_connection(client: Client) -> None:
    async with await ScriptedStub.start(hello) as stub:
        for _ in range(5):
            assert await read(client, stub.url) == b"hello"
        assert len(stub.connections) == 1
        assert (client.idle(stub.url), client.open(stub.url)) == (1, 1)
    counters = client.pool.counters
    assert (counters.requests, counters.opened, counters.reused, counters.retried) == (5, 1, 4, 0)


async def test_simultaneous_requests_have_a_connection_each(client: Client) -> None:
    async with await ScriptedStub.start(hello) as stub:
        bodies = await asyncio.gather(*(read(client, stub.url) for _ in range(10)))
        assert bodies == [b"hello"] * 10
        assert len(stub.connections) == client.idle(stub.url) == client.open(stub.url) == 10


async def test_the_connection_used_last_is_used_next(client: Client) -> None:
    async with await ScriptedStub.start(hello) as stub:
        await asyncio.gather(read(client, stub.url), read(client, stub.url))
        assert client.idle(stub.url) == 2
        before = len(stub.requests)
        for _ in range(3):
            await read(client, stub.url)
        used = {request.connection for request in stub.requests[before:]}
        assert len(used) == 1


async def test_a_complete_response_frees_its_connection_before_it_is_read(client: Client) -> None:
    async with await ScriptedStub.start(hello) as stub:
        first = await client.send(stub.url)
        second = await client.send(stub.url)
        assert len(stub.connections) == 1
        assert await first.read_all(100) == await second.read_all(100) == b"hello"


async def test_aborting_a_complete_response_harms_nobody_else(client: Client) -> None:
    go_on = asyncio.Event()

    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.respond(200, b"first")
        await conn.read_request()
        await conn.stall(go_on)
        await conn.respond(200, b"second")

    async with await ScriptedStub.start(script) as stub:
        first = await client.send(stub.url)
        second = asyncio.create_task(client.send(stub.url))
        await stub.until_requests(2)
        assert len(stub.connections) == 1
        first.abort()
        first.close()
        go_on.set()
        assert await (await second).read_all(100) == b"second"


async def test_no_more_than_the_limit_is_kept_idle() -> None:
    pool = Upstream(max_idle_per_origin=2)
    client = Client(pool)
    async with await ScriptedStub.start(hello) as stub:
        await asyncio.gather(*(read(client, stub.url) for _ in range(5)))
        assert client.idle(stub.url) == 2
        await stub.until_open(2)
    await pool.close()


async def test_an_idle_connection_is_closed_after_its_time() -> None:
    pool = Upstream(idle_seconds=0.5)
    client = Client(pool)
    async with await ScriptedStub.start(hello) as stub:
        await read(client, stub.url)
        assert client.idle(stub.url) == 1
        await stub.until_open(0)
        assert (client.idle(stub.url), client.open(stub.url)) == (0, 0)
    await pool.close()


@pytest.mark.parametrize(("hint", "kept"), [("timeout=1, max=100", 0.5), ("timeout=5", 4.0)])
async def test_a_server_that_announces_its_idle_time_is_heeded(
    client: Client, hint: str, kept: float
) -> None:
    async def script(conn: StubConnection) -> None:
        async for _ in conn:
            await conn.respond(200, b"", [("Keep-Alive", hint)])

    async with await ScriptedStub.start(script) as stub:
        await read(client, stub.url)
        [connection] = client.pool._idle[Origin.parse(stub.url).key]
        assert connection._limit == kept
        assert connection.is_usable()
        connection._stamp -= kept
        assert not connection.is_usable()


# Connections that die idle


async def test_an_idle_connection_that_the_server_closes_is_forgotten(client: Client) -> None:
    async with await ScriptedStub.start(hello) as stub:
        await read(client, stub.url)
        stub.connections[0].close()
        await client.until_open(stub.url, 0)
        assert client.idle(stub.url) == 0


@pytest.mark.parametrize("how", ["close", "reset", "speaks"])
async def test_a_dead_connection_is_not_handed_out_even_before_the_loop_has_noticed(
    client: Client, how: str
) -> None:
    """The server acts between two steps of one task, so that only the socket can know."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    loop = asyncio.get_running_loop()

    async def serve_once() -> socket.socket:
        sock, _ = await loop.sock_accept(listener)
        await loop.sock_recv(sock, 65536)
        await loop.sock_sendall(sock, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        return sock

    serving = asyncio.create_task(serve_once())
    assert await read(client, url) == b"ok"
    sock = await serving
    assert client.idle(url) == 1
    if how == "close":
        sock.close()
    elif how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
    else:
        sock.send(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")
    serving = asyncio.create_task(serve_once())
    assert await read(client, url) == b"ok"
    (await serving).close()
    sock.close()
    listener.close()
    counters = client.pool.counters
    assert (counters.opened, counters.reused, counters.retried) == (2, 0, 0)


async def test_bytes_on_an_idle_connection_close_it(client: Client) -> None:
    async with await ScriptedStub.start(hello) as stub:
        await read(client, stub.url)
        await stub.connections[0].write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")
        await client.until_open(stub.url, 0)
        assert await read(client, stub.url) == b"hello"


# The race between a request and a server that closes


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("size", [2, 5_000_000])
async def test_a_request_lost_to_the_keep_alive_race_is_sent_again_once(
    client: Client, how: str, size: int
) -> None:
    async def script(conn: StubConnection) -> None:
        first = len(conn.stub.connections) == 1
        async for request in conn:
            if first and len(conn.stub.requests) == 2:
                getattr(conn, how)()
                return
            await conn.respond(200, b"%d" % len(request.body))

    async with await ScriptedStub.start(script) as stub:
        assert await read(client, stub.url) == b"2"
        response = await client.send(stub.url, body=b"x" * size)
        assert await response.read_all(100) == b"%d" % size
        assert len(stub.connections) == 2
        assert client.pool.counters.retried == 1
        assert client.open(stub.url) == 1


async def test_a_fresh_connection_that_is_closed_is_not_tried_again(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()

    async with await ScriptedStub.start(script) as stub:
        with pytest.raises(EndedEarly):
            await client.send(stub.url)
        assert len(stub.requests) == 1
        assert client.pool.counters.retried == 0


async def test_the_second_connection_of_a_retry_is_the_last(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        if len(conn.stub.requests) == 1:
            await conn.respond(200, b"ok")
            await conn.read_request()

    async with await ScriptedStub.start(script) as stub:
        assert await read(client, stub.url) == b"ok"
        with pytest.raises(EndedEarly):
            await client.send(stub.url)
        assert len(stub.requests) == 3
        assert client.pool.counters.retried == 1
        await client.until_open(stub.url, 0)


async def test_a_reused_connection_that_had_answered_a_byte_is_not_tried_again(
    client: Client,
) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.respond(200, b"ok")
        await conn.read_request()
        await conn.write(b"H")

    async with await ScriptedStub.start(script) as stub:
        assert await read(client, stub.url) == b"ok"
        with pytest.raises(EndedEarly):
            await client.send(stub.url)
        assert len(stub.requests) == 2


async def test_a_loss_long_after_the_request_is_not_tried_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.connection.STALE_SECONDS", 0.02)

    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.respond(200, b"ok")
        await conn.read_request()
        await asyncio.sleep(0.05)

    async with await ScriptedStub.start(script) as stub:
        assert await read(client, stub.url) == b"ok"
        with pytest.raises(EndedEarly):
            await client.send(stub.url)
        assert len(stub.requests) == 2


# Leaving


@pytest.mark.parametrize("moment", ["before the head", "in the body", "while sending"])
async def test_the_server_sees_at_once_that_a_request_was_abandoned(
    client: Client, moment: str
) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_head()
        if moment == "while sending":
            conn.pause_reading()
            await conn.stub_wait.wait()
            conn.resume_reading()
        if moment == "in the body":
            await conn.start_chunked()
            await conn.chunk(b"x")
        await conn.stall()

    StubConnection.stub_wait = asyncio.Event()  # type: ignore[attr-defined]
    async with await ScriptedStub.start(script) as stub:
        body = b"x" * (20 << 20) if moment == "while sending" else b"{}"
        task = asyncio.create_task(client.send(stub.url, body=body))
        await stub.until_requests(1)
        if moment == "in the body":
            (await task).close()
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        StubConnection.stub_wait.set()  # type: ignore[attr-defined]
        async with asyncio.timeout(10):
            await stub.connections[0].gone.wait()
        await client.until_open(stub.url, 0)


async def test_aborting_wakes_a_waiting_reader(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.start_chunked()
        await conn.stall()

    async with await ScriptedStub.start(script) as stub:
        response = await client.send(stub.url)
        reading = asyncio.create_task(response.read())
        await asyncio.sleep(0)
        response.abort()
        response.abort()
        with pytest.raises(EndedEarly):
            await reading
        with pytest.raises(EndedEarly):
            await response.read()
        assert not response.complete


async def test_the_context_manager_closes_what_was_not_read(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.start_chunked()
        await conn.chunk(b"x")
        await conn.stall()

    async with await ScriptedStub.start(script) as stub:
        with await client.send(stub.url) as response:
            assert await response.read() == b"x"
        await stub.until_open(0)


@pytest.mark.parametrize("kept_alive", [False, True])
async def test_cancelling_at_any_turn_of_the_loop_leaks_nothing(
    client: Client, kept_alive: bool
) -> None:
    async with await ScriptedStub.start(hello) as stub, await ScriptedStub.start(hello) as other:
        await read(client, other.url)
        sockets = open_sockets()
        for burst in range(300):
            if kept_alive and burst % 12 == 0:
                await asyncio.gather(*(read(client, stub.url) for _ in range(6)))
            tasks = [asyncio.create_task(read(client, stub.url)) for _ in range(6)]
            for _ in range(burst % 24 if kept_alive else burst % 12):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(10):
            assert await read(client, stub.url) == b"hello"
            assert await read(client, other.url) == b"hello"
        await client.until_open(stub.url, client.idle(stub.url))
        for connection in tuple(client.pool._idle[Origin.parse(stub.url).key]):
            connection.abort()
        await client.until_open(stub.url, 0)
        await stub.until_open(0)
        gc.collect()
        assert open_sockets() == sockets
    assert list(client.pool._open) == [f"http://127.0.0.1:{other.port}"] or not client.pool._open


async def test_cancelling_while_the_connection_is_being_made_leaks_nothing(client: Client) -> None:
    """A full accept queue leaves connects pending, which loopback otherwise never does."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    fillers = [socket.socket() for _ in range(3)]
    for filler in fillers:
        filler.setblocking(False)
        filler.connect_ex(listener.getsockname())
    sockets = open_sockets()
    tasks = [asyncio.create_task(client.send(url)) for _ in range(20)]
    await asyncio.sleep(0.05)
    assert client.open(url) == 20
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.until_open(url, 0)
    assert open_sockets() == sockets
    with pytest.raises(ConnectFailed):
        await client.send(url, connect=0.05)
    assert client.open(url) == 0
    assert open_sockets() == sockets
    for sock in (listener, *fillers):
        sock.close()


async def test_what_was_closed_leaves_no_garbage_for_the_collector(client: Client) -> None:
    async with await ScriptedStub.start(hello) as stub:
        gc.collect()
        gc.disable()
        try:
            for _ in range(50):
                await read(client, stub.url)
                [connection] = client.pool._idle[Origin.parse(stub.url).key]
                connection.abort()
                del connection
                await client.until_open(stub.url, 0)
            await asyncio.sleep(0.01)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = [type(x).__name__ for x in gc.garbage]
            assert not {"Connection", "Incoming", "Response", "HttpResponseParser"} & set(left)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


# Closing the pool


async def test_closing_the_pool_ends_everything(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        request = await conn.read_request()
        if request.path == "/idle":
            await conn.respond(200)
        elif request.path == "/stream":
            await conn.start_chunked()
        await conn.stall()

    async with await ScriptedStub.start(script) as stub:
        stream = await client.send(stub.url, "/stream")
        silent = asyncio.create_task(client.send(stub.url, "/silent"))
        await stub.until_requests(2)
        await (await client.send(stub.url, "/idle")).read_all(0)
        await client.pool.close()
        assert client.open(stub.url) == 0
        with pytest.raises(EndedEarly):
            await stream.read()
        with pytest.raises(EndedEarly):
            await silent
        with pytest.raises(RuntimeError):
            await client.send(stub.url)
        await stub.until_open(0)


async def test_closing_the_pool_ends_connects_too(client: Client) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    tasks = [asyncio.create_task(client.send(url, connect=60)) for _ in range(5)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(10):
        await client.pool.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} <= {ConnectFailed, EndedEarly}
    assert client.open(url) == 0
    listener.close()
