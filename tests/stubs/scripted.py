"""A server that does exactly what a test tells it, byte by byte: a fake LLM server on loopback.

    async def script(conn: StubConnection) -> None:
        async for request in conn:               # until the client closes
            await conn.respond(200, b"hello")

    async with await ScriptedStub.start(script) as stub:
        ...                                       # stub.url, stub.requests, stub.open_count

The script runs once per connection and may do anything: answer, stall, reset, lie. When it
returns, the connection is closed. When the client goes, `read_request` and `stall` raise
`ClientGone`, which a script may ignore. Any other exception in a script fails the test, at
`stub.close()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Self, cast

Script = Callable[["StubConnection"], Awaitable[None]]
Headers = Iterable[tuple[str, str]]


class ClientGone(Exception):  # noqa: N818  (what happened)
    """The client closed or reset the connection."""


@dataclass(slots=True)
class StubRequest:
    """One request as it came: header names lower-case, in order, duplicates kept."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    raw_head: bytes
    connection: StubConnection
    received_at: float = field(default_factory=monotonic)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


class StubConnection(asyncio.Protocol):
    """The server's side of one connection; `gone` is set once the client has closed or reset it."""

    def __init__(self, stub: ScriptedStub) -> None:
        self.stub = stub
        self.gone = asyncio.Event()
        self.gone_at: float | None = None  # monotonic
        self.lost = asyncio.Event()  # our side is closed as well
        self.received = bytearray()
        self._news = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    # Reading

    def __aiter__(self) -> AsyncIterator[StubRequest]:
        return self._requests()

    async def _requests(self) -> AsyncIterator[StubRequest]:
        while True:
            try:
                request = await self.read_request()
            except ClientGone:
                return
            yield request

    async def read_head(self) -> StubRequest:
        """Read a request without its body, which `read_body` takes."""
        while (end := self.received.find(b"\r\n\r\n")) < 0:
            await self.more()
        raw = bytes(self.received[: end + 4])
        del self.received[: end + 4]
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        method, path, _version = first.split(" ")
        headers = [
            (name.lower(), value.strip()) for name, _, value in (x.partition(":") for x in lines)
        ]
        request = StubRequest(method, path, headers, b"", raw, self)
        self.stub._arrived(request)
        return request

    async def read_body(self, request: StubRequest) -> bytes:
        size = int(request.header("content-length") or 0)
        while len(self.received) < size:
            await self.more()
        request.body = bytes(self.received[:size])
        del self.received[:size]
        return request.body

    async def read_request(self) -> StubRequest:
        """Read the next whole request."""
        request = await self.read_head()
        await self.read_body(request)
        return request

    async def more(self) -> None:
        """Wait for further bytes in `received`."""
        size = len(self.received)
        self._news.clear()
        if not self.gone.is_set():
            await self._news.wait()
        if len(self.received) == size:
            raise ClientGone

    def pause_reading(self) -> None:
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        self.transport.resume_reading()

    # Writing

    async def write(self, *parts: bytes) -> None:
        """Write, and wait while the client does not take it."""
        if self.lost.is_set() or self.transport.is_closing():
            raise ClientGone
        self.transport.write(b"".join(parts))
        await self._writable.wait()
        if self.lost.is_set():
            raise ClientGone

    async def write_bytewise(self, data: bytes, delay: float = 0.0) -> None:
        """Write single bytes, `delay` seconds apart."""
        for i in range(len(data)):
            await self.write(data[i : i + 1])
            await asyncio.sleep(delay)

    async def respond(self, status: int = 200, body: bytes = b"", headers: Headers = ()) -> None:
        """Write a whole response with a length."""
        await self.write(head(status, [*headers, ("Content-Length", str(len(body)))]), body)

    async def start_chunked(self, status: int = 200, headers: Headers = ()) -> None:
        await self.write(head(status, [*headers, ("Transfer-Encoding", "chunked")]))

    async def chunk(self, data: bytes) -> None:
        await self.write(chunk(data))

    async def end_chunked(self, trailers: bytes = b"") -> None:
        await self.write(b"0\r\n", trailers, b"\r\n")

    async def stream(
        self, chunks: Iterable[bytes], headers: Headers = (), delay: float = 0.0
    ) -> None:
        """Write a whole chunked response, each chunk in its own write."""
        await self.start_chunked(200, headers)
        for data in chunks:
            await self.chunk(data)
            if delay:
                await asyncio.sleep(delay)
        await self.end_chunked()

    # Being difficult

    async def stall(self, until: asyncio.Event | None = None) -> None:
        """Do nothing until the event, or without one until the client goes (ClientGone)."""
        if until is not None:
            await until.wait()
        else:
            await self.gone.wait()
            raise ClientGone

    def reset(self) -> None:
        """Send RST instead of FIN, dropping what is unsent."""
        if self.lost.is_set():
            return
        sock = socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        self.transport.abort()

    def half_close(self) -> None:
        """Send FIN, and go on reading."""
        self.transport.write_eof()

    def close(self) -> None:
        """Send what is written, then FIN."""
        self.transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.stub._made(self)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._news.set()

    def eof_received(self) -> None:
        self._client_is_gone()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client_is_gone()
        self.lost.set()
        self._writable.set()
        self.stub._lost(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _client_is_gone(self) -> None:
        if self.gone_at is None:
            self.gone_at = monotonic()
            self.gone.set()
            self._news.set()


class ScriptedStub:
    """The server: `requests` in order of arrival, `connections` in order of acceptance."""

    def __init__(self, script: Script, scheme: str) -> None:
        self.script = script  # may be exchanged; new connections use the new one
        self.scheme = scheme
        self.host = ""
        self.port = 0
        self.requests: list[StubRequest] = []
        self.connections: list[StubConnection] = []
        self.open_count = 0
        self._server: asyncio.Server | None = None
        self._listening: socket.socket | None = None  # until it accepts
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []
        self._change = asyncio.Event()

    @classmethod
    async def start(
        cls,
        script: Script,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        receive_buffer: int | None = None,
    ) -> Self:
        """`receive_buffer`: about how many bytes the system takes for a connection that does not
        read; without it these are megabytes, and a slow reader shows only now and then."""
        stub = cls(script, "https" if tls else "http")
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: StubConnection(stub), host, port, ssl=tls)
        stub._server = cast("asyncio.Server", server)
        if receive_buffer is not None:  # connections have what the listening socket has
            [listening] = server.sockets
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        stub.host, stub.port = server.sockets[0].getsockname()[:2]
        return stub

    @classmethod
    def slow(cls, script: Script, backlog: int) -> Self:
        """One that accepts nobody before `accept`: the system takes about `backlog` connections,
        and lets further ones wait for an answer."""
        stub = cls(script, "http")
        stub._listening = socket.socket()
        stub._listening.bind(("127.0.0.1", 0))
        stub._listening.listen(backlog)
        stub.host, stub.port = stub._listening.getsockname()
        return stub

    async def accept(self) -> None:
        """Accept those that wait, and everybody from now on."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: StubConnection(self), sock=self._listening)
        self._server = cast("asyncio.Server", server)
        self._listening = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    async def until_requests(self, count: int, within: float = 20.0) -> None:
        """Wait until `count` requests have come in all (their heads, at least)."""
        async with asyncio.timeout(within):
            while len(self.requests) < count:
                self._change.clear()
                await self._change.wait()

    async def until_open(self, count: int, within: float = 20.0) -> None:
        """Wait until exactly `count` connections are open."""
        async with asyncio.timeout(within):
            while self.open_count != count:
                self._change.clear()
                await self._change.wait()

    async def close(self) -> None:
        """Stop listening, cut all connections, and raise the first failure of a script."""
        if self._server is not None:
            self._server.close()
        if self._listening is not None:
            self._listening.close()
        for connection in self.connections:
            # A TLS transport whose handshake failed has lost its protocol, and before Python 3.11.4
            # could not be aborted then.
            with contextlib.suppress(AttributeError):
                connection.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.until_open(0)
        if self._failures:
            raise self._failures[0]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _made(self, connection: StubConnection) -> None:
        self.connections.append(connection)
        self.open_count += 1
        self._change.set()
        task = asyncio.get_running_loop().create_task(self._run(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _arrived(self, request: StubRequest) -> None:
        self.requests.append(request)
        self._change.set()

    def _lost(self, _connection: StubConnection) -> None:
        self.open_count -= 1
        self._change.set()

    async def _run(self, connection: StubConnection) -> None:
        try:
            await self.script(connection)
        except ClientGone:
            pass
        except Exception as error:
            self._failures.append(error)
        connection.close()


def head(status: int, headers: Headers = (), reason: str = "OK") -> bytes:
    """Build a response head."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"HTTP/1.1 {status} {reason}\r\n{lines}\r\n".encode("latin-1")


def chunk(data: bytes) -> bytes:
    """Build one chunk of the chunked coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)
