"""Errors of the Responses API: OpenAI's own form, and an event of its own kind in a stream."""

from __future__ import annotations

import msgspec

from mindrouter.gateway.dialects import openai
from mindrouter.gateway.errors import GatewayError

_encode = msgspec.json.Encoder().encode


def error_body(error: GatewayError, request_id: str) -> bytes:
    """The form has no place for the request's id, which the response's header carries."""
    return openai.error_body(error)


def error_event(error: GatewayError, request_id: str, sequence_number: int = 0) -> bytes:
    """An error after the first byte: one event, after which the stream just ends.

    The public form has its fields at the top; the ``error`` object besides them is what makes
    OpenAI's SDKs raise.
    """
    told = {
        "type": "error",
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "sequence_number": sequence_number,
        **openai.error_object(error),
    }
    return b"event: error\ndata: " + _encode(told) + b"\n\n"
