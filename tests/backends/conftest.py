"""The relay's client is tested on both event loops that it may run on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import uvloop

from backends.upstream import Origin, Response, Upstream


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name.startswith("test_upstream"):
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


class Client:
    """A pool, with generous limits where a test does not name any."""

    def __init__(self, pool: Upstream | None = None) -> None:
        self.pool = pool or Upstream()

    async def send(
        self,
        url: str,
        path: str = "/v1/chat/completions",
        *,
        method: bytes = b"POST",
        headers: bytes = b"content-type: application/json\r\n",
        body: bytes | Sequence[bytes] = b"{}",
        connect: float = 5.0,
        first_byte: float = 20.0,
        between: float = 20.0,
    ) -> Response:
        return await self.pool.send(
            Origin.parse(url),
            method=method,
            path=path.encode(),
            headers=headers,
            body=body,
            connect_timeout=connect,
            first_byte_timeout=first_byte,
            chunk_timeout=between,
        )

    def idle(self, url: str) -> int:
        return self.pool.idle_count(Origin.parse(url))

    def open(self, url: str) -> int:
        return self.pool.open_count(Origin.parse(url))

    async def until_open(self, url: str, count: int) -> None:
        """Wait some turns of the loop until the pool has `count` connections to a server."""
        for _ in range(1000):
            if self.open(url) == count:
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"{self.open(url)} connections are open, not {count}")


async def until_still(value: Callable[[], int]) -> int:
    """Wait until nothing moves this value any more, and return it. Turns of the loop are counted:
    while this process stands still nothing moves it either."""
    seen, turns = value(), 0
    async with asyncio.timeout(30):
        while turns < 20:
            await asyncio.sleep(0.01)
            before, seen = seen, value()
            turns = turns + 1 if seen == before else 0
    return seen


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    client = Client()
    yield client
    async with asyncio.timeout(5):
        await client.pool.close()
