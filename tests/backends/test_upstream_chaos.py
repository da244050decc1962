"""Everything at once: no answer may reach the wrong request, and nothing may be left over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from backends.upstream import UpstreamError
from tests.backends.conftest import Client
from tests.stubs.scripted import ScriptedStub, StubConnection, chunk, head

POISON = head(200, [("Content-Length", "6")]) + b"poison"


async def plain(conn: StubConnection, name: bytes) -> None:
    await conn.respond(200, name)


async def streamed(conn: StubConnection, name: bytes) -> None:
    await conn.stream([name[i : i + 1] for i in range(len(name))])


async def after_interim(conn: StubConnection, name: bytes) -> None:
    await conn.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    await conn.respond(200, name)


async def with_surplus(conn: StubConnection, name: bytes) -> None:
    await conn.write(head(200, [("Content-Length", str(len(name)))]), name, POISON)


async def until_close(conn: StubConnection, name: bytes) -> None:
    await conn.write(head(200), name)
    conn.close()


async def then_close(conn: StubConnection, name: bytes) -> None:
    await conn.respond(200, name)
    conn.close()


async def then_reset(conn: StubConnection, name: bytes) -> None:
    await conn.respond(200, name)
    conn.reset()


async def cut_by_close(conn: StubConnection, name: bytes) -> None:
    await conn.write(head(200, [("Transfer-Encoding", "chunked")]), chunk(name[:3]))
    conn.close()


async def cut_by_reset(conn: StubConnection, name: bytes) -> None:
    await conn.write(head(200, [("Transfer-Encoding", "chunked")]), chunk(name[:3]))
    conn.reset()


async def no_answer(conn: StubConnection, name: bytes) -> None:
    conn.reset()


BEHAVIOURS = [
    *(plain, plain, streamed, streamed, after_interim, with_surplus, until_close),
    *(then_close, then_reset, cut_by_close, cut_by_reset, no_answer),
]


def make_script(dice: random.Random) -> Callable[[StubConnection], Awaitable[None]]:
    async def script(conn: StubConnection) -> None:
        while True:
            request = await conn.read_head()
            name = request.path.encode()
            if dice.randrange(10) == 0:
                await conn.respond(413, name)  # before the body was read
                return
            await conn.read_body(request)
            await asyncio.sleep(dice.choice([0, 0, 0.001, 0.005]))
            await dice.choice(BEHAVIOURS)(conn, name)

    return script


async def ask(client: Client, url: str, name: str, dice: random.Random) -> str:
    body = b"x" * dice.choice([2, 2, 100, 100_000, 700_000])
    try:
        with await client.send(url, name, body=body) as response:
            if dice.randrange(8) == 0:
                response.abort()
            assert await response.read_all(1000) == name.encode()
    except UpstreamError as error:
        return error.reason
    return "whole"


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_under_every_fault_at_once_no_answer_is_misrouted_and_nothing_leaks(
    client: Client, seed: int
) -> None:
    dice = random.Random(seed)
    results: list[str] = []

    async def user(number: int) -> None:
        for turn in range(15):
            task = asyncio.create_task(ask(client, stub.url, f"/{number}-{turn}", dice))
            if dice.randrange(6) == 0:
                await asyncio.sleep(dice.choice([0, 0, 0.0005, 0.002]))
                task.cancel()
            try:
                results.append(await task)
            except asyncio.CancelledError:
                results.append("cancelled")

    async with await ScriptedStub.start(make_script(dice)) as stub:
        async with asyncio.timeout(30):
            await asyncio.gather(*(user(number) for number in range(20)))
        assert len(results) == 300
        assert set(results) == {"whole", "cancelled", "upstream_ended_early"}
        assert results.count("whole") > 100
        for connection in tuple(client.pool._idle.get(stub.url, ())):
            connection.abort()
        await client.until_open(stub.url, 0)
        await stub.until_open(0)
        assert not client.pool._idle
        assert not client.pool._open
