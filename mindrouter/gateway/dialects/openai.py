"""OpenAI's forms: what an error, a list of models and a waiting comment look like."""

from __future__ import annotations

from typing import Any

import msgspec

from mindrouter.gateway.errors import GatewayError

NAME = "openai"
_encode = msgspec.json.Encoder().encode

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}


def error_type(status: int) -> str:
    """OpenAI's word for the kind of an error with this status."""
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_object(error: GatewayError) -> dict[str, Any]:
    """The object that both an error's body and an error event hold."""
    return {
        "error": {
            "message": error.message,
            "type": error_type(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


def error_body(error: GatewayError) -> bytes:
    return _encode(error_object(error))


def error_event(error: GatewayError) -> bytes:
    """An error after the first byte: one event, after which the stream just ends."""
    return b"data: " + error_body(error) + b"\n\n"


def waiting_comment(position: int, seconds: float | None) -> bytes:
    """A line that SDKs skip and that keeps a waiting stream's connection alive."""
    estimate = "" if seconds is None else f" estimate={seconds:.0f}s"
    return f": queued position={position}{estimate}\n\n".encode()


def model_object(name: str, **known: Any) -> dict[str, Any]:
    """An entry of ``/v1/models``. ``known``: further facts, of which None ones are left out."""
    extras = {key: value for key, value in known.items() if value is not None}
    return {"id": name, "object": "model", "created": 0, "owned_by": "mindrouter", **extras}
