"""The relay's HTTP/1.1 client: a pool of kept-alive connections to the LLM servers.

One `Upstream` belongs to one event loop. It knows no limit on open connections: the scheduler's
slots are that limit. Every way out of `send`, also cancellation at any moment, leaves neither a
socket nor a pool entry behind; a returned `Response` is the caller's to end. The errors are drawn
in `backends.response`.
"""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

from backends.connection import Connection, Outgoing
from backends.dial import Dialer, within
from backends.filepart import FilePart
from backends.outbox import Outbox
from backends.response import (
    ConnectFailed,
    EndedEarly,
    FirstByteTimeout,
    InvalidResponse,
    Response,
    StaleConnection,
    Stalled,
    UpstreamError,
)
from backends.tls import tls_context, unverified_context

__all__ = [
    "Body",
    "ConnectFailed",
    "Counters",
    "EndedEarly",
    "FirstByteTimeout",
    "InvalidResponse",
    "Origin",
    "Response",
    "Stalled",
    "Upstream",
    "UpstreamError",
]

Body = bytes | Sequence[bytes | FilePart]

_DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+")
_BODYLESS_METHODS = frozenset({b"GET", b"HEAD", b"DELETE", b"OPTIONS"})
_OWN_SHORTAGES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a backend's requests go; parsed once from its base URL.

    `path_prefix` is put before every path. It has no trailing slash and no final `/v1`, since the
    paths of requests bring that themselves and some (Ollama's) lie outside of it.
    """

    scheme: str
    host: str
    port: int
    path_prefix: str = ""
    key: str = field(init=False, compare=False, repr=False)  # which connections may be shared
    host_header: bytes = field(init=False, compare=False, repr=False)
    # What surrounds the path of a request: before it, and between it and the request's own headers
    prefix: bytes = field(init=False, compare=False, repr=False)
    preamble: bytes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        host = self.host.encode("idna").decode() if not self.host.isascii() else self.host
        if ":" in host:
            host = f"[{host}]"
        elif not _HOST_NAME.fullmatch(host):
            raise ValueError("the host of a base URL is a name or an address")
        name = host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"
        host_header = name.encode()
        preamble = b" HTTP/1.1\r\nhost: " + host_header + b"\r\naccept-encoding: identity\r\n"
        object.__setattr__(self, "key", f"{self.scheme}://{name}")
        object.__setattr__(self, "host_header", host_header)
        object.__setattr__(self, "prefix", self.path_prefix.encode())
        object.__setattr__(self, "preamble", preamble)

    @classmethod
    def parse(cls, base_url: str) -> Self:
        """Read a base URL, which may end in `/v1` or not.

        Raises: ValueError for anything but http or https with a host and nothing after the path.
        """
        parts = urlsplit(base_url.strip())
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
            raise ValueError("a base URL is http:// or https:// and a host")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("a base URL has no credentials, query or fragment")
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        if not prefix.isascii() or any(c <= " " or c == "\x7f" for c in prefix):
            raise ValueError("the path of a base URL must be percent-encoded")
        port = _DEFAULT_PORTS[parts.scheme] if parts.port is None else parts.port
        if port == 0:
            raise ValueError("port 0 cannot be connected to")
        return cls(parts.scheme, parts.hostname, port, prefix)


@dataclass(slots=True)
class Counters:
    """What a pool has done since its start."""

    requests: int = 0
    opened: int = 0
    reused: int = 0
    retried: int = 0  # on a fresh connection, as the kept-alive one was being closed


class Upstream:
    """The pool. Idle connections are kept per server and handed out last in, first out.

    Requests leave through ``outbox``, by default one of its own.
    """

    def __init__(
        self,
        *,
        outbox: Outbox | None = None,
        max_idle_per_origin: int = 256,
        idle_seconds: float = 30.0,
        verify_tls: bool = True,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.counters = Counters()
        self._outbox = outbox or Outbox()
        self._max_idle = max_idle_per_origin
        self._idle_seconds = idle_seconds
        self._verify_tls = verify_tls
        self._ssl_context = ssl_context
        self._idle: dict[str, list[Connection]] = {}
        self._open: dict[str, set[Connection]] = {}
        self._connecting: set[asyncio.Timeout] = set()
        self._dialer = Dialer()
        self._closed = False
        self._all_lost: asyncio.Event | None = None

    async def send(
        self,
        origin: Origin,
        *,
        method: bytes,
        path: bytes,
        headers: bytes,
        body: Body = b"",
        connect_timeout: float,
        first_byte_timeout: float,
        chunk_timeout: float,
    ) -> Response:
        """Send a request and return its response once the final head has come.

        `path` begins with a slash and is put behind the origin's prefix; `headers` are ready-made
        lines (`name: value\\r\\n`) without Host, Content-Length, Connection and Accept-Encoding.
        A part of a body that lies in a file is read when it is sent (of bodies over 64 KiB only).
        Both are trusted to hold no stray line ends. Limits are in seconds;
        `first_byte_timeout` runs from the request's last byte (while a large body is being sent:
        from the latest progress) to the complete head, and goes on to the first byte of the body,
        as some servers send their head before they begin to think; `chunk_timeout` is for the
        silence after that.

        Raises: UpstreamError, of every kind but Stalled.
        """
        if self._closed:
            raise RuntimeError("the pool is closed")
        parts = (body,) if isinstance(body, bytes) else body
        size = sum(map(len, parts))
        framing = b"\r\n"
        if size or method not in _BODYLESS_METHODS:
            framing = b"content-length: %d\r\n\r\n" % size
        head = b"".join((method, b" ", origin.prefix, path, origin.preamble, headers, framing))
        request = Outgoing(head, parts, size, method != b"HEAD", first_byte_timeout, chunk_timeout)
        self.counters.requests += 1
        connection = self._take_idle(origin.key)
        if connection is not None:
            response = connection.start(request)
            try:
                await response.wait_for_head()
                return response
            except StaleConnection:
                self.counters.retried += 1
            except BaseException:
                response.abort()
                raise
        connection = await self._connect(origin, connect_timeout)
        response = connection.start(request)
        try:
            await response.wait_for_head()
        except BaseException:
            response.abort()
            raise
        return response

    async def close(self) -> None:
        """Close every connection, also those in use, and wait until they are gone."""
        self._closed = True
        now = asyncio.get_running_loop().time()
        for limit in self._connecting:
            if not limit.expired():
                limit.reschedule(now)
        for connections in tuple(self._open.values()):
            for connection in tuple(connections):
                connection.abort()
        if self._open:
            self._all_lost = asyncio.Event()
            await self._all_lost.wait()

    def idle_count(self, origin: Origin) -> int:
        """Connections that wait for a request."""
        return len(self._idle.get(origin.key, ()))

    def open_count(self, origin: Origin) -> int:
        """Connections being made, in use, idle, or aborted but not yet gone."""
        return len(self._open.get(origin.key, ()))

    def _take_idle(self, key: str) -> Connection | None:
        idle = self._idle.get(key)
        while idle:
            connection = idle.pop()
            if connection.is_usable():
                self.counters.reused += 1
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin, seconds: float) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(
            loop, origin.key, self._outbox, self._idle_seconds, self._keep, self._lost
        )
        self._open.setdefault(origin.key, set()).add(connection)
        limit = asyncio.timeout(None)  # for close() alone: each step keeps its own
        try:
            async with limit:
                self._connecting.add(limit)
                await self._open_connection(connection, origin, seconds)
        except TimeoutError:
            self._give_up(connection)
            why = "the pool was closed" if self._closed else f"not within {seconds:g} s"
            raise ConnectFailed(f"{origin.key}: {why}") from None
        except (OSError, UnicodeError) as error:
            self._give_up(connection)
            local = isinstance(error, OSError) and error.errno in _OWN_SHORTAGES
            raise ConnectFailed(f"{origin.key}: {error}", local=local) from error
        except BaseException:
            self._give_up(connection)
            raise
        finally:
            self._connecting.discard(limit)
        self.counters.opened += 1
        return connection

    async def _open_connection(
        self, connection: Connection, origin: Origin, seconds: float
    ) -> None:
        tls = self._tls() if origin.scheme == "https" else None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        sock = await self._dialer.open(origin.host, origin.port, seconds)
        try:
            async with within(deadline - loop.time()):
                await loop.create_connection(
                    lambda: connection,
                    sock=sock,
                    ssl=tls,
                    server_hostname=origin.host if tls else None,
                )
        except BaseException:
            sock.close()
            raise

    def _tls(self) -> ssl.SSLContext:
        if self._ssl_context is None:
            self._ssl_context = tls_context() if self._verify_tls else unverified_context()
        return self._ssl_context

    def _give_up(self, connection: Connection) -> None:
        connection.abort()
        self._lost(connection)  # the protocol may have been made and yet not be told of the end

    def _keep(self, connection: Connection) -> None:
        idle = self._idle.setdefault(connection.key, [])
        if self._closed or len(idle) >= self._max_idle:
            connection.abort()
        else:
            idle.append(connection)

    def _lost(self, connection: Connection) -> None:
        idle = self._idle.get(connection.key)
        if idle is not None:
            if connection in idle:
                idle.remove(connection)
            if not idle:
                del self._idle[connection.key]
        remaining = self._open.get(connection.key)
        if remaining is not None:
            remaining.discard(connection)
            if not remaining:
                del self._open[connection.key]
        if self._all_lost is not None and not self._open:
            self._all_lost.set()
