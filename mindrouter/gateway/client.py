"""The client's side of one HTTP request, over ASGI."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from mindrouter.gateway.errors import GatewayError
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


class Client:
    """Reads the request, writes the response, and notices when the client goes.

    A disconnect is noticed in every phase: while the body is read, by ``receive`` itself; after
    ``watch``, by our own protocol, or behind any other server by a task, which cancels the one
    that serves the request. ``left`` tells such a cancellation from any other.
    """

    __slots__ = (
        "_common_headers",
        "_connection",
        "_receive",
        "_send",
        "_stall_timer",
        "_task",
        "_watcher",
        "_wire",
        "_writing_since",
        "ended",
        "headers",
        "left",
        "scope",
        "started",
        "unread",
    )

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        common_headers: Iterable[tuple[bytes, bytes]],
    ) -> None:
        self.scope = scope
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.started = False
        self.ended = False
        self.left = False
        self.unread = False  # the body is not read to its end
        self._receive = receive
        self._send = send
        self._common_headers = list(common_headers)
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._writing_since: float | None = None
        #: Our own protocol's connection, or None behind any other server.
        self._connection: Any = scope.get("extensions", {}).get("mindrouter.connection")
        self._wire: Wire | None = None if self._connection is None else self._connection.wire()

    def header(self, name: bytes) -> str | None:
        """A request header's value, stripped; names are lower-case."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1").strip()

    # ---- reading

    @property
    def body_is_coming(self) -> bool:
        """Whether a part of the request's body is still to come, as far as the server tells."""
        return self._wire is not None and self._wire.body_is_coming

    async def read_body(self, limit: int) -> bytes:
        """The whole body, at most ``limit`` bytes of it.

        Raises: GatewayError (body_too_large, before reading it all; or it stops coming),
        ClientLeftError.
        """
        self._check_length(limit)
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
        size, more = 0, True
        while more:
            message = await self._receive()
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

    def _too_large(self, limit: int) -> GatewayError:
        self.unread = True
        return GatewayError("body_too_large", f"The request body is larger than {limit} bytes.")

    # ---- noticing that it goes

    def watch(self) -> None:
        """From now on, cancel the current task when the client goes."""
        self._task = asyncio.current_task()
        connection = self._connection
        if connection is not None:
            connection.on_client_left = self._give_up
        else:
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._give_up()

    def _give_up(self) -> None:
        if not self.ended and self._task is not None:
            self.left = True
            self._task.cancel()

    def unwatch(self) -> None:
        """The request has been served; what the client does now concerns nobody."""
        self.ended = True
        connection = self._connection
        if connection is not None:
            connection.on_client_left = None
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
            self._wire.respond(status, [*headers, *self._common_headers], body)
            return
        await self._start(status, headers)
        self.ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def respond_unread(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole response to a request whose body is still coming.

        Closing at once would reset the connection, and the client would often lose the response;
        so what still comes is thrown away for a moment.
        """
        length = (b"content-length", b"%d" % len(body))
        await self._start(status, [*headers, length, (b"connection", b"close")])
        self.ended = True
        await self._write(body)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await self._discard()
        await self._end(b"")

    async def _discard(self) -> None:
        left = LINGER_BYTES
        while left > 0:
            message = await self._receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return
            left -= len(message.get("body", b""))

    async def start_stream(self, status: int, headers: Headers) -> None:
        """The head of a response whose body follows in parts."""
        await self._start(status, headers)
        self._arm_stall_timer()

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        if self._wire is not None:
            self._wire.start(status, [*headers, *self._common_headers])
            return
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *self._common_headers],
            }
        )

    async def write(self, data: bytes) -> None:
        """A part of the body; waits while the client does not take what it has."""
        self._writing_since = asyncio.get_running_loop().time()
        await self._write(data)
        self._writing_since = None

    def write_now(self, data: bytes) -> bool:
        """A part of the body, at once. False: nothing was written; ``write`` it."""
        return self._wire is not None and self._wire.write_now(data)

    async def _write(self, data: bytes) -> None:
        if self._wire is not None:
            await self._wire.write(data)
        else:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The proper end of a body sent in parts."""
        await self._end(b"")

    async def _end(self, last: bytes) -> None:
        self.ended = True
        if self._wire is not None:
            self._wire.end(last)
        else:
            await self._send({"type": "http.response.body", "body": last})

    async def end_and_close(self, last: bytes) -> None:
        """Send ``last``, then close the connection: the answer is not whole."""
        connection = self._connection
        if connection is not None:
            connection.close_after_response()
        await self._end(last)

    async def cut(self) -> None:
        """Break the connection off, so that half an answer cannot be taken for a whole one."""
        self.ended = True
        if not self._abort():  # such a server can only be made to end the response
            await self._end(b"")

    def _abort(self) -> bool:
        connection = self._connection
        if connection is not None:
            connection.abort()
        return connection is not None
