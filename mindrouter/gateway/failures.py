"""What a backend's failure means: for the client, for other backends, and for the backend (P5)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import ssl
from dataclasses import dataclass
from typing import Any, Literal

from backends.upstream import (
    ConnectFailed,
    FirstByteTimeout,
    Response,
    UpstreamError,
)
from mindrouter.gateway.errors import GatewayError
from scheduler.snapshot import Endpoint

Verdict = Literal["failed", "busy", "none"]
Retry = Literal["no", "elsewhere", "anywhere"]
#: A refusal is read no further than this, and no longer.
MAX_ERROR_BYTES = 1 << 20
REFUSAL_SECONDS = 5.0
#: Characters of a backend's words that are passed on, and of the name of a field in them.
MAX_TEXT = 2000
MAX_PARAM = 200
#: A backend that wants to be left alone for longer is not waited for.
PATIENCE_SECONDS = 2.0
BUSY_SECONDS = 1.0

#: What FastAPI says, and so vLLM and SGLang, where they have nothing at an address.
_NO_SUCH_PATH = "no such path"
_KEY = re.compile(rb"\r\nauthorization: Bearer ([^\r]+)\r\n")
_IS_STATUS = re.compile(r"status \d+")
_CONTEXT_WORDS = re.compile(
    r"exceed_context_size|maximum context length|context_length_exceeded|input_tokens",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that gave the client nothing, and what the client gets if there is no other.

    ``verdict``: whether the backend is marked failed, busy, or not at all. ``retry``: where
    another attempt may help.
    """

    error: GatewayError
    verdict: Verdict
    retry: Retry
    status: int | None = None
    busy_seconds: float = BUSY_SECONDS


def from_exception(error: UpstreamError, endpoint: Endpoint) -> Failure:
    """No usable answer came: not connected, silent, broken off, or not HTTP."""
    text = _why_not_connected(error) if isinstance(error, ConnectFailed) else str(error)
    message = f"Backend {endpoint.name}: {_without_secrets(text, endpoint)}"
    gateway_error = GatewayError(error.reason, message)
    if isinstance(error, ConnectFailed) and error.local:
        return Failure(gateway_error, "none", "anywhere")  # our own shortage, not its fault
    if isinstance(error, FirstByteTimeout):
        return Failure(gateway_error, "none", "no")  # it had all the time it is allowed
    return Failure(gateway_error, "failed", "anywhere")


def _why_not_connected(error: ConnectFailed) -> str:
    """The system's texts name the address that a host's name stands for."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLError):
        return f"no secure connection ({cause.reason})"
    if isinstance(cause, OSError) and (cause.errno or 0) > 0:
        return os.strerror(cause.errno or 0)
    return str(error).partition(": ")[2]


def not_an_answer(endpoint: Endpoint, what: str) -> Failure:
    """A success that is no completion, such as a web page."""
    error = GatewayError("upstream_invalid", f"Backend {endpoint.name} {what}.")
    return Failure(error, "none", "elsewhere")


async def from_response(response: Response, endpoint: Endpoint) -> Failure:
    """The backend answered with an error status. Reads its body."""
    status = response.status
    if 300 <= status < 400:
        error = GatewayError("upstream_invalid", f"Backend {endpoint.name} answered a redirect.")
        return Failure(error, "none", "elsewhere", status)
    told = _read_error(await _read_refusal(response), endpoint)
    message = told.message or f"status {status}"
    if status in (429, 503):
        return _busy(status, message, response.header(b"retry-after"), told.param)
    if status >= 500:
        return _server_error(status, message, endpoint, is_json=told.is_json)
    if status in (401, 403):
        # It is the router's key that was refused, not the client's.
        error = GatewayError("upstream_error", f"Backend {endpoint.name} refused its key.")
        return Failure(error, "none", "elsewhere", status)
    if status == 404 and told.words == _NO_SUCH_PATH:
        message = f"Backend {endpoint.name} does not serve this address."
        error = GatewayError("capability_missing", message, status=status)
        return Failure(error, "none", "elsewhere", status)
    code = _client_error_code(status, told)
    return Failure(
        _quoting(code, message, param=told.param, status=status),
        "none",
        "no",
        status,
    )


async def _read_refusal(response: Response) -> bytes:
    """The text of a refusal as far as it is worth reading. Its status counts even if the rest
    breaks off: engines send a caller's whole prompt back, and that must not mark them failed."""
    parts, size = [], 0
    with contextlib.suppress(UpstreamError, TimeoutError):
        async with asyncio.timeout(REFUSAL_SECONDS):
            while size < MAX_ERROR_BYTES and (part := await response.read()):
                parts.append(part)
                size += len(part)
    return b"".join(parts)


