"""Ollama's form of errors: a bare text. The statuses are the router's own."""

from __future__ import annotations

import msgspec

from mindrouter.gateway.errors import GatewayError

_encode = msgspec.json.Encoder().encode


def error_body(error: GatewayError, request_id: str) -> bytes:
    """The form has no place for the request's id, which the response's header carries."""
    return _encode({"error": error.message})


def error_event(error: GatewayError, request_id: str) -> bytes:
    """An error after the first byte: one line, after which the stream just ends."""
    return error_body(error, request_id) + b"\n"
