"""Any server with OpenAI's paths. It lists its models and tells little else."""

from __future__ import annotations

from typing import Any

from backends.engines.observation import ModelInfo, Observation
from backends.engines.replies import Question, Replies, json_of, mapping, mappings, names, positive

MODELS = Question("/v1/models")
QUESTIONS = (MODELS,)

#: Names under which servers tell a model's context; none is standard.
_CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window")


def listed(replies: Replies) -> list[tuple[str, dict[str, Any]]] | None:
    """The entries of ``/v1/models`` by name, or None when it is not a list of models."""
    entries = mapping(json_of(replies, MODELS)).get("data")
    if not isinstance(entries, list):
        return None
    return list(names((entry.get("id"), entry) for entry in mappings(entries)))


def context_of(entry: dict[str, Any]) -> int | None:
    return next((n for n in (positive(entry.get(f)) for f in _CONTEXT_FIELDS) if n), None)


def follow_up(replies: Replies) -> tuple[Question, ...]:
    return ()


def parse(replies: Replies) -> Observation:
    """Capabilities stay unknown: nothing on this interface tells them."""
    models = listed(replies)
    if models is None:
        return Observation()
    return Observation(
        models=tuple(ModelInfo(name=name, context_length=context_of(e)) for name, e in models)
    )
