"""Anthropic's form of errors.

The statuses stay those of the router's own codes; Anthropic's SDKs know 503 and 504 besides
Anthropic's own 529.
"""

from __future__ import annotations

import msgspec

from mindrouter.gateway.errors import GatewayError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_encode = msgspec.json.Encoder().encode


def error_type(status: int) -> str:
    """Anthropic's word for the kind of an error with this status."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error_body(error: GatewayError, request_id: str) -> bytes:
    told = {"type": error_type(error.status), "message": error.message}
    return _encode({"type": "error", "error": told, "request_id": request_id})


def error_event(error: GatewayError, request_id: str) -> bytes:
    """An error after the first byte: one event, after which the stream just ends."""
    return b"event: error\ndata: " + error_body(error, request_id) + b"\n\n"
