"""One HTTP/1.1 connection to an LLM server: a protocol with one exchange at a time.

Time limits cost no timer per request or per chunk. Arriving bytes only move a stamp; one timer
per connection wakes up now and then, compares, and sleeps again for what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from time import monotonic
from typing import Any, NamedTuple, cast

import httptools

from backends.response import (
    EndedEarly,
    FirstByteTimeout,
    InvalidResponse,
    Response,
    StaleConnection,
    Stalled,
    UpstreamError,
)

# Head and body up to this size leave in one write; a larger body is never copied as a whole.
SMALL_BODY_BYTES = 64 * 1024
SLICE_BYTES = 256 * 1024
# A server that closes a kept-alive connection just as we use it shows that within moments. A
# later loss may be the request's own doing (a crash), so it is not silently tried again.
STALE_SECONDS = 5.0
_CONNECTION_HEADERS = frozenset({b"content-length", b"transfer-encoding", b"keep-alive"})
# Once more around the loop before a limit counts as passed: after a pause of this process the
# timers run before the sockets, and the bytes that were due may be waiting there.
GRACE_SECONDS = 0.005


class Outgoing(NamedTuple):
    """A request, ready to be written, and its time limits in seconds."""

    head: bytes
    body: Sequence[bytes]
    body_bytes: int
    expects_body: bool  # False for HEAD
    first_byte_timeout: float
    chunk_timeout: float


class Connection(asyncio.Protocol):
    """A connection of the pool: `start` an exchange, and hear of its end through the response."""

    HIGH_WATER_BYTES = 64 * 1024  # body bytes held for a slow reader before reading pauses
    MAX_HEAD_BYTES = 64 * 1024  # also: bytes in a row that carry no body
    MAX_HEADERS = 256
    MAX_INTERIM_RESPONSES = 16

    __slots__ = (
        "_chunk_timeout",
        "_complete",
        "_content_length",
        "_expects_body",
        "_first_byte_timeout",
        "_head_done",
        "_headers",
        "_idle_limit",
        "_interim",
        "_keep_alive",
        "_limit",
        "_loop",
        "_on_idle",
        "_on_lost",
        "_outgoing",
        "_overdue",
        "_overhead",
        "_parser",
        "_poll",
        "_problem",
        "_reading_paused",
        "_received",
        "_response",
        "_stamp",
        "_timer",
        "_timer_at",
        "_transfer_encoding",
        "_transport",
        "_uses",
        "_writing_paused",
        "closed",
        "idle_seconds",
        "key",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        key: str,
        idle_seconds: float,
        on_idle: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self.key = key
        self.idle_seconds = idle_seconds
        self.closed = False
        self._loop = loop
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._poll: select.poll | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._outgoing: Iterator[memoryview] | None = None
        self._uses = 0
        self._reading_paused = False
        self._writing_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._overdue = False
        self._stamp = 0.0
        self._limit = idle_seconds
        self._idle_limit = idle_seconds
        self._problem = ""
        self._reset_exchange()

    def _reset_exchange(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_done = False
        self._complete = False
        self._keep_alive = False
        self._received = False
        self._overhead = 0
        self._interim = 0
        self._transfer_encoding = b""
        self._content_length = b""
        self._idle_limit = self.idle_seconds

    # The exchange, as the pool sees it.

    def start(self, request: Outgoing) -> Response:
        """Send a request; the connection must be fresh or idle."""
        response = Response(self._loop, self)
        transport = self._transport
        if self.closed or transport is None or transport.is_closing():
            response.fail(EndedEarly("the server closed the connection at once"))
            return response
        if self._uses:
            self._reset_exchange()
        self._uses += 1
        self._expects_body = request.expects_body
        self._first_byte_timeout = self._limit = request.first_byte_timeout
        self._chunk_timeout = request.chunk_timeout
        self._response = response
        if request.body_bytes <= SMALL_BODY_BYTES:
            transport.write(b"".join((request.head, *request.body)))
        else:
            transport.write(request.head)
            self._outgoing = _slices(request.body)
            self._pump()
        self._stamp = now = monotonic()
        self._watch(now, min(request.first_byte_timeout, request.chunk_timeout))
        return response

    def is_usable(self) -> bool:
        """Tell whether an idle connection is still open and has sent nothing unasked.

        The socket itself is asked, as the loop may not have come round to reading it yet.
        """
        return (
            not self.closed
            and self._poll is not None
            and monotonic() - self._stamp < self._limit
            and not self._poll.poll(0)
        )

    def abort(self) -> None:
        """Close at once, in any state; a response still under way fails."""
        self._fail(EndedEarly("the exchange was aborted on this side"))

    def resume_reading(self) -> None:
        """Go on reading after the response's buffer was emptied."""
        if self._reading_paused:
            self._reading_paused = False
            self._stamp = monotonic()  # the silence so far was ours
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        if self.closed:
            self._close()
            return
        sock: socket.socket = transport.get_extra_info("socket")
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN | select.POLLRDHUP)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            self.abort()  # bytes that nobody asked for: they must not answer the next request
            return
        self._received = True
        if self._head_done:
            self._stamp = monotonic()
        before = response.buffered
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._complete:  # surplus bytes
                self._keep_alive = False
                self._end_exchange(response)
            else:
                self._fail(InvalidResponse(self._problem or str(error)))
            return
        if self._complete:
            self._end_exchange(response)
        elif response.buffered > before:
            self._overhead = 0
            response.wake()
            if response.buffered > self.HIGH_WATER_BYTES:
                self._pause_reading()
        else:
            self._count_overhead(len(data))

    def eof_received(self) -> None:
        response = self._response
        if response is None:
            self._close()
        elif self._head_done and not self._transfer_encoding and not self._content_length:
            self._keep_alive = False
            self._end_exchange(response)  # no length, no chunks: the connection's end is the end
        else:
            self._fail(self._loss(None))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._outgoing is not None and self._response is not None:
            self._salvage()
        self._fail(self._loss(exc))
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        if not self._head_done:
            self._stamp = monotonic()  # the first byte is waited for from the last one sent
        self._pump()

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        if self._complete:
            self._problem = "bytes after the end of the response"
            raise InvalidResponse(self._problem)
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # a trailer
        name = name.lower()
        self._headers.append((name, value.rstrip()))
        if name in _CONNECTION_HEADERS:
            self._note(name, value)

    def on_headers_complete(self) -> None:
        parser = self._parser
        status = parser.get_status_code()
        version = parser.get_http_version()
        headers = self._headers
        if version not in ("1.1", "1.0") or not 100 <= status <= 599 or status == 101:
            self._reject(f"HTTP/{version} status {status}")
        size = sum(map(len, chain.from_iterable(headers)))
        if len(headers) > self.MAX_HEADERS or size > self.MAX_HEAD_BYTES:
            self._reject("the response head is too large")
        if status < 200:
            self._skip_interim()
            return
        self._keep_alive = version == "1.1" and parser.should_keep_alive()
        self._head_done = True
        response = self._response
        if response is None:
            return
        response.headers = headers
        response.status = status
        self._stamp = monotonic()
        self._limit = self._chunk_timeout
        response.wake()
        if not self._expects_body:
            self._complete = True

    def on_body(self, body: bytes) -> None:
        if self._response is not None and self._expects_body:
            self._response.feed(body)

    def on_message_complete(self) -> None:
        if self._head_done:
            self._complete = True

    # Inside

    def _note(self, name: bytes, value: bytes) -> None:
        """Take in a header that concerns the connection."""
        if name == b"content-length":
            self._content_length = value
        elif name == b"keep-alive":
            self._idle_limit = min(self.idle_seconds, _announced_idle_seconds(value))
        elif self._transfer_encoding or value.strip().lower() != b"chunked":
            self._reject("a transfer coding other than chunked")
        else:
            self._transfer_encoding = value

    def _skip_interim(self) -> None:
        self._interim += 1
        if self._interim > self.MAX_INTERIM_RESPONSES:
            self._reject("too many interim responses")
        self._transfer_encoding = b""
        self._content_length = b""

    def _reject(self, problem: str) -> None:
        self._problem = problem
        raise InvalidResponse(problem)

    def _count_overhead(self, size: int) -> None:
        self._overhead += size
        if self._overhead > self.MAX_HEAD_BYTES:
            self._fail(InvalidResponse("too many bytes without any content"))

    def _end_exchange(self, response: Response) -> None:
        self._response = None
        reusable = self._keep_alive and self._outgoing is None and self._expects_body
        response.finish()
        if not reusable or self.closed:
            self._close()
            return
        self.resume_reading()
        self._stamp = now = monotonic()
        self._limit = self._idle_limit
        self._watch(now, self._limit)
        self._on_idle(self)

    def _fail(self, error: UpstreamError) -> None:
        response = self._response
        self._response = None
        if response is not None:
            response.fail(error)
        self._close()

    def _close(self) -> None:
        """Drop the connection without waiting for what is unsent."""
        self.closed = True
        self._outgoing = None
        self._poll = None
        self._parser = None  # it refers back to this object, as does the transport
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def _loss(self, exc: Exception | None) -> UpstreamError:
        text = f"the server closed the connection ({exc})" if exc else "the server closed early"
        fresh_loss = monotonic() - self._stamp < STALE_SECONDS
        if self._uses > 1 and not self._received and fresh_loss:
            return StaleConnection(text)
        return EndedEarly(text)

    def _salvage(self) -> None:
        """Read what the lost socket still holds.

        A server that refuses a large body answers and closes while we write. Writing then fails,
        often before the loop has read the answer, which is worth more than the failure.
        """
        transport = self._transport
        if transport is not None and transport.get_extra_info("sslcontext") is None:
            with contextlib.suppress(OSError):
                data = os.read(transport.get_extra_info("socket").fileno(), 1 << 18)
                if data:
                    self.data_received(data)

    def _pause_reading(self) -> None:
        transport = self._transport
        if not self._reading_paused and transport is not None and not transport.is_closing():
            self._reading_paused = True
            transport.pause_reading()

    def _pump(self) -> None:
        transport = self._transport
        if transport is None:
            return
        while self._outgoing is not None and not self._writing_paused:
            if transport.is_closing():
                return
            piece = next(self._outgoing, None)
            if piece is None:
                self._outgoing = None
            else:
                transport.write(piece)

    def _watch(self, now: float, delay: float) -> None:
        """Have the limits checked in at most `delay` seconds."""
        at = now + delay
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_later(delay, self._check)
        self._timer_at = at

    def _check(self) -> None:
        self._timer = None
        now = monotonic()
        if self._reading_paused:
            self._watch(now, self._limit)
            return
        left = self._stamp + self._limit - now
        if left > 0:
            self._overdue = False
            if self._response is not None and not self._head_done:
                left = min(left, self._chunk_timeout)  # the head may come any moment
            self._watch(now, max(left, 0.001))
        elif not self._overdue:
            self._overdue = True
            self._watch(now, GRACE_SECONDS)
        elif self._response is None:
            self._close()
        elif self._head_done:
            self._fail(Stalled(f"no byte for {self._limit:g} s"))
        else:
            self._fail(FirstByteTimeout(f"no response head within {self._limit:g} s"))


def _slices(parts: Sequence[bytes]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), SLICE_BYTES):
            yield view[start : start + SLICE_BYTES]


def _announced_idle_seconds(keep_alive: bytes) -> float:
    """Read how long the server says it keeps an idle connection, less a margin for the way."""
    found = re.search(rb"timeout=(\d{1,6})", keep_alive)
    if found is None:
        return math.inf
    seconds = int(found[1])
    return seconds - 1.0 if seconds > 1 else seconds / 2
