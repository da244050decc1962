"""Any bytes as the answers of a backend on a kept-alive connection: what is read does not depend on
how they came, and a whole answer is what an independent reader of HTTP finds in them."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any, NamedTuple

import h11

from backends.connection import Connection, Outgoing
from backends.outbox import Outbox
from backends.response import Response, UpstreamError
from tests.fuzz.cutting import ways_to_cut
from tests.fuzz.independent import is_of_trailers

#: Between one answer and the next, which is awaited only when the one before it has ended.
NEXT = b"\n=====\n"
ASKED = Outgoing(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", (), 0, True, 60.0, 60.0)
WHOLE = "whole"
REASON = re.compile(rb"^(HTTP/1\.[01] \d\d\d)(?: [^\r\n]*)?\r\n")
LOOP = asyncio.new_event_loop()
SOCKET, _other_end = socket.socketpair()


class Answer(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    verdict: str  # WHOLE, or the fault's name


class Line(asyncio.Transport):
    """A transport whose other end is the one who feeds the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return SOCKET if name == "socket" else default

    def write(self, data: Any) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        self.closed = True


async def settle() -> None:
    """Until nothing is left to do but to wait for more."""
    while LOOP._ready:  # type: ignore[attr-defined]  # noqa: ASYNC110
        await asyncio.sleep(0)


async def read(response: Response, *, pour: bool) -> Answer:
    body: list[bytes] = []

    def take(part: bytes) -> bool:
        body.append(part)
        return True

    verdict = WHOLE
    try:
        await response.wait_for_head()
        if pour:
            await response.pour(take)
        else:
            while part := await response.read():
                body.append(part)
    except UpstreamError as error:
        verdict = type(error).__name__
    return Answer(response.status, response.headers, b"".join(body), verdict)


async def answers(came: list[list[bytes]], *, pour: bool) -> list[Answer]:
    idle: list[Connection] = []
    connection = Connection(LOOP, "", Outbox(), 60.0, idle.append, lambda _: None)
    connection.connection_made(Line())
    found = []
    for reads in came:
        idle.clear()
        task = LOOP.create_task(read(connection.start(ASKED), pour=pour))
        await settle()
        for data in reads:
            if connection.closed:
                break
            connection.data_received(data)
            await settle()
        if not task.done() and not connection.closed:
            connection.eof_received()
        await settle()
        found.append(task.result())
        if not idle or connection.closed:
            break
    connection.abort()
    return found


def independent(data: bytes) -> Answer | None:
    """As h11 reads one answer; None where it is not content with it."""
    reader = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    reader.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(without_what_nobody_reads(data))
    status, headers, body, ended = 0, [], b"", False
    try:
        while True:
            event = reader.next_event()
            if event is h11.NEED_DATA and not ended:
                ended = True
                reader.receive_data(b"")
            elif isinstance(event, h11.InformationalResponse) and event.status_code != 101:
                return independent(reader.trailing_data[0])
            elif isinstance(event, h11.Response):
                status, headers = event.status_code, list(event.headers)
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return Answer(status, headers, body, WHOLE)
            else:
                return None
    except h11.RemoteProtocolError as error:
        if is_of_trailers(error, head_is_read=bool(status)):
            return Answer(status, headers, body, WHOLE)
        return None


def without_what_nobody_reads(answer: bytes) -> bytes:
    """Our parser passes over line ends before a head, and over any reason phrase."""
    return REASON.sub(rb"\1 OK\r\n", answer.lstrip(b"\r\n"))


def check(data: bytes) -> None:
    came = data.split(NEXT)
    ways = list(zip(*map(list, map(ways_to_cut, came)), strict=True))  # type: ignore[call-overload]
    first, *others = [
        LOOP.run_until_complete(answers(way, pour=pour)) for way in ways for pour in (False, True)
    ]
    for other in others:
        shared = min(len(first), len(other))  # what follows an answer may have come with it
        assert other[:shared] == first[:shared], f"{other} is not {first}"
    for one, read_by_us in zip(came, first, strict=False):
        if read_by_us.verdict == WHOLE:
            expected = independent(one)
            assert read_by_us == expected, f"{read_by_us} is not {expected}"
