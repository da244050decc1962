"""One HTTP/1.1 connection to an LLM server: a protocol with one exchange at a time.

Time limits cost no timer per request or per chunk. Arriving bytes only move a stamp; one timer
per connection wakes up now and then, compares, and sleeps again for what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import NamedTuple, cast

from backends.filepart import FilePart
from backends.incoming import Incoming
from backends.outbox import Outbox
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
HIGH_WATER_BYTES = 64 * 1024  # body bytes held for a slow reader before reading pauses
# A server that closes a kept-alive connection just as we use it shows that within moments. A
# later loss may be the request's own doing (a crash), so it is not silently tried again.
STALE_SECONDS = 5.0
# Once more around the loop before a limit counts as passed: after a pause of this process the
# timers run before the sockets, and the bytes that were due may be waiting there.
GRACE_SECONDS = 0.005


class Outgoing(NamedTuple):
    """A request, ready to be written, and its time limits in seconds."""

    head: bytes
    body: Sequence[bytes | FilePart]
    body_bytes: int
    expects_body: bool  # False for HEAD
    first_byte_timeout: float
    chunk_timeout: float


class Connection(asyncio.Protocol):
    """A connection of the pool: `start` an exchange, and hear of its end through the response."""

    __slots__ = (
        "_begun",
        "_chunk_timeout",
        "_head_seen",
        "_incoming",
        "_inode",
        "_limit",
        "_loop",
        "_on_idle",
        "_on_lost",
        "_outbox",
        "_outgoing",
        "_overdue",
        "_poll",
        "_reading_paused",
        "_received",
        "_response",
        "_stamp",
        "_timer",
        "_timer_at",
        "_transport",
        "_unsent",
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
        outbox: Outbox,
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
        self._outbox = outbox
        self._transport: asyncio.Transport | None = None
        self._poll: select.poll | None = None
        self._inode = 0
        self._response: Response | None = None
        self._incoming: Incoming | None = Incoming()  # until it is closed
        self._outgoing: Iterator[memoryview] | None = None
        self._unsent = b""  # of a request, until the outbox has it sent
        self._uses = 0
        self._received = False  # any byte in this exchange
        self._head_seen = False  # its head, without any byte of the body yet
        self._begun = False  # any byte of its body
        self._reading_paused = False
        self._writing_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._overdue = False
        self._stamp = 0.0  # silence is counted from here, up to `_limit`
        self._limit = idle_seconds
        self._chunk_timeout = idle_seconds

    # The exchange, as the pool sees it.

    def start(self, request: Outgoing) -> Response:
        """Send a request; the connection must be fresh or idle."""
        response = Response(self._loop, self)
        transport, incoming = self._transport, self._incoming
        if incoming is None or transport is None or transport.is_closing():
            response.fail(EndedEarly("the server closed the connection at once"))
            return response
        self._uses += 1
        self._received = self._head_seen = self._begun = self._overdue = False
        self._response = response
        incoming.begin(response, expects_body=request.expects_body)
        self._limit = request.first_byte_timeout
        self._chunk_timeout = request.chunk_timeout
        is_small = request.body_bytes <= SMALL_BODY_BYTES
        # What lies in a file is never so small.
        self._unsent = b"".join((request.head, *request.body)) if is_small else request.head  # type: ignore[arg-type]
        self._outbox.add(self)
        # Some servers answer at the door: what they say then is no answer to who has not asked yet.
        if self._uses == 1 or not is_small:
            self._outbox.flush()
        if not is_small:
            self._outgoing = _slices(request.body)
            self._pump()
        self._stamp = now = monotonic()
        self._watch(now, min(request.first_byte_timeout, request.chunk_timeout))
        return response

    def send_unsent(self) -> None:
        """Send what the outbox was given of a request."""
        unsent, self._unsent = self._unsent, b""
        if unsent and self._transport is not None:
            self._transport.write(unsent)

    def is_usable(self) -> bool:
        """Tell whether an idle connection is still open and has sent nothing unasked.

        The socket itself is asked, as the loop may not have come round to reading it yet.
        """
        return (
            self._poll is not None
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
        self._inode = os.fstat(sock.fileno()).st_ino
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN | select.POLLRDHUP)

    def data_received(self, data: bytes) -> None:
        response, incoming = self._response, self._incoming
        if response is None or incoming is None or self._unsent:
            self._fail(self._loss(None))  # what nobody has asked for must not answer a request
            return
        if incoming.between_chunks and response.take is not None:
            body = incoming.whole_chunks(data)
            if body is not None:
                self._stamp = monotonic()
                response.arrived_whole(body)
                return
        self._received = True
        before = response.buffered
        problem = incoming.feed(data)
        if problem:
            self._fail(InvalidResponse(problem))
        elif incoming.complete:
            self._end_exchange(response, incoming)
        elif response.buffered > before:
            self._stamp = monotonic()
            if not self._begun:
                self._begun = True
                self._limit = self._chunk_timeout
            response.arrived()
            if response.buffered > HIGH_WATER_BYTES:
                self._pause_reading()
        elif response.status and not self._head_seen:
            self._head_seen = True
            # Some servers send the head before they begin to think, so the first byte of the body
            # is what the first limit is about; but it has the time between chunks in any case.
            self._limit = max(self._limit, monotonic() - self._stamp + self._chunk_timeout)

    def eof_received(self) -> None:
        response, incoming = self._response, self._incoming
        if response is not None and incoming is not None and incoming.ends_with_connection():
            incoming.keep_alive = False
            self._end_exchange(response, incoming)
        else:
            self._fail(self._loss(None))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and self._response is not None:
            self._salvage()
        self._fail(self._loss(exc))
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        if not self._received:
            self._stamp = monotonic()  # the first byte is waited for from the last one sent
        self._pump()

    # Inside

    def _end_exchange(self, response: Response, incoming: Incoming) -> None:
        self._response = None
        response.finish()
        if not incoming.keep_alive or self._is_still_sending():
            self._close()
            return
        if self._reading_paused:
            self.resume_reading()
        self._stamp = now = monotonic()
        self._limit = min(self.idle_seconds, incoming.idle_seconds)
        self._watch(now, self._limit)
        self._on_idle(self)

    def _is_still_sending(self) -> bool:
        transport = self._transport
        return (
            self._outgoing is not None or transport is None or transport.get_write_buffer_size() > 0
        )

    def _fail(self, error: UpstreamError) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.fail(error)
        self._close()

    def _close(self) -> None:
        """Drop the connection without waiting for what is unsent."""
        self.closed = True
        self._unsent = b""
        self._outgoing = None
        self._poll = None
        if self._incoming is not None:
            self._incoming.release()
            self._incoming = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def _loss(self, exc: Exception | None) -> UpstreamError:
        text = f"the server closed the connection ({exc})" if exc else "the server closed early"
        at_once = monotonic() - self._stamp < STALE_SECONDS
        if self._uses > 1 and not self._received and at_once:
            return StaleConnection(text)
        return EndedEarly(text)

    def _salvage(self) -> None:
        """Read what the lost socket still holds.

        A server that refuses a large body answers and closes while we write. Writing then fails,
        often before the loop has read the answer, which is worth more than the failure.
        """
        transport = self._transport
        if transport is None or transport.get_extra_info("sslcontext") is not None:
            return
        sock: socket.socket | None = transport.get_extra_info("socket")
        descriptor = -1 if sock is None else sock.fileno()
        with contextlib.suppress(OSError):
            if descriptor >= 0 and os.fstat(descriptor).st_ino == self._inode:  # still this socket
                data = os.read(descriptor, 1 << 18)
                if data:
                    self.data_received(data)

    def _pause_reading(self) -> None:
        transport = self._transport
        if not self._reading_paused and transport is not None and not transport.is_closing():
            self._reading_paused = True
            transport.pause_reading()

    def _pump(self) -> None:
        transport = self._transport
        while self._outgoing is not None and transport is not None and not self._writing_paused:
            try:
                piece = None if transport.is_closing() else next(self._outgoing, None)
            except OSError as error:
                self._fail(EndedEarly(f"the request's body cannot be read ({error})"))
                return
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
            # The first byte may come any moment, and the shorter limit begin with it.
            self._watch(now, max(min(left, self._chunk_timeout), 0.001))
        elif not self._overdue:
            self._overdue = True
            self._watch(now, GRACE_SECONDS)
        else:
            self._fail(self._overdue_error())

    def _overdue_error(self) -> UpstreamError:
        if self._begun:
            return Stalled(f"no byte for {self._limit:g} s")
        return FirstByteTimeout(f"no first byte within {self._limit:g} s")


def _slices(parts: Sequence[bytes | FilePart]) -> Iterator[memoryview]:
    for part in parts:
        if isinstance(part, FilePart):
            yield from part.pieces(SLICE_BYTES)
            continue
        view = memoryview(part)
        for start in range(0, len(view), SLICE_BYTES):
            yield view[start : start + SLICE_BYTES]
