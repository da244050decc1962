"""A body that is handed over in the moment that it arrives."""

from __future__ import annotations

import asyncio

import pytest

from backends.upstream import EndedEarly, Response
from tests.backends.conftest import Client
from tests.stubs.scripted import ScriptedStub, StubConnection, chunk, head

CHUNKED = head(200, [("Transfer-Encoding", "chunked")])


class Server:
    """Sends a chunk whenever it is told to."""

    def __init__(self) -> None:
        self.connection: asyncio.Future[StubConnection] = asyncio.Future()
        self.over = asyncio.Event()

    async def script(self, conn: StubConnection) -> None:
        await conn.read_request()
        await conn.write(CHUNKED)
        self.connection.set_result(conn)
        await self.over.wait()

    async def send(self, data: bytes) -> None:
        await (await self.connection).write(data)


class Taker:
    """Keeps what it is given; refuses more after a piece that ends in ``!``."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.news = asyncio.Event()

    def __call__(self, data: bytes) -> bool:
        self.taken.append(data)
        self.news.set()
        return not data.endswith(b"!")

    async def until(self, count: int) -> None:
        while len(self.taken) < count:
            self.news.clear()
            await self.news.wait()


async def begin(client: Client, stub: ScriptedStub, taker: Taker) -> tuple[Response, asyncio.Task]:  # type: ignore[type-arg]
    response = await client.send(stub.url)
    return response, asyncio.create_task(response.pour(taker))


async def test_each_read_is_taken_at_once_and_the_end_is_told(client: Client) -> None:
    server, taker = Server(), Taker()
    async with await ScriptedStub.start(server.script) as stub:
        response, pouring = await begin(client, stub, taker)
        for count, piece in enumerate((b"one", b"two", b"three"), 1):
            await server.send(chunk(piece))
            await taker.until(count)
            assert not pouring.done()
        await server.send(b"0\r\n\r\n")
        assert await pouring is True
        assert taker.taken == [b"one", b"two", b"three"]
        assert response.complete
        server.over.set()


async def test_a_taker_that_refuses_is_given_the_rest_when_it_pours_again(client: Client) -> None:
    server, taker = Server(), Taker()
    async with await ScriptedStub.start(server.script) as stub:
        response, pouring = await begin(client, stub, taker)
        await server.send(chunk(b"stop!"))
        assert await pouring is False
        await server.send(chunk(b"later") + b"0\r\n\r\n")
        assert taker.taken == [b"stop!"]
        assert await response.pour(taker) is True
        assert taker.taken == [b"stop!", b"later"]
        server.over.set()


async def test_what_a_taker_raises_reaches_the_reader(client: Client) -> None:
    def fail(data: bytes) -> bool:
        raise ZeroDivisionError(data)

    server = Server()
    async with await ScriptedStub.start(server.script) as stub:
        response = await client.send(stub.url)
        pouring = asyncio.create_task(response.pour(fail))
        await asyncio.sleep(0)
        await server.send(chunk(b"x"))
        with pytest.raises(ZeroDivisionError):
            await pouring
        response.close()
        server.over.set()


async def test_a_lost_connection_ends_the_pouring_after_what_came_before(client: Client) -> None:
    server, taker = Server(), Taker()
    async with await ScriptedStub.start(server.script) as stub:
        _, pouring = await begin(client, stub, taker)
        await server.send(chunk(b"half"))
        await taker.until(1)
        server.over.set()  # the script ends, and its connection with it
        with pytest.raises(EndedEarly):
            await pouring
        assert taker.taken == [b"half"]


async def test_nothing_is_given_to_a_taker_whose_reader_was_cancelled(client: Client) -> None:
    server, taker = Server(), Taker()
    async with await ScriptedStub.start(server.script) as stub:
        response, pouring = await begin(client, stub, taker)
        await server.send(chunk(b"one"))
        await taker.until(1)
        pouring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pouring
        await server.send(chunk(b"two"))
        assert await response.read() == b"two"
        assert taker.taken == [b"one"]
        response.close()
        server.over.set()
