"""uvicorn's HTTP protocol, with the gateway's requests served straight from it.

ASGI would cost as much as all of the rest. Requests for pages go uvicorn's own way. A request that
never completes its head, or whose head is too large, never reaches a consumer; and only the
protocol can end a connection after an answer that was not whole, or notice a client that has
vanished without a word.
"""

from __future__ import annotations

import asyncio
import math
import socket
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from backends.opening import Opening
from mindrouter.asgi import is_gateways, serve
from mindrouter.gateway.client import Client
from mindrouter.gateway.heads import Head
from mindrouter.gateway.wire import Wire

#: Seconds for a request's head to arrive whole, from its first byte or from the connection.
HEAD_SECONDS = 30.0
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100
#: Bytes in a row within a body that are none of it: chunk extensions, trailers.
MAX_OVERHEAD_BYTES = 64 * 1024
#: Requests sent ahead of the answers to earlier ones.
MAX_PIPELINED = 16

_TOO_LARGE = b"431 Request Header Fields Too Large", b"The request's head is too large."
#: A client that lost power or its network is noticed within minutes.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),
)
_VERSIONS = ("1.1", "1.0")
_FRAMING = frozenset({b"host", b"expect", b"transfer-encoding"})
_UPGRADE_HEADERS = (b"upgrade", b"http2-settings", b"connection")
_ERROR = (
    b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%s"
)
_BODY = (
    b'{"error":{"message":"%s","type":"invalid_request_error","param":null,'
    b'"code":"invalid_request"}}'
)


