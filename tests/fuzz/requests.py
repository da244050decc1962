"""Any bytes from a client: what is served does not depend on how they came, and is what an
independent reader of HTTP finds in them."""

from __future__ import annotations

import asyncio
import re
from typing import Any, NamedTuple
from unittest import mock
from urllib.parse import unquote

import h11
import httptools
from uvicorn.server import ServerState

from mindrouter.gateway import protocol
from mindrouter.gateway.client import Client, ClientLeftError
from mindrouter.gateway.protocol import GatewayProtocol
from mindrouter.server import configuration
from tests.fuzz.cutting import ways_to_cut
from tests.fuzz.independent import is_of_trailers

LOOP = asyncio.new_event_loop()
CONFIGURATION = configuration("127.0.0.1", 0)
CONFIGURATION.load()
LIMIT = 1 << 20
BLANKS = re.compile(rb"^([!-~]+) +([!-~]+) +(HTTP/)")
ANSWER = b"answered"


class Request(NamedTuple):
    method: str
    path: str
    body: bytes


class Outcome(NamedTuple):
    served: list[Request]
    refused: bool


class Line(asyncio.Transport):
    """A transport whose other end is the one who feeds the protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.connection: GatewayProtocol
        self.written = b""
        self.closed = False
        self.aborted = False
        self.paused = False
        self.handed_over = False

    def set_protocol(self, protocol: Any) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        if not self.closed:
            self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            LOOP.call_soon(self.connection.connection_lost, None)

    def abort(self) -> None:
        self.aborted = True
        self.close()


class WebSocket:
    """What a connection goes over to; nothing of it is looked at."""

    def __init__(self, **_: Any) -> None:
        pass

    def connection_made(self, transport: Line) -> None:
        transport.handed_over = True

    def data_received(self, data: bytes) -> None:
        pass


class Served:
    """What stands behind the protocol: it reads each request to its end, and answers it."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def gateway(self, client: Client) -> None:
        try:
            body = await client.read_body(LIMIT)
        except ClientLeftError:
            return
        self.requests.append(Request(client.head.method, client.head.path, body))
        await client.respond(200, [], ANSWER)

    async def pages(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.requests.append(Request(scope["method"], scope["path"], body))
        length = [(b"content-length", b"%d" % len(ANSWER))]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": ANSWER})


async def settle() -> None:
    """Until nothing is left to do but to wait for more."""
    while LOOP._ready:  # type: ignore[attr-defined]  # noqa: ASYNC110
        await asyncio.sleep(0)


async def outcome(reads: list[bytes]) -> Outcome:
    served, line = Served(), Line()
    with mock.patch.object(protocol, "serve", served.gateway):
        line.connection = connection = GatewayProtocol(CONFIGURATION, ServerState(), {}, LOOP)
        connection.app = served.pages
        connection.ws_protocol_class = WebSocket  # type: ignore[assignment]
        connection.connection_made(line)
        for data in reads:
            if line.closed or line.handed_over:
                break
            connection.data_received(data)
            await settle()
            assert line.closed or not line.paused, "nobody goes on reading"
        line.close()
        await settle()
    answered = line.written.count(ANSWER)
    heads = re.findall(rb"HTTP/1\.1 (\d\d\d) ", line.written)
    refusals = [status for status in heads if status[:1] == b"4"]
    bodiless = sum(request.method == "HEAD" for request in served.requests)
    assert answered + bodiless <= len(served.requests), line.written
    assert len(refusals) <= 1, line.written
    assert set(heads) <= {b"100", b"200", b"400", b"405", b"431"}, line.written
    return Outcome(served.requests, bool(refusals) or line.aborted)


def independent(data: bytes) -> tuple[list[Request], bool]:
    """As h11 reads them, until it is not content; and whether others might read on there."""
    found: list[Request] = []
    while True:
        reader = h11.Connection(h11.SERVER, max_incomplete_event_size=LIMIT)
        reader.receive_data(without_blanks_too_many(data))
        head: h11.Request | None = None
        body = b""
        lost = False
        try:
            while not isinstance(event := reader.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    head = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                else:
                    return found, False
        except h11.RemoteProtocolError as error:
            lost = is_of_trailers(error, head_is_read=head is not None)
            if not lost:
                return found, False
        if head is None or (path := path_of(head.target)) is None:
            return found, False
        found.append(Request(head.method.decode(), path, body))
        if lost or reader.their_state is h11.MUST_CLOSE:
            return found, lost
        data = reader.trailing_data[0]


def path_of(target: bytes) -> str | None:
    try:
        return unquote(httptools.parse_url(target).path.decode("ascii"))
    except (httptools.HttpParserError, AttributeError):
        return None


def without_blanks_too_many(request: bytes) -> bytes:
    """Our parser passes over line ends before a head, and over further blanks in its first line."""
    return BLANKS.sub(rb"\1 \2 \3", request.lstrip(b"\r\n"))


def check(data: bytes) -> None:
    outcomes = [LOOP.run_until_complete(outcome(way)) for way in ways_to_cut(data)]
    most = max(outcomes, key=lambda one: len(one.served))
    for other in outcomes:
        assert other.served == most.served[: len(other.served)], f"{other} is not {most}"
        # A fault behind a request that is being answered ends that, too.
        assert other.refused or other.served == most.served, f"{other} is not {most}"
    expected, lost = independent(data)
    served = most.served[: len(expected)] if lost else most.served
    assert served == expected[: len(served)], f"{most} is not {expected}"
