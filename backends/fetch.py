"""One small question to a server that may hang, lie or never stop answering.

Bounded in time and in size; no redirects, no proxies, no cookies, no compressed answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import httpcore
import httpx

from backends.dial import look_up
from backends.engines.replies import Question, Reply
from backends.tls import tls_context

MAX_REPLY_BYTES = 4 * 1024 * 1024


class UnansweredError(Exception):
    """No usable answer came. ``refused``: nothing listens at that address."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class _Dialing(httpcore.AnyIOBackend):
    """Connects to addresses that have been looked at, not to whatever a name stands for."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  the library's
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        failures: list[Exception] = []
        try:
            addresses = await look_up(host, port)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        for address in addresses:
            try:
                return await super().connect_tcp(
                    address.sockaddr[0], port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failures.append(error)
        raise failures[-1] from (
            ExceptionGroup("every address failed", failures) if len(failures) > 1 else None
        )


class _Transport(httpx.AsyncHTTPTransport):
    """httpx has no option for where connections come from; its pool's own library has."""

    def __init__(self) -> None:
        super().__init__(verify=tls_context(), trust_env=False)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=tls_context(), max_connections=4, network_backend=_Dialing()
        )


def new_client(
    *, connect_timeout: float, headers: dict[str, str] | None = None
) -> httpx.AsyncClient:
    """A client for one server; the caller bounds the total time."""
    return httpx.AsyncClient(
        transport=_Transport(),
        trust_env=False,
        follow_redirects=False,
        timeout=httpx.Timeout(None, connect=connect_timeout),
        headers={"accept-encoding": "identity", "user-agent": "mindrouter", **(headers or {})},
    )


async def ask(client: httpx.AsyncClient, base: str, question: Question) -> Reply:
    """Put ``question`` to the server at ``base``. Raises: UnansweredError."""
    headers = {"content-type": "application/json"} if question.body is not None else {}
    try:
        async with client.stream(
            question.method, base + question.path, content=question.body, headers=headers
        ) as response:
            body = await _read(response)
            return Reply(response.status_code, body, response.headers.get("server", ""))
    except Exception as error:  # an address that is none fails in many ways, deep down
        raise UnansweredError(
            f"{question.method} {question.path}: {_describe(error)}", refused=_was_refused(error)
        ) from error


async def _read(response: httpx.Response) -> bytes:
    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx.DecodingError("a compressed answer, which was not asked for")
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_REPLY_BYTES:
            raise httpx.DecodingError(f"an answer of more than {MAX_REPLY_BYTES} bytes")
    return bytes(body)


def _describe(error: Exception) -> str:
    if isinstance(error, httpx.ConnectTimeout):
        return "no connection in time"
    # It may quote what the server sent, and PostgreSQL stores no NUL.
    return "".join(c if c.isprintable() else "?" for c in str(error)) or type(error).__name__


def _was_refused(error: BaseException) -> bool:
    """True when every address that was tried refused the connection."""
    if not isinstance(error, httpx.ConnectError):
        return False
    roots = [e for e in _causes(error) if isinstance(e, OSError) and e.errno is not None]
    return bool(roots) and all(isinstance(e, ConnectionRefusedError) for e in roots)


def _causes(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _causes(member)
        return
    yield error
    following = error.__cause__ or error.__context__
    if following is not None:
        yield from _causes(following)
