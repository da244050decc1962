"""uvicorn's HTTP protocol, with what a consumer cannot do.

A request that never completes its head, or whose head is too large, never reaches a consumer; and
only the protocol can end a connection after an answer that was not whole, or notice a client that
has vanished without a word.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._overhead_bytes = 0
        self._in_head = True
        self._hosts = 0
        self._odd_coding = False  # a transfer coding other than chunked
        self._head_deadline: asyncio.TimerHandle | None = None
        self.on_client_left: Callable[[], None] | None = None  # set while a request is served
        self._served: Any = None  # the request being answered; uvicorn's ``cycle`` is the latest

    # ---- what the gateway's client calls

    def wire(self) -> Wire:
        """The response to the current request."""
        return Wire(self._served)

    def close_after_response(self) -> None:
        """Close the connection once the current response has ended."""
        self._served.keep_alive = False

    def abort(self) -> None:
        """Break the connection off at once."""
        self._served.disconnected = True
        self.transport.abort()

    # ---- asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            for option in _KEEPALIVE:
                sock.setsockopt(*option)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()
        super().connection_lost(exc)
        if self.on_client_left is not None:
            self.on_client_left()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_deadline is None:
                self._expect_head()
        else:
            self._overhead_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._in_head:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(*_TOO_LARGE)
        elif self._overhead_bytes > MAX_OVERHEAD_BYTES:
            self._refuse(b"400 Bad Request", b"Too many bytes that are no body.")

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
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(b"405 Method Not Allowed", b"This is not a proxy.")
            return
        kept = [
            name + b": " + value for name, value in self.headers if name not in _UPGRADE_HEADERS
        ]
        self.parser = httptools.HttpRequestParser(self)
        self._parse(b"\r\n".join([method + b" " + self.url + b" HTTP/1.1", *kept, b"", rest]))

    # ---- the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._hosts = 0
        self._odd_coding = False
        # uvicorn's type expects a dict for each extension
        self.scope["extensions"] = {"mindrouter.connection": self}  # type: ignore[dict-item]

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
        self._head_arrived()
        self._overhead_bytes = 0
        if self._offers_another_protocol():
            self._in_head = True  # it comes again
            return
        self._check_head()
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()
        elif self.pipeline:
            self.flow.resume_reading()  # a connection that is not read is not seen closing

    def _check_head(self) -> None:
        if len(self.headers) > MAX_HEADERS or self._head_is_too_large():
            self._refuse(*_TOO_LARGE)
            raise httptools.HttpParserError("the head is too large")
        if self._hosts != 1 and (self._hosts or self.parser.get_http_version() == "1.1"):
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
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_another_protocol():
            return
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    # ---- the head's deadline

    def _expect_head(self) -> None:
        self._head_deadline = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_arrived(self) -> None:
        self._in_head = False
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _head_is_late(self) -> None:
        self._head_deadline = None
        if self._in_head:
            self._refuse(b"408 Request Timeout", b"The request's head did not arrive in time.")

    def _refuse(self, status: bytes, message: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._answer_is_due():
            self.transport.abort()  # nothing may be written into another answer or before it
            return
        body = _BODY % message
        self.transport.write(_ERROR % (status, len(body), body))
        self.transport.close()

    def _answer_is_due(self) -> bool:
        """Whether an earlier request waits for its answer, or is getting it. One whose own body
        is what is wrong has its answer in the refusal."""
        cycle = self._served
        if cycle is None or cycle.response_complete:
            return False
        return cycle.response_started or not cycle.more_body or bool(self.pipeline)
