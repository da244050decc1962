"""One small question to a server that may hang, lie or never stop answering.

Bounded in time and in size; no redirects, no proxies, no cookies, no compressed answers.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from functools import cache

import httpx

from backends.engines.replies import Question, Reply

# One line for each question of each poll is more than any log is for.
logging.getLogger("httpx").setLevel(logging.WARNING)

MAX_REPLY_BYTES = 4 * 1024 * 1024


class UnansweredError(Exception):
    """No usable answer came. ``refused``: nothing listens at that address."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


@cache
def _tls() -> ssl.SSLContext:
    # Loading the certificate store takes tens of milliseconds: once per process.
    return httpx.create_ssl_context()


def new_client(
    *, connect_timeout: float, headers: dict[str, str] | None = None
) -> httpx.AsyncClient:
    """A client for one server; the caller bounds the total time."""
    return httpx.AsyncClient(
        verify=_tls(),
        trust_env=False,
        follow_redirects=False,
        timeout=httpx.Timeout(None, connect=connect_timeout),
        limits=httpx.Limits(max_connections=4),
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