class GatewayProtocol(HttpToolsProtocol):
    """One client connection. Loaded by uvicorn through its ``http`` option."""

    # What uvicorn's has is some 28; beyond 30 Python keeps them in a table of its own for each
    # connection, which takes 1.2 KB more.
    __slots__ = (
        "_begun",
        "_due",
        "_head_bytes",
        "_hosts",
        "_in_head",
        "_odd_coding",
        "_opening",
        "_overhead_bytes",
        "_served",
        "_timer",
        "_timer_at",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._overhead_bytes = 0
        self._in_head = True
        self._begun = False  # a request, or a further one behind it, whose end has not come
        self._hosts = 0
        self._odd_coding = False  # a transfer coding other than chunked
        self._due = math.inf  # on the loop's clock: when a head must be here
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._served: Any = None  # the request being answered; uvicorn's ``cycle`` is the latest
        self._opening: Opening[Head] | None = None  # how the latest request began

    # ---- asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            for option in _KEEPALIVE:
                sock.setsockopt(*option)
        self._expect_head_within(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        served, self._served = self._served, None
        if isinstance(served, Wire):
            served.client_left()
        elif served is not None and not served.response_complete:
            served.disconnected = True
            served.message_event.set()
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]  # they refer to each other

    def eof_received(self) -> None:
        """The connection is closed now; what the outbox has for it goes before."""
        self._hurry()

    def shutdown(self) -> None:
        """As uvicorn's, which closes a connection that waits for no answer."""
        self._hurry()
        super().shutdown()

    def _hurry(self) -> None:
        served = self._served
        if isinstance(served, Wire):
            served.hurry()

    def data_received(self, data: bytes) -> None:
        self._hurry()  # whatever this leads to is not to overtake it
        # A body, too, may look like a head: only what a request begins with is taken for one.
        starts = self._in_head and not self._head_bytes and not self._begun
        if self._in_head:
            opening = self._opening
            if opening is not None and starts and self._is_idle():
                body = opening.body_of(data)
                if body is not None:
                    self._begin_again(opening.head, body)
                    return
                self._opening = None
            if not self._head_bytes:
                self._expect_head_within(HEAD_SECONDS)
            self._head_bytes += len(data)
        else:
            self._overhead_bytes += len(data)
        self._parse(data)
        if self._in_head:
            if not self._head_bytes:
                if starts:
                    self._remember(data)
            elif self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(*_TOO_LARGE)
        elif self._overhead_bytes > MAX_OVERHEAD_BYTES:
            self._refuse(b"400 Bad Request", b"Too many bytes that are no body.")

    def _remember(self, data: bytes) -> None:
        """A request has come in one read: the next one may begin likewise."""
        latest: Any = self.cycle
        if isinstance(latest, Wire) and latest.may_be_remembered:
            self._opening = Opening.of(data, latest.head)

    def _is_idle(self) -> bool:
        return (self._served is None or self._served.response_complete) and not self.pipeline

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(b"400 Bad Request", b"Invalid HTTP request received.")

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Read the request again as if it had not offered HTTP/2.

        The parser takes what follows such a head for another protocol's bytes. Java's HTTP client
        offers HTTP/2 with each first request, and the body would be lost.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self._refuse(b"405 Method Not Allowed", b"This is not a proxy.")
            return
        kept = [
            name + b": " + value for name, value in self.headers if name not in _UPGRADE_HEADERS
        ]
        if not self.parser.should_keep_alive():
            kept.append(b"connection: close")
        self.parser = httptools.HttpRequestParser(self)
        first = b"%b %b HTTP/%b" % (method, self.url, version)
        self._parse(b"\r\n".join([first, *kept, b"", rest]))

    # ---- the parser

    def on_message_begin(self) -> None:
        self._begun = True
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._hosts = 0
        self._odd_coding = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer, which nobody has asked for
        name = name.lower()
        self.headers.append((name, value))
        if name in _FRAMING:  # looked at here, as to go through all of them again costs more
            self._note(name, value)

    def _note(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._hosts += 1
        elif name == b"expect":
            self.expect_100_continue = self.expect_100_continue or value.lower() == b"100-continue"
        elif value.lower() != b"chunked":
            self._odd_coding = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._due = math.inf
        self._overhead_bytes = 0
        self._check_head()
        if self._offers_another_protocol():
            self._in_head = True  # it comes again
            return
        path = unquote(httptools.parse_url(self.url).path.decode("ascii"))
        if is_gateways(path) and not self.parser.should_upgrade():
            self._ask_gateway(path)
        else:
            self._ask_pages()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()
            raise httptools.HttpParserError("too many requests ahead")  # read none of the rest
        if self.pipeline:
            self.flow.resume_reading()  # a connection that is not read is not seen closing

    def _ask_pages(self) -> None:
        """As uvicorn would, which makes the scope at once."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        super().on_headers_complete()

    def _ask_gateway(self, path: str) -> None:
        parser = self.parser
        modern = parser.get_http_version() != "1.0"
        head = Head(parser.get_method().decode("ascii"), path, self.headers)
        wire = Wire(
            self, head, keep_alive=modern and parser.should_keep_alive(), takes_chunks=modern
        )
        wire.waiting_for_100_continue = self.expect_100_continue
        earlier: Any = self.cycle
        self.cycle = wire  # type: ignore[assignment]
        if earlier is None or earlier.response_complete:
            self._serve(wire)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((wire, self.app))  # type: ignore[arg-type]

    def _begin_again(self, head: Head, body: bytes) -> None:
        """A whole request has come whose head is known."""
        self._due = math.inf
        wire = Wire(self, head, keep_alive=True, takes_chunks=True, body=body)
        self.cycle = wire  # type: ignore[assignment]
        self._serve(wire)

    def _check_head(self) -> None:
        if len(self.headers) > MAX_HEADERS or self._head_is_too_large():
            self._refuse(*_TOO_LARGE)
            raise httptools.HttpParserError("the head is too large")
        version = self.parser.get_http_version()
        if version not in _VERSIONS:
            raise httptools.HttpParserError("neither HTTP/1.0 nor HTTP/1.1")
        if self._hosts != 1 and (self._hosts or version == "1.1"):
            raise httptools.HttpParserError("not exactly one Host")
        if self._odd_coding:
            raise httptools.HttpParserError("a transfer coding other than chunked")

    def _head_is_too_large(self) -> bool:
        if self._head_bytes <= MAX_HEAD_BYTES:
            return False
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        return size > MAX_HEAD_BYTES

    def _offers_another_protocol(self) -> bool:
        return self.parser.should_upgrade() and not self._should_upgrade()

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes = 0
        latest: Any = self.cycle
        if not isinstance(latest, Wire):
            super().on_body(body)
        elif not latest.response_complete:
            latest.take(body)

    def on_message_complete(self) -> None:
        if self._offers_another_protocol():
            return
        super().on_message_complete()
        self._in_head = True
        self._begun = False
        self._head_bytes = 0

    # ---- one after the other

    def _serve(self, wire: Wire) -> None:
        self._served = wire
        wire.task = task = self.loop.create_task(self._serve_to_end(wire))
        self.tasks.add(task)

    async def _serve_to_end(self, wire: Wire) -> None:
        try:
            await serve(Client(wire.head, wire))
        finally:
            self.tasks.discard(wire.task)
            wire.finish()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if isinstance(cycle, Wire):
            self._serve(cycle)
        else:
            self._served = cycle
            super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """The next one, if it has been sent already; else it is waited for, for a while."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._hurry()
            self._start_asgi_task(*self.pipeline.pop())
        elif not self._head_bytes:
            self._expect_head_within(self.timeout_keep_alive)

    # ---- the next head's deadline: one timer, which is seldom set anew

    def _expect_head_within(self, seconds: float) -> None:
        self._due = due = self.loop.time() + seconds
        if due < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._set_timer()

    def _set_timer(self) -> None:
        self._timer, self._timer_at = self.loop.call_at(self._due, self._check_due), self._due

    def _check_due(self) -> None:
        self._timer, self._timer_at = None, math.inf
        if self._due == math.inf or self.transport.is_closing():
            return
        if self.loop.time() < self._due:
            self._set_timer()
        elif self._in_head and (self._head_bytes or self.cycle is None):
            self._refuse(b"408 Request Timeout", b"The request's head did not arrive in time.")
        else:
            self.transport.close()

    def _refuse(self, status: bytes, message: bytes) -> None:
        if self.transport.is_closing():
            return
        self._hurry()
        if self._answer_is_due():
            self.transport.abort()  # nothing may be written into another answer or before it
            return
        body = _BODY % message
        self.transport.write(_ERROR % (status, len(body), body))
        self.transport.close()

    def _answer_is_due(self) -> bool:
        """Whether an earlier request waits for its answer, or is getting it. One whose own body
        is what is wrong has its answer in the refusal."""
        served = self._served
        if served is None or served.response_complete:
            return False
        return served.response_started or not served.more_body or bool(self.pipeline)