def from_event(error: Any, endpoint: Endpoint) -> Failure:
    """A stream whose first event was an error, or could not be translated."""
    if isinstance(error, GatewayError):
        return Failure(error, "none", "elsewhere")
    details = error if isinstance(error, dict) else {"message": error}
    told_words = details.get("message") or details.get("detail") or error
    text = told_words if isinstance(told_words, str) else json.dumps(told_words)
    message = _without_secrets(text, endpoint)[:MAX_TEXT]
    status = details.get("code") or details.get("status") or details.get("status_code")
    if not isinstance(status, int) or not 400 <= status <= 599:
        status = 502
    if status in (429, 503):
        return _busy(status, message, None, None)
    if status >= 500 or status in (401, 403):
        return Failure(_quoting("upstream_error", message), "none", "elsewhere", status)
    told = _Told(message, None, f"{details.get('type')} {message}", True)
    code = _client_error_code(status, told)
    return Failure(_quoting(code, message, status=status), "none", "no", status)


def _busy(status: int, message: str, retry_after: bytes | None, param: str | None) -> Failure:
    """Full or overloaded, not ill: somebody else may do it, or it itself in a moment."""
    text = (retry_after or b"").strip()
    seconds = int(text) if text.isdigit() and len(text) < 7 else None
    code = "rate_limit_exceeded" if status == 429 else "no_backend_available"
    told = min(seconds, 60) if seconds else 1
    error = _quoting(code, message, param=param, status=status, retry_after=told)
    patient = seconds is None or seconds <= PATIENCE_SECONDS
    retry: Retry = "anywhere" if patient else "elsewhere"
    return Failure(error, "busy", retry, status, busy_seconds=float(told))


def _server_error(status: int, message: str, endpoint: Endpoint, *, is_json: bool) -> Failure:
    """5xx. Some engines use it for the caller's mistakes; that marks nothing."""
    if status == 501:
        return Failure(_quoting("capability_missing", message), "none", "no", status)
    if endpoint.engine == "llamacpp" and is_json:
        # llama.cpp says 500 for what the request asked of it; when it is ill it does not answer.
        return Failure(_quoting("upstream_error", message), "none", "no", status)
    verdict: Verdict = "failed" if status in (500, 502) else "none"
    return Failure(_quoting("upstream_error", message), verdict, "elsewhere", status)


def _quoting(code: str, message: str, **more: Any) -> GatewayError:
    """An error in the backend's own words, if it has said any."""
    return GatewayError(code, message, quoted=not _IS_STATUS.fullmatch(message), **more)


@dataclass(frozen=True, slots=True)
class _Told:
    """A backend's error, in whichever form it was written."""

    message: str
    param: str | None
    words: str  # everything in which a kind of error might be named
    is_json: bool


def _read_error(body: bytes, endpoint: Endpoint) -> _Told:
    """OpenAI's, Ollama's or FastAPI's form; a web page or nothing has no message."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return _Told("", None, "", False)
    error = data.get("error", data) if isinstance(data, dict) else data
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or ""
        param = error.get("param")
        words = f"{error.get('type')} {error.get('code')} {param} {message}"
    else:
        message, param, words = error, None, str(error)
    text = message if isinstance(message, str) else json.dumps(message)
    if data == {"detail": "Not Found"}:
        words = _NO_SUCH_PATH
    told = _without_secrets(text, endpoint)[:MAX_TEXT]
    param = _without_secrets(param, endpoint)[:MAX_PARAM] if isinstance(param, str) else None
    return _Told(told, param, words, True)


def _client_error_code(status: int, told: _Told) -> str:
    if _CONTEXT_WORDS.search(told.words):
        return "context_length_exceeded"
    if status == 404 and "model" in told.words.lower():
        return "model_not_found"
    if status == 413:
        return "body_too_large"
    return "invalid_request"


def _without_secrets(message: str, endpoint: Endpoint) -> str:
    """The message without the backend's key and address, which are nobody's business."""
    if (key := _KEY.search(endpoint.headers)) is not None:
        message = message.replace(key[1].decode(), "…")
    origin = endpoint.origin
    address = rf"(?<![\w.-]){re.escape(origin.host)}(:{origin.port}\b)?(?![\w-])"
    return re.sub(address, "backend", message, flags=re.IGNORECASE)
