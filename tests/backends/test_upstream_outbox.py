"""Requests that leave by the end of a turn of the event loop, not at once."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from backends.connection import SMALL_BODY_BYTES, Connection, Outgoing
from backends.outbox import Outbox
from backends.response import StaleConnection

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
SOCKET, _other_end = socket.socketpair()


class Line(asyncio.Transport):
    """A transport that writes into a log which several share."""

    def __init__(self, log: list[bytes]) -> None:
        super().__init__()
        self._log = log
        self._closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return SOCKET if name == "socket" else default

    def write(self, data: Any) -> None:
        self._log.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._closed

    def abort(self) -> None:
        self._closed = True


class Pool:
    """Connections that share an outbox and a log of what left."""

    def __init__(self) -> None:
        self.log: list[bytes] = []
        self.outbox = Outbox()

    def fresh(self) -> Connection:
        loop = asyncio.get_running_loop()
        one = Connection(loop, "", self.outbox, 60.0, lambda _: None, lambda _: None)
        one.connection_made(Line(self.log))
        return one

    async def used(self) -> Connection:
        """One that has served a request before."""
        one = self.fresh()
        response = one.start(asking("earlier"))
        one.data_received(ANSWER)
        assert await response.read_all(2) == b"hi"
        await asyncio.sleep(0)
        self.log.clear()
        return one


def asking(name: str, body: bytes = b"") -> Outgoing:
    return Outgoing(name.encode(), (body,) if body else (), len(body), True, 60.0, 60.0)


async def test_requests_of_a_turn_leave_in_their_order_by_its_end() -> None:
    pool = Pool()
    connections = [await pool.used() for _ in range(4)]
    for number, one in enumerate(connections):
        one.start(asking(str(number)))
    assert pool.log == [b"0"]
    await asyncio.sleep(0)
    assert pool.log == [b"0", b"1", b"2", b"3"]


async def test_a_large_request_leaves_at_once_behind_those_that_wait() -> None:
    pool = Pool()
    first, second, large = [await pool.used() for _ in range(3)]
    first.start(asking("first"))
    second.start(asking("second"))
    large.start(asking("large", bytes(SMALL_BODY_BYTES + 1)))
    assert pool.log == [b"first", b"second", b"large", bytes(SMALL_BODY_BYTES + 1)]


async def test_the_first_request_of_a_connection_waits_for_nothing() -> None:
    pool = Pool()
    first, second = await pool.used(), await pool.used()
    first.start(asking("first"))
    second.start(asking("second"))
    pool.fresh().start(asking("fresh"))
    assert pool.log == [b"first", b"second", b"fresh"]


@pytest.mark.parametrize("comes", ["an answer", "the end"])
async def test_what_comes_before_its_request_has_left_is_never_taken_for_its_answer(
    comes: str,
) -> None:
    pool = Pool()
    first, second = await pool.used(), await pool.used()
    first.start(asking("first"))
    response = second.start(asking("second"))
    if comes == "an answer":
        second.data_received(ANSWER)
    else:
        second.eof_received()
    with pytest.raises(StaleConnection):
        await response.wait_for_head()
    assert second.closed
    await asyncio.sleep(0)
    assert pool.log == [b"first"]


async def test_a_request_that_is_given_up_before_it_leaves_never_leaves() -> None:
    pool = Pool()
    first, second = await pool.used(), await pool.used()
    first.start(asking("first"))
    second.start(asking("second")).abort()
    await asyncio.sleep(0)
    assert pool.log == [b"first"]
