"""Which models a client may ask for, in each dialect's form, from what is known: no backend is
asked, and nothing waits."""

from __future__ import annotations

from typing import Any

import msgspec

from mindrouter.gateway.dialects import openai
from mindrouter.gateway.dialects.ollama import models as ollama
from mindrouter.gateway.errors import GatewayError
from scheduler.core.jobs import CAPABILITIES, ModelSpec
from scheduler.serving import Serving

IMPLIED_TAG = ":latest"
_encode = msgspec.json.Encoder().encode


def visible_models(runtime: Serving, user_id: int) -> dict[str, ModelSpec]:
    """What a user may ask for, by name; aliases win over models of the same name."""
    snapshot = runtime.snapshot
    allowed = snapshot.allowed_models.get(user_id)
    specs: dict[str, ModelSpec] = dict(snapshot.listed_models)
    for alias in snapshot.aliases:
        target = snapshot.models.get(runtime.resolve_alias(alias))
        specs.pop(alias, None)
        if target is not None:
            specs[alias] = target
    return {
        name: spec for name, spec in sorted(specs.items()) if allowed is None or name in allowed
    }


def without_implied_tag(name: str, runtime: Serving) -> str:
    """In Ollama's API ``x`` and ``x:latest`` are one name; other backends know only the first."""
    snapshot = runtime.snapshot
    if name in snapshot.aliases or name in snapshot.models:
        return name
    bare = name.removesuffix(IMPLIED_TAG)
    return bare if bare in snapshot.aliases or bare in snapshot.models else name


# ---- OpenAI's and Anthropic's, at the same address


def list_body(models: dict[str, ModelSpec], *, anthropic: bool) -> bytes:
    """``GET /v1/models``."""
    listed = [_entry(name, spec, anthropic=anthropic) for name, spec in models.items()]
    if not anthropic:
        return _encode({"object": "list", "data": listed})
    ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
    return _encode({"data": listed, "has_more": False, "first_id": None, "last_id": None, **ends})


def one_body(models: dict[str, ModelSpec], name: str, *, anthropic: bool) -> bytes:
    """``GET /v1/models/{name}``. Raises: GatewayError."""
    return _encode(_entry(name, _known(models, name), anthropic=anthropic))


def _known(models: dict[str, ModelSpec], name: str) -> ModelSpec:
    spec = models.get(name)
    if spec is None:
        raise GatewayError("model_not_found", f"There is no model {name!r}.", param="model")
    return spec


def _entry(name: str, spec: ModelSpec, *, anthropic: bool) -> dict[str, Any]:
    if anthropic:
        created = "1970-01-01T00:00:00Z"  # unknown, but the form wants a moment
        return {"type": "model", "id": name, "display_name": name, "created_at": created}
    return openai.model_object(
        name,
        max_model_len=spec.context_length,
        capabilities={ability: getattr(spec, ability) for ability in CAPABILITIES},
    )


# ---- Ollama's


def tags_body(models: dict[str, ModelSpec]) -> bytes:
    """``GET /api/tags``."""
    return ollama.tags_body(models.items())


def ps_body(models: dict[str, ModelSpec], runtime: Serving) -> bytes:
    """``GET /api/ps``: those that some backend has in its memory, as far as polls know."""
    loaded = runtime.loaded_models()
    return ollama.ps_body((n, s) for n, s in models.items() if s.name in loaded)


def show_body(models: dict[str, ModelSpec], body: bytes) -> bytes:
    """``POST /api/show``. Raises: GatewayError."""
    asked = ollama.read_show(body)
    same = (asked, asked.removesuffix(IMPLIED_TAG), asked + IMPLIED_TAG)
    return ollama.show_body(_known(models, next((n for n in same if n in models), asked)))
