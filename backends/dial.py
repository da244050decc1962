"""Opening TCP sockets to LLM servers: names, several addresses, socket options."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import select
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, NamedTuple

from backends.addresses import objection

# A host that loses power answers nothing, not even with a reset. The kernel then gives up after
# about a minute, be it on unacknowledged data or in the silence of a long prefill, so that the
# generous limit for the first byte is left to servers that are alive.
_DEAD_HOST_SECONDS = 60
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_HOST_SECONDS * 1000),
)
# More than it takes to be told of what has happened already.
_MOMENT_SECONDS = 0.1


class Address(NamedTuple):
    """One address of a server, as the socket module takes it."""

    family: int
    sockaddr: tuple[Any, ...]


class Dialer:
    """Opens sockets; simultaneous look-ups of one name share a single one.

    Look-ups run in a few threads shared by all names, and a name server that hangs would fill
    them with one name's requests.
    """

    def __init__(self) -> None:
        self._lookups: dict[tuple[str, int], asyncio.Task[list[Address]]] = {}

    async def open(self, host: str, port: int, seconds: float) -> socket.socket:
        """Return a connected, non-blocking socket.

        A name's addresses are tried in turn, each with its share of the time left, so that one
        that swallows packets leaves time for the next. Each has a moment also where none is left:
        it may be this process that stood still meanwhile.

        Raises: OSError, of the last address tried.
        """
        deadline = monotonic() + seconds
        found = literal_address(host, port)
        if not found:
            async with within(seconds):
                found = await self._resolve(host, port)
        addresses = permitted(host, found)
        failure = OSError(f"no address for {host}")
        for i, address in enumerate(addresses):
            share = (deadline - monotonic()) / (len(addresses) - i)
            try:
                return await _connect(address, share)
            except OSError as error:  # includes TimeoutError
                failure = error
        raise failure

    async def _resolve(self, host: str, port: int) -> list[Address]:
        lookup = self._lookups.get((host, port))
        if lookup is None:
            lookup = asyncio.get_running_loop().create_task(_lookup(host, port))
            self._lookups[host, port] = lookup
            lookup.add_done_callback(lambda done: self._forget(host, port, done))
        return await asyncio.shield(lookup)

    def _forget(self, host: str, port: int, lookup: asyncio.Task[list[Address]]) -> None:
        del self._lookups[host, port]
        if not lookup.cancelled():
            lookup.exception()  # all who waited may have left: a failure is no surprise then


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """A limit that has passed only a moment after its end.

    After a standstill of this process the end lies in the past already, and the loop has not looked
    yet what has happened meanwhile.

    Raises: TimeoutError.
    """
    loop = asyncio.get_running_loop()
    limit = asyncio.timeout(None)

    def allow_a_moment() -> None:
        limit.reschedule(loop.time() + _MOMENT_SECONDS)

    timer = loop.call_later(max(0.0, seconds), allow_a_moment)
    try:
        async with limit:
            yield
    finally:
        timer.cancel()


async def look_up(host: str, port: int) -> list[Address]:
    """The addresses of a name or literal that may be asked. Raises: OSError."""
    return permitted(host, literal_address(host, port) or await _lookup(host, port))


def permitted(host: str, found: list[Address]) -> list[Address]:
    """What of these may be asked.

    Looked at for each connection: whoever answers for a name may change what it stands for after
    the backend has been saved.

    Raises: OSError when nothing is left.
    """
    addresses = [one for one in found if objection(one.sockaddr[0]) is None]
    if found and not addresses:
        raise PermissionError(errno.EACCES, f"{host}: {objection(found[0].sockaddr[0])}")
    return addresses


def literal_address(host: str, port: int) -> list[Address]:
    """Return the one address that an IP literal stands for, or nothing for a name."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return []
    if version == 4:
        return [Address(socket.AF_INET, (host, port))]
    return [Address(socket.AF_INET6, (host, port, 0, 0))]


async def _lookup(host: str, port: int) -> list[Address]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [Address(family, sockaddr) for family, _, _, _, sockaddr in found]


async def _connect(address: Address, seconds: float) -> socket.socket:
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        for option in _OPTIONS:
            sock.setsockopt(*option)
        problem = sock.connect_ex(address.sockaddr)
        if problem == errno.EINPROGRESS:
            problem = await _outcome(sock, seconds)
        if problem:
            raise OSError(problem, os.strerror(problem))
    except BaseException:
        sock.close()
        raise
    return sock


async def _outcome(sock: socket.socket, seconds: float) -> int:
    """Wait for a connect that is under way, and return its error number, 0 for success.

    Not with the loop's sock_connect: uvloop's begins by looking up the address.
    """
    loop = asyncio.get_running_loop()
    settled: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not settled.done():
            settled.set_result(None)

    loop.add_writer(sock, settle)
    try:
        async with within(seconds):
            await settled
    except TimeoutError:
        # A second pause of this process may come in the moment after the first.
        if not _is_writable(sock):
            raise
    finally:
        loop.remove_writer(sock)
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def _is_writable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    return bool(poll.poll(0))
