"""One request on a connection of our own protocol, and the response straight onto it.

A response, or a part of one, is one write: each write is a system call of its own. While many
events come, those of a stream in one turn of the event loop are one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from backends.outbox import Outbox
from backends.pace import SAMPLE_EVENTS
from mindrouter.gateway.heads import Head

if TYPE_CHECKING:
    from mindrouter.gateway.protocol import GatewayProtocol

#: Body bytes held for a slow reader before reading pauses.
HIGH_WATER_BYTES = 1 << 16
#: A part larger than this is worth a write of its own, and counts as no event.
LARGE_PART_BYTES = 4096
Headers = Iterable[tuple[bytes, bytes]]
_line = b": ".join
_lines = b"\r\n".join


class Wire:
    """Names and values of headers are trusted to hold no line ends.

    It stands where uvicorn's protocol has its request-response cycle, and has those of its
    attributes that the protocol looks at.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_flow",
        "_head",
        "_news",
        "_outbox",
        "_reader",
        "_takes_chunks",
        "_transport",
        "_unread",
        "_unsent",
        "disconnected",
        "head",
        "keep_alive",
        "more_body",
        "on_client_left",
        "parts",
        "response_complete",
        "response_started",
        "task",
        "waiting_for_100_continue",
    )

    def __init__(
        self,
        connection: GatewayProtocol,
        head: Head,
        *,
        keep_alive: bool,
        takes_chunks: bool,
        body: bytes | None = None,
    ) -> None:
        """``body``: all of it, where it is here already."""
        self.head = head
        self.keep_alive = keep_alive
        self.task: asyncio.Task[None] | None = None  # that serves it
        self.parts: list[bytes] = [] if body is None else [body]  # of the body, not read yet
        self._unread = 0  # bytes in them
        self.more_body = body is None
        self.disconnected = False
        self.response_started = False
        self.response_complete = False
        self.waiting_for_100_continue = False
        self.on_client_left: Callable[[], None] | None = None
        self._connection = connection
        self._flow = connection.flow
        self._transport = connection.transport
        self._outbox: Outbox | None = None  # that will have a response sent
        self._unsent = b""  # what it will have sent
        self._head = b""  # of a response in parts, until its first part
        self._takes_chunks = takes_chunks  # a client of HTTP/1.0 does not
        self._chunked = False
        self._news = body is not None  # something has come that ``receive`` has not told of
        self._reader: asyncio.Future[None] | None = None

    # ---- what uvicorn's protocol calls

    @property
    def message_event(self) -> Wire:
        """What it sets when something has come."""
        return self

    def set(self) -> None:
        """Let the reader look."""
        self._news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def client_left(self) -> None:
        """The connection is lost."""
        if not self.response_complete:
            self.disconnected = True
            self.set()
        if self.on_client_left is not None:
            self.on_client_left()

    # ---- the request

    @property
    def peer(self) -> str:
        """The address at the other end; empty where there is none."""
        client = self._connection.client
        return client[0] if client else ""

    @property
    def may_be_remembered(self) -> bool:
        """Whether another request with the same head may be treated as this one was."""
        return self.keep_alive and b"expect" not in self.head.headers

    def take(self, part: bytes) -> None:
        """A part of the body has come."""
        self.parts.append(part)
        self._unread += len(part)
        if self._unread > HIGH_WATER_BYTES:
            self._flow.pause_reading()
        self._news = True
        if self._reader is not None:
            self.set()

    def whole_body(self) -> bytes | None:
        """The body if it is here to its end and the client, too; else None."""
        if self.more_body or self.disconnected:
            return None
        self._news = False  # the next news is the leaving
        if self._flow.read_paused:
            self._flow.resume_reading()  # else it would not be seen
        return self._taken()

    def _taken(self) -> bytes:
        parts, self.parts = self.parts, []
        self._unread = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def receive(self) -> dict[str, Any]:
        """The next part of the body, or the news that the client has left, as in ASGI."""
        if self.waiting_for_100_continue and not self._transport.is_closing():
            self.waiting_for_100_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.disconnected and not self.response_complete:
            self._flow.resume_reading()
            if not self._news:
                self._reader = self._connection.loop.create_future()
                await self._reader
            self._news = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._taken(), "more_body": self.more_body}

    # ---- the response

    def respond(
        self, status: int, headers: Headers, body: bytes, outbox: Outbox | None = None
    ) -> None:
        """A whole response, sent at once or by ``outbox``."""
        if self._begin():
            head = [STATUS_LINE[status][:-2], *map(_line, headers)]
            if not self.keep_alive:
                head.append(b"connection: close")
            head += (b"", b"" if self.head.method == "HEAD" else body)
            if outbox is None:
                self._transport.write(_lines(head))
            else:
                self._unsent, self._outbox = _lines(head), outbox
                outbox.add(self)
            self._complete()

    def send_unsent(self) -> None:
        """Send what the outbox was given."""
        unsent, self._unsent = self._unsent, b""
        if unsent and not self._transport.is_closing():
            self._transport.write(unsent)

    def hurry(self) -> None:
        """Send what the outbox was given before the connection ends."""
        if self._unsent and self._outbox is not None:
            self._outbox.flush()

    def start(self, status: int, headers: Headers, outbox: Outbox | None = None) -> None:
        """The head of a response in parts; it leaves with the first of them. ``outbox`` may
        gather them."""
        if self._begin():
            self._outbox = outbox
            head = [STATUS_LINE[status][:-2], *map(_line, headers)]
            # Without them the end of the connection is the end of the body.
            has_length = any(name == b"content-length" for name, _ in headers)
            self._chunked = self._takes_chunks and not has_length
            if self._chunked:
                head.append(b"transfer-encoding: chunked")
            if not self.keep_alive:
                head.append(b"connection: close")
            self._head = _lines((*head, b"", b""))

    async def write(self, data: bytes) -> None:
        """A part of the body; waits while the client does not take what it has."""
        while not self.write_now(data):
            await self._flow.drain()

    def write_now(self, data: bytes) -> bool:
        """A part of the body. False: nothing was written, as the client does not take what it
        has."""
        if self.disconnected:
            return True
        if self._flow.write_paused:
            return False
        head = self._head
        if head:
            self._head = b""
        part = b"%b%x\r\n%b\r\n" % (head, len(data), data) if self._chunked else head + data
        outbox = self._outbox
        if outbox is not None and len(part) <= LARGE_PART_BYTES:
            pace = outbox.pace
            pace.events += 1
            if pace.is_batching or (pace.events >= SAMPLE_EVENTS and pace.begins()):
                if self._unsent:
                    self._unsent += part
                else:
                    self._unsent = part
                    outbox.gather(self)
                return True
        if self._unsent:
            self.send_unsent()
        self._transport.write(part)
        return True

    def end(self, last: bytes = b"") -> None:
        """The end of a response in parts, behind a last part."""
        if self.disconnected:
            return
        head, self._head = self._unsent + self._head, b""
        self._unsent = b""
        if not self._chunked:
            self._transport.write(head + last)
        elif last:
            self._transport.write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(last), last))
        else:
            self._transport.write(head + b"0\r\n\r\n")
        self._complete()

    def abort(self) -> None:
        """Break the connection off at once."""
        self.disconnected = True
        self.send_unsent()
        self._transport.abort()

    def finish(self) -> None:
        """Whoever served the request has done with it."""
        if not self.response_complete and not self.disconnected:
            self.send_unsent()
            self._transport.close()  # what there is of an answer shall not be taken for a whole one

    def _begin(self) -> bool:
        self.response_started = True
        self.waiting_for_100_continue = False
        return not self.disconnected

    def _complete(self) -> None:
        self.response_complete = True
        if self._reader is not None:
            self.set()
        if not self.keep_alive:
            self.hurry()
            self._transport.close()
        self._connection.on_response_complete()
