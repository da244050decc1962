"""An answer of an LLM server, as it arrives, and everything that can go wrong with it.

UpstreamError            `reason` is the code that records and metrics use
├── ConnectFailed        upstream_connect_failed   no connection (TCP, TLS or name) in time
├── FirstByteTimeout     upstream_timeout          connected, but no first byte in time
├── Stalled              upstream_stalled          too long a silence inside the body
├── EndedEarly           upstream_ended_early      closed or reset before the end of the response
│   └── StaleConnection                            the same on a kept-alive connection, at once
└── InvalidResponse      upstream_invalid          not HTTP, contradictory framing, out of bounds

Texts of these errors are for records and logs: they may name the server's address.
"""

# ruff: noqa: N818  (the names say what happened, as httpx's do)

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar, Protocol, Self


class UpstreamError(Exception):
    """A request to an LLM server that got no complete, well-formed answer."""

    reason: ClassVar[str] = "upstream_error"


class ConnectFailed(UpstreamError):
    """No connection within the limit. Nothing was sent, so any other backend may be tried.

    `local` says that this machine lacked something (file descriptors, ports, memory): the
    backend is not to blame then.
    """

    reason = "upstream_connect_failed"

    def __init__(self, text: str, *, local: bool = False) -> None:
        super().__init__(text)
        self.local = local


class FirstByteTimeout(UpstreamError):
    """The request was sent, but no response head, or no first byte of its body, came in time."""

    reason = "upstream_timeout"


class Stalled(UpstreamError):
    """The body began, then the server was silent for too long."""

    reason = "upstream_stalled"


class EndedEarly(UpstreamError):
    """The connection ended before the response did."""

    reason = "upstream_ended_early"


class StaleConnection(EndedEarly):
    """A kept-alive connection that the server was closing when the request arrived."""


class InvalidResponse(UpstreamError):
    """The bytes are not a usable HTTP/1.1 response."""

    reason = "upstream_invalid"


class Source(Protocol):
    """What a response needs of the connection that it arrives on."""

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...


class Response:
    """One response: the head is there, the body arrives while it is read.

    Whoever holds one must end it, by reading to the end or by `close()`; as a context manager it
    closes itself. `headers` are (lower-case name, value) pairs in the order received; `complete`
    tells that the whole body has come from the server, though perhaps not been read yet.
    """

    __slots__ = (
        "_error",
        "_loop",
        "_source",
        "_waiter",
        "buffered",
        "chunks",
        "complete",
        "headers",
        "status",
        "take",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, source: Source) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False
        self.chunks: list[bytes] = []  # of the body, not read yet; filled by the connection
        self.buffered = 0  # bytes in them
        self._error: UpstreamError | None = None
        self._loop = loop
        self._source: Source | None = source  # None once the connection has no part in it
        #: Of a reader that waits to be given the body as it comes, when nothing is buffered.
        self.take: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[bool] | None = None

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header; `name` in lower case."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def whole(self, limit: int) -> bytes | None:
        """Return the body if all of it is here, nothing read yet, and at most `limit` bytes."""
        if not self.complete or not self.chunks or self.buffered > limit:
            return None
        return self._emptied()

    async def read(self) -> bytes:
        """Return all body bytes that came since the last read, at least one; b"" at the end.

        What came before a fault is returned first.

        Raises: FirstByteTimeout (before any byte of the body), Stalled, InvalidResponse,
        EndedEarly (also after `abort`).
        """
        chunks = self.chunks
        while not chunks:
            if self._error is not None:
                raise _again(self._error)
            if self.complete:
                return b""
            await self._news()
        body = self._emptied()
        if self._source is not None:
            self._source.resume_reading()
        return body

    async def pour(self, take: Callable[[bytes], bool]) -> bool:
        """Give the body to `take` as it comes, in the very moment that it does, until `take`
        returns False; then it can be poured further. True: the body has ended.

        For each read of the socket this saves the waking of the reader's task, its way down to
        where it waits, and a future: about a quarter of what a relayed event costs.

        Raises: as `read`, and whatever `take` raises.
        """
        while True:
            if self.chunks:
                if not take(await self.read()):
                    return False
            elif self._error is not None:
                raise _again(self._error)
            elif self.complete:
                return True
            else:
                self.take = take
                try:
                    if await self._news() is False:
                        return False
                finally:
                    self.take = None

    async def read_all(self, limit: int) -> bytes:
        """Return the rest of the body, if it has at most `limit` bytes.

        Raises: as `read`, and InvalidResponse for a longer body, whose connection is closed.
        """
        parts: list[bytes] = []
        size = 0
        while part := await self.read():
            size += len(part)
            if size > limit:
                self.abort()
                raise InvalidResponse(f"the body is longer than {limit} bytes")
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def abort(self) -> None:
        """Close the connection at once, unless the response is complete. A waiting read raises."""
        if self._source is not None:
            self._source.abort()

    def close(self) -> None:
        """End the response in whatever state it is; bytes not read yet are dropped."""
        if self._source is not None:
            self._source.abort()
        if self.chunks:
            self.chunks.clear()
            self.buffered = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What follows is called by the connection only.

    async def wait_for_head(self) -> None:
        """Wait until the status and the headers are known."""
        while not self.status:
            if self._error is not None:
                raise _again(self._error)
            await self._news()

    def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Take the head."""
        self.headers = headers
        self.status = status
        self.wake()

    def finish(self) -> None:
        """Mark the body as complete: the connection may serve another request from now on."""
        self.complete = True
        self._source = None
        self.wake()

    def fail(self, error: UpstreamError) -> None:
        """End the response by a fault."""
        self._error = error
        self._source = None
        self.wake()

    def arrived(self) -> None:
        """Some of the body has come: hand it over, or let a waiting reader look."""
        if self.take is None:
            self.wake()
        else:
            self.arrived_whole(self._emptied())

    def arrived_whole(self, body: bytes) -> None:
        """The same for what is not buffered; only while there is one to take it."""
        take, waiter = self.take, self._waiter
        if take is None or waiter is None or waiter.done():
            self.chunks.append(body)  # the reader is about to go on, for another reason
            self.buffered += len(body)
            return
        try:
            if take(body):
                return
            self.take = None  # what comes before the reader runs again waits for it
            waiter.set_result(False)
        except Exception as error:
            # It is the reader's; the connection that calls here could do nothing about it.
            self.take = None
            waiter.set_exception(error)

    def wake(self) -> None:
        """Let a waiting reader look again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(True)

    def _emptied(self) -> bytes:
        chunks = self.chunks
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self.buffered = 0
        return body

    def _news(self) -> asyncio.Future[bool]:
        if self._waiter is not None and not self._waiter.done():
            raise RuntimeError("two tasks read the same response")
        self._waiter = self._loop.create_future()
        return self._waiter


def _again(error: UpstreamError) -> UpstreamError:
    # A new one each time: a raised error holds frames, and those hold the response.
    return type(error)(*error.args)
