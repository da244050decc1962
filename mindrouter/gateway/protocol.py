"""uvicorn's HTTP protocol, with what a consumer cannot do.

A request that never completes its head, or whose head is too large, never reaches a consumer; and
only the protocol can end a connection after an answer that was not whole.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: Seconds for a request's head to arrive whole, from its first byte or from the connection.
HEAD_SECONDS = 30.0
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100

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
        self._in_head = True
        self._head_deadline: asyncio.TimerHandle | None = None

    # ---- what the gateway's client calls

    def close_after_response(self) -> None:
        """Close the connection once the current response has ended."""
        self.cycle.keep_alive = False

    def abort(self) -> None:
        """Break the connection off at once."""
        self.cycle.disconnected = True
        self.transport.abort()

    # ---- asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_deadline is None:
                self._expect_head()
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                b"431 Request Header Fields Too Large", b"The request's head is too large."
            )

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", msg.encode())

    # ---- the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # uvicorn's type expects a dict for each extension
        self.scope["extensions"] = {"mindrouter.connection": self}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        self._head_arrived()
        if len(self.headers) > MAX_HEADERS:
            raise httptools.HttpParserError("too many header fields")
        if sum(1 for name, _ in self.headers if name == b"host") > 1:
            raise httptools.HttpParserError("more than one Host")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

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
        cycle: Any = self.cycle  # None before the first request, whatever uvicorn's type says
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()  # an answer is under way; nothing may be written into it
            return
        body = _BODY % message
        self.transport.write(_ERROR % (status, len(body), body))
        self.transport.close()
