"""The client's side of one HTTP request: over ASGI, or straight on a connection of our own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from backends.outbox import Outbox
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.heads import Head
from mindrouter.gateway.wire import Wire

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

#: A client that takes nothing for so many seconds while we have something for it is given up:
#: it would hold its slot for ever.
STALLED_AFTER = 120.0
#: How long the next part of a request's body may take.
BODY_SECONDS = 60.0
#: How much of an unwanted body is thrown away after the answer, and for how long.
LINGER_BYTES = 128 * 1024 * 1024
LINGER_SECONDS = 2.0


class ClientLeftError(Exception):
    """The client closed its connection, or stopped reading."""


class Asgi(NamedTuple):
    """The connection as any other server gives it."""

    receive: Receive
    send: Send
    peer: str  # the address at the other end


class Client:
    """Reads the request, writes the response, and notices when the client goes.

    A disconnect is noticed in every phase: while the body is read, by ``receive`` itself; after
    ``watch``, by our own protocol, or behind any other server by a task, which cancels the one
    that serves the request. ``left`` tells such a cancellation from any other.
    """

    __slots__ = (
        "_asgi",
        "_stall_timer",
        "_watcher",
        "_wire",
        "_writing_since",
        "common_headers",
        "ended",
        "head",
        "header",
        "headers",
        "left",
        "outbox",
        "started",
        "task",
        "unread",
    )

    def __init__(self, head: Head, connection: Wire | Asgi) -> None:
        self.head = head
        self.headers = head.headers
        #: A request header's value, stripped; names are lower-case.
        self.header = head.header
        self.common_headers: Headers = []  # of every response
        self.outbox: Outbox | None = None  # that sends responses
        self.started = False
        self.ended = False
        self.left = False
        self.unread = False  # the body is not read to its end
        self._watcher: asyncio.Task[None] | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._writing_since: float | None = None
        if isinstance(connection, Wire):
            self._wire: Wire | None = connection
            self.task = connection.task
        else:
            self._wire, self._asgi = None, connection
            self.task = asyncio.current_task()

    @property
    def peer(self) -> str:
        """The address at the other end; empty where there is none."""
        return self._asgi.peer if self._wire is None else self._wire.peer

    # ---- reading

    @property
    def body_is_coming(self) -> bool:
        """Whether a part of the request's body is still to come, as far as the server tells."""
        return self._wire is not None and self._wire.more_body

    async def read_body(self, limit: int) -> bytes:
        """The whole body, at most ``limit`` bytes of it.

        Raises: GatewayError (body_too_large, before reading it all; or it stops coming),
        ClientLeftError.
        """
        # Most bodies are here to their end: to have them so saves awaits.
        if self._wire is not None and (body := self._wire.whole_body()) is not None:
            if len(body) > limit:
                raise self._too_large(limit)
            return body
        parts: list[bytes] = []

        async def keep(part: bytes) -> None:
            parts.append(part)

        await self.pour_body(keep, limit)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def pour_body(self, take: Callable[[bytes], Awaitable[None]], limit: int) -> None:
        """Give the body to ``take`` part by part, at most ``limit`` bytes of it; no more is read
        from the client than ``take`` has done with.

        Raises: as ``read_body``, and whatever ``take`` raises.
        """
        self._check_length(limit)
        try:
            async with asyncio.timeout(BODY_SECONDS) as patience:
                await self._pour_parts(take, limit, patience)
        except TimeoutError:
            self.unread = True
            message = "The request's body did not arrive in time."
            raise GatewayError("invalid_request", message, status=408) from None

    async def _pour_parts(
        self, take: Callable[[bytes], Awaitable[None]], limit: int, patience: asyncio.Timeout
    ) -> None:
        receive = self._receiver()
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left = True
                raise ClientLeftError
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > limit:
                raise self._too_large(limit)
            self.unread = more  # should it be refused now
            await take(part)
            patience.reschedule(asyncio.get_running_loop().time() + BODY_SECONDS)

    def _check_length(self, limit: int) -> None:
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and (len(declared) > 15 or int(declared) > limit):
            raise self._too_large(limit)

    def _receiver(self) -> Receive:
        return self._asgi.receive if self._wire is None else self._wire.receive

    def _too_large(self, limit: int) -> GatewayError:
        self.unread = True
        return GatewayError("body_too_large", f"The request body is larger than {limit} bytes.")

    # ---- noticing that it goes

    def watch(self) -> None:
        """From now on, cancel the current task when the client goes."""
        if self._wire is not None:
            self._wire.on_client_left = self._give_up
        else:
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._asgi.receive())["type"] != "http.disconnect":
            pass
        self._give_up()

    def _give_up(self) -> None:
        if not self.ended and self.task is not None:
            self.left = True
            self.task.cancel()

    def unwatch(self) -> None:
        """The request has been served; what the client does now concerns nobody."""
        self.ended = True
        if self._wire is not None:
            self._wire.on_client_left = None
        if self._watcher is not None:
            self._watcher.cancel()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _check_for_stall(self) -> None:
        since, now = self._writing_since, asyncio.get_running_loop().time()
        if since is not None and now - since >= STALLED_AFTER:
            self._give_up()
            self._abort()  # what it has not taken would keep the connection open for ever
        else:
            self._arm_stall_timer()

    def _arm_stall_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._stall_timer = loop.call_later(STALLED_AFTER / 4, self._check_for_stall)

    # ---- writing

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole response at once."""
        if status != 204:  # No Content has no length either
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        if self._wire is not None:
            self.started = self.ended = True
            self._wire.respond(status, [*headers, *self.common_headers], body, self.outbox)
            return
        if self.outbox is not None:
            self.outbox.before()
        await self._start(status, headers)
        self.ended = True
        await self._asgi.send({"type": "http.response.body", "body": body})

    async def respond_unread(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole response to a request whose body is still coming.

        Closing at once would reset the connection, and the client would often lose the response;
        so what still comes is thrown away for a moment.
        """
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        if self._wire is None:
            headers.append((b"connection", b"close"))
        else:
            self._wire.keep_alive = False
        await self._start(status, headers)
        self.ended = True
        await self._write(body)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await self._discard()
        await self._end(b"")

    async def _discard(self) -> None:
        receive, left = self._receiver(), LINGER_BYTES
        while left > 0:
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return
            left -= len(message.get("body", b""))

    async def start_stream(self, status: int, headers: Headers) -> None:
        """The head of a response whose body follows in parts."""
        await self._start(status, headers)
        self._arm_stall_timer()

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        headers = [*headers, *self.common_headers]
        if self._wire is not None:
            self._wire.start(status, headers, self.outbox)
            return
        start = {"type": "http.response.start", "status": status, "headers": headers}
        await self._asgi.send(start)

    async def write(self, data: bytes) -> None:
        """A part of the body; waits while the client does not take what it has."""
        self._writing_since = asyncio.get_running_loop().time()
        await self._write(data)
        self._writing_since = None

    @property
    def write_now(self) -> Callable[[bytes], bool]:
        """What writes a part of the body at once. It returns False where nothing was written:
        ``write`` it."""
        return _cannot if self._wire is None else self._wire.write_now

    async def _write(self, data: bytes) -> None:
        if self._wire is not None:
            await self._wire.write(data)
        else:
            await self._asgi.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The proper end of a body sent in parts."""
        await self._end(b"")

    async def _end(self, last: bytes) -> None:
        self.ended = True
        if self._wire is not None:
            self._wire.end(last)
        else:
            await self._asgi.send({"type": "http.response.body", "body": last})

    async def end_and_close(self, last: bytes) -> None:
        """Send ``last``, then close the connection: the answer is not whole."""
        if self._wire is not None:
            self._wire.keep_alive = False
        await self._end(last)

    async def cut(self) -> None:
        """Break the connection off, so that half an answer cannot be taken for a whole one."""
        self.ended = True
        if not self._abort():  # such a server can only be made to end the response
            await self._end(b"")

    def _abort(self) -> bool:
        if self._wire is not None:
            self._wire.abort()
        return self._wire is not None


def _cannot(data: bytes) -> bool:
    return False
