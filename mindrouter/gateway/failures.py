"""What a backend's failure means: for the client, for other backends, and for the backend (P5)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from backends.upstream import (
    ConnectFailed,
    FirstByteTimeout,
    Origin,
    Response,
    UpstreamError,
)
from mindrouter.gateway.errors import GatewayError
from scheduler.snapshot import Endpoint

Verdict = Literal["failed", "busy", "none"]
#: A refusal is read no further than this.
MAX_ERROR_BYTES = 64 * 1024
#: A backend that wants to be left alone for longer is not waited for.
PATIENCE_SECONDS = 2.0
BUSY_SECONDS = 1.0

_CONTEXT_WORDS = re.compile(
    r"exceed_context_size|maximum context length|context_length_exceeded|input_tokens",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that gave the client nothing.

    ``verdict``: whether the backend is marked failed, busy, or not at all. ``retry``: whether
    another attempt may help. ``final``: what the client gets if there is none.
    """

    error: GatewayError
    verdict: Verdict
    retry: bool
    status: int | None = None
    busy_seconds: float = BUSY_SECONDS


def from_exception(error: UpstreamError, endpoint: Endpoint) -> Failure:
    """No usable answer came: not connected, silent, broken off, or not HTTP."""
    message = f"Backend {endpoint.name}: {_without_address(str(error), endpoint.origin)}"
    gateway_error = GatewayError(error.reason, message)
    if isinstance(error, ConnectFailed) and error.local:
        return Failure(gateway_error, "none", retry=True)  # our own shortage, not its fault
    if isinstance(error, FirstByteTimeout):
        return Failure(gateway_error, "none", retry=False)  # it had all the time it is allowed
    return Failure(gateway_error, "failed", retry=True)


def not_an_answer(endpoint: Endpoint, what: str) -> Failure:
    """A success that is no completion, such as a web page."""
    error = GatewayError("upstream_invalid", f"Backend {endpoint.name} {what}.")
    return Failure(error, "none", retry=True)


async def from_response(response: Response, endpoint: Endpoint) -> Failure:
    """The backend answered with an error status. Reads its body. Raises: UpstreamError."""
    body = await response.read_all(MAX_ERROR_BYTES)
    status = response.status
    if 300 <= status < 400:
        error = GatewayError("upstream_invalid", f"Backend {endpoint.name} answered a redirect.")
        return Failure(error, "none", retry=True, status=status)
    told = _read_error(body)
    message = _without_address(told.message, endpoint.origin) or f"status {status}"
    if status in (429, 503):
        return _busy(status, message, response.header(b"retry-after"), told.param)
    if status >= 500:
        return _server_error(status, message, endpoint, is_json=told.is_json)
    if status in (401, 403):
        # It is the router's key that was refused, not the client's.
        error = GatewayError("upstream_error", f"Backend {endpoint.name} refused its key.")
        return Failure(error, "none", retry=True, status=status)
    code = _client_error_code(status, told)
    return Failure(
        GatewayError(code, message, param=told.param, status=status), "none", False, status
    )


def from_event(error: Any, endpoint: Endpoint) -> Failure:
    """A stream whose first event was an error."""
    details = error if isinstance(error, dict) else {"message": error}
    message = _without_address(str(details.get("message") or error), endpoint.origin)
    status = details.get("code") or details.get("status") or details.get("status_code")
    if not isinstance(status, int) or not 400 <= status <= 599:
        status = 502
    if status in (429, 503):
        return _busy(status, message, None, None)
    if status >= 500 or status in (401, 403):
        return Failure(GatewayError("upstream_error", message), "none", retry=True, status=status)
    told = _Told(message, None, f"{details.get('type')} {message}", True)
    code = _client_error_code(status, told)
    return Failure(GatewayError(code, message, status=status), "none", False, status)


def _busy(status: int, message: str, retry_after: str | bytes | None, param: str | None) -> Failure:
    """Full or overloaded, not ill: somebody else may do it, or it itself in a moment."""
    text = (retry_after or b"").decode() if isinstance(retry_after, bytes) else retry_after or ""
    seconds = int(text) if text.strip().isdigit() else None
    code = "rate_limit_exceeded" if status == 429 else "no_backend_available"
    told = min(seconds, 60) if seconds else 1
    error = GatewayError(code, message, param=param, status=status, retry_after=told)
    patient = seconds is None or seconds <= PATIENCE_SECONDS
    return Failure(error, "busy", patient, status, busy_seconds=float(told))


def _server_error(status: int, message: str, endpoint: Endpoint, *, is_json: bool) -> Failure:
    """5xx. Some engines use it for the caller's mistakes; that marks nothing."""
    if status == 501:
        return Failure(GatewayError("capability_missing", message), "none", False, status)
    if endpoint.engine == "llamacpp" and is_json:
        # llama.cpp says 500 for what the request asked of it; when it is ill it does not answer.
        error = GatewayError("upstream_error", message)
        return Failure(error, "none", retry=False, status=status)
    verdict: Verdict = "failed" if status in (500, 502) else "none"
    return Failure(GatewayError("upstream_error", message), verdict, retry=True, status=status)


@dataclass(frozen=True, slots=True)
class _Told:
    """A backend's error, in whichever form it was written."""

    message: str
    param: str | None
    words: str  # everything in which a kind of error might be named
    is_json: bool


def _read_error(body: bytes) -> _Told:
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
    return _Told(text[:2000], param if isinstance(param, str) else None, words, True)


def _client_error_code(status: int, told: _Told) -> str:
    if _CONTEXT_WORDS.search(told.words):
        return "context_length_exceeded"
    if status == 404 and "model" in told.words.lower():
        return "model_not_found"
    if status == 413:
        return "body_too_large"
    return "invalid_request"


def _without_address(message: str, origin: Origin) -> str:
    """The message without the backend's address, which is nobody's business."""
    for address in (f"{origin.host}:{origin.port}", origin.host):
        message = message.replace(address, "backend")
    return message
