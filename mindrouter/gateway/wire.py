"""Responses straight onto a connection of uvicorn's, past its ASGI ``send``.

A response, or a part of one, is one write: each write is a system call of its own. The state of
uvicorn's request-response cycle is kept as ``send`` would leave it, so that keep-alive,
pipelining and shutdown go on working.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

Headers = Iterable[tuple[bytes, bytes]]


class Wire:
    """The response to one request. Names and values of headers are trusted to hold no line ends."""

    __slots__ = ("_chunked", "_cycle", "_head")

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._head = b""  # of a response in parts, until its first part
        self._chunked = False

    @property
    def body_is_coming(self) -> bool:
        """Whether a part of the request's body is still to come."""
        return bool(self._cycle.more_body)

    def whole_body(self) -> bytes | None:
        """The request's body if it is here to its end and the client, too; else None.

        Most bodies are: to have them so saves two awaits and an event of ``receive``.
        """
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.flow.resume_reading()  # else its leaving would not be seen
        cycle.message_event.clear()  # as ``receive`` would: the next message is the disconnect
        return body

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole response."""
        if self._begin():
            head = self._head_lines(status, headers)
            head.append(b"\r\n")
            if self._cycle.scope["method"] != "HEAD":
                head.append(body)
            self._cycle.transport.write(b"".join(head))
            self._complete()

    def start(self, status: int, headers: Headers) -> None:
        """The head of a response in parts; it leaves with the first of them."""
        if self._begin():
            head = self._head_lines(status, headers)
            has_length = any(name == b"content-length" for name, _ in headers)
            # To a client of HTTP/1.0 the end of the connection is the end of the body.
            self._chunked = not has_length and self._cycle.scope["http_version"] != "1.0"
            if self._chunked:
                head.append(b"transfer-encoding: chunked\r\n")
            head.append(b"\r\n")
            self._head = b"".join(head)

    async def write(self, data: bytes) -> None:
        """A part of the body; waits while the client does not take what it has."""
        while not self.write_now(data):
            await self._cycle.flow.drain()

    def write_now(self, data: bytes) -> bool:
        """A part of the body. False: nothing was written, as the client does not take what it
        has."""
        cycle = self._cycle
        if cycle.disconnected:
            return True
        if cycle.flow.write_paused:
            return False
        head = self._head
        if head:
            self._head = b""
        cycle.transport.write(
            b"%b%x\r\n%b\r\n" % (head, len(data), data) if self._chunked else head + data
        )
        return True

    def end(self, last: bytes = b"") -> None:
        """The end of a response in parts, behind a last part."""
        if self._cycle.disconnected:
            return
        head, self._head = self._head, b""
        if not self._chunked:
            self._cycle.transport.write(head + last)
        elif last:
            self._cycle.transport.write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(last), last))
        else:
            self._cycle.transport.write(head + b"0\r\n\r\n")
        self._complete()

    def _begin(self) -> bool:
        cycle = self._cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        return not cycle.disconnected

    def _head_lines(self, status: int, headers: Headers) -> list[bytes]:
        head = [STATUS_LINE[status]]
        for name, value in headers:
            if name == b"connection":
                self._cycle.keep_alive = False  # it is only ever sent to close
            else:
                head += (name, b": ", value, b"\r\n")
        if not self._cycle.keep_alive:
            head.append(b"connection: close\r\n")
        return head

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
