"""Ollama's lists of models, as far as a router can fill them in, and what it refuses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from mindrouter.gateway.errors import GatewayError
from scheduler.core.jobs import ModelSpec

#: Clients compare it to learn what they may use.
VERSION = "0.12.0"
#: When a model was changed, or will be unloaded, is not known; clients want a moment all the same.
_UNKNOWN_TIME = "1970-01-01T00:00:00Z"
_NEVER = "9999-12-31T23:59:59Z"
#: Addresses that change which models there are.
MANAGING = frozenset({"/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"})
_encode = msgspec.json.Encoder().encode


def version_body() -> bytes:
    return _encode({"version": VERSION})


def tags_body(models: Iterable[tuple[str, ModelSpec]]) -> bytes:
    """``/api/tags``: the models that may be asked for, by the names to ask by."""
    return _encode({"models": [_listed(name, spec) for name, spec in models]})


def ps_body(models: Iterable[tuple[str, ModelSpec]]) -> bytes:
    """``/api/ps``: the models that are loaded somewhere."""
    return _encode({"models": [_running(name, spec) for name, spec in models]})


def show_body(spec: ModelSpec) -> bytes:
    """``/api/show``."""
    info: dict[str, Any] = {"general.architecture": "unknown"}
    if spec.context_length is not None:
        info["unknown.context_length"] = spec.context_length
    return _encode(
        {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": _details(),
            "model_info": info,
            "capabilities": capabilities(spec),
            "modified_at": _UNKNOWN_TIME,
        }
    )


def read_show(body: bytes) -> str:
    """The model that ``/api/show`` is asked about. Raises: GatewayError."""
    try:
        asked = _show.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        message = f"The body must be an object with a 'model': {error}."
        raise GatewayError("invalid_request", message, param="model") from None
    if not (name := asked.model or asked.name):
        raise GatewayError("invalid_request", "'model' is missing.", param="model")
    return name


def managing_refused() -> GatewayError:
    return GatewayError(
        "permission_denied",
        "Models are put on the servers by their administrator, not through the router.",
    )


def capabilities(spec: ModelSpec) -> list[str]:
    """Ollama's words for what a model is known to be able to do."""
    known = ["embedding"] if spec.embeddings else ["completion"]
    return known + [name for name in ("tools", "vision") if getattr(spec, name)]


class _Show(msgspec.Struct):
    model: str | None = None
    name: str | None = None  # the older word for it


_show = msgspec.json.Decoder(_Show)


def _listed(name: str, spec: ModelSpec) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": _UNKNOWN_TIME,
        "size": 0 if spec.vram_mib is None else int(spec.vram_mib * 1024 * 1024),
        # of the name: clients show its beginning and tell models apart by it
        "digest": hashlib.sha256(name.encode("utf-8", "replace")).hexdigest(),
        "details": _details(),
        "capabilities": capabilities(spec),
    }


def _running(name: str, spec: ModelSpec) -> dict[str, Any]:
    entry = _listed(name, spec)
    entry |= {"expires_at": _NEVER, "size_vram": entry["size"]}
    if spec.context_length is not None:
        entry["context_length"] = spec.context_length
    return entry


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }
