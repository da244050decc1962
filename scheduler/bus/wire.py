"""A connection to Redis for what happens with every request.

The client library takes some 75 µs for a command, this 11 µs, which is the difference between a
gateway that notices the bus and one that does not. What is rare goes through the library.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import hiredis
from redis.asyncio.connection import SSLConnection, parse_url

Command = tuple[str | bytes | int, ...]

CONNECT_SECONDS = 1.0
#: Without an answer for so long the connection is given up; longer than any command blocks.
SILENT_SECONDS = 1.5
_LOOK_SECONDS = 0.25
_pack: Callable[[Any], bytes] = hiredis.pack_command  # its types know only commands of one word


class Wire(asyncio.Protocol):
    """One connection; its commands are answered in their order."""

    def __init__(self) -> None:
        self._replies = hiredis.Reader(notEnoughData=self)
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._look: asyncio.TimerHandle | None = None
        self._end = ""  # why it closed, as far as is known
        self.is_open = False

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True
        self._look = self._loop.call_later(_LOOK_SECONDS, self._look_for_silence)

    def data_received(self, data: bytes) -> None:
        replies, waiting = self._replies, self._waiting
        replies.feed(data)
        while (reply := replies.gets()) is not self:
            if not waiting:  # it has too many clients, say, and closes
                self.is_open, self._end = False, str(reply)
                self.close()
                return
            answer, _ = waiting.popleft()
            if answer.done():  # whoever asked has been cancelled
                continue
            if isinstance(reply, Exception):
                answer.set_exception(reply)
            else:
                answer.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._end = self._end or str(exc or "it was closed")
        if self._look is not None:
            self._look.cancel()
        while self._waiting:
            answer, _ = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(ConnectionError(f"The connection to Redis broke: {self._end}"))

    def _look_for_silence(self) -> None:
        """A frozen Redis keeps its connections open."""
        now = time.monotonic()
        if self._waiting and now - self._waiting[0][1] > SILENT_SECONDS and self._transport:
            self._transport.abort()
            return
        self._look = self._loop.call_later(_LOOK_SECONDS, self._look_for_silence)

    # ---- ours

    def send(self, commands: list[Command]) -> asyncio.Future[Any]:
        """Write them at once. The answer is the last one's, but an error is any one's.

        Raises: ConnectionError.
        """
        if not self.is_open or self._transport is None:
            raise ConnectionError(f"The connection to Redis is closed: {self._end}")
        now = time.monotonic()
        answers = [self._loop.create_future() for _ in commands]
        self._waiting.extend((answer, now) for answer in answers)
        self._transport.write(b"".join(_pack(command) for command in commands))
        return answers[0] if len(answers) == 1 else _last_of(answers)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _last_of(answers: list[asyncio.Future[Any]]) -> asyncio.Future[Any]:
    async def wait() -> Any:
        return (await asyncio.gather(*answers))[-1]

    return asyncio.ensure_future(wait())


class Line:
    """A connection that is made anew when it has broken. Belongs to one task at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._wire: Wire | None = None

    async def execute(self, *commands: Command) -> Any:
        """Run the commands in one go; the last one's answer. None of them is ever repeated.

        Raises: OSError, TimeoutError, hiredis.HiredisError.
        """
        wire = self._wire
        if wire is None or not wire.is_open:
            wire = self._wire = await _connect(self._url)
        return await wire.send(list(commands))

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


async def _connect(url: str) -> Wire:
    options: dict[str, Any] = dict(parse_url(url))
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_SECONDS):
        if path := options.get("path"):
            _, wire = await loop.create_unix_connection(Wire, path)
        else:
            host, port = options.get("host", "localhost"), options.get("port", 6379)
            _, wire = await loop.create_connection(Wire, host, port, ssl=_certificates(options))
        try:
            if password := options.get("password"):
                user = options.get("username")
                await wire.send([("AUTH", user, password) if user else ("AUTH", password)])
            if database := options.get("db"):
                await wire.send([("SELECT", database)])
        except BaseException:
            wire.close()  # it is tried again and again, and each one would stay open
            raise
    return wire


def _certificates(options: dict[str, Any]) -> ssl.SSLContext | None:
    """Whom to trust over rediss, just as the client library does; None: it is not encrypted."""
    if options.get("connection_class") is not SSLConnection:
        return None
    told = {name: value for name, value in options.items() if name.startswith("ssl_")}
    context: ssl.SSLContext = SSLConnection(**told).ssl_context.get()
    return context
