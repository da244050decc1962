"""Ollama's own interface. It tells what is on disk and what is loaded, but not what runs."""

from __future__ import annotations

from typing import Any

import msgspec

from backends.engines.observation import ModelInfo, Observation
from backends.engines.replies import (
    Question,
    Replies,
    json_of,
    mapping,
    mappings,
    mib,
    names,
    positive,
    text,
    texts,
)

VERSION = Question("/api/version")
TAGS = Question("/api/tags")
LOADED = Question("/api/ps")
QUESTIONS = (VERSION, TAGS, LOADED)


class _Show(msgspec.Struct):
    """What is read of ``/api/show``, which also carries licences and templates."""

    capabilities: Any = None
    model_info: Any = None


def follow_up(replies: Replies) -> tuple[Question, ...]:
    """The details of each model, which hold as long as its digest and the server's version do."""
    return tuple(
        _show(replies, name, entry)
        for name, entry in _on_disk(replies) or ()
        if texts(entry.get("capabilities")) is None
    )


def _show(replies: Replies, name: str, entry: dict[str, Any]) -> Question:
    digest = text(entry.get("digest"), 200) or text(entry.get("modified_at"))
    body = msgspec.json.encode({"model": name})
    return Question("/api/show", "POST", body, cache=f"{_version(replies)} {digest}")


def parse(replies: Replies) -> Observation:
    """How much runs and waits, how many slots there are and the GPU's size are not told."""
    on_disk, running = _on_disk(replies), _entries(replies, LOADED)
    loaded = None if running is None else dict(running)
    return Observation(
        models=None
        if on_disk is None
        else tuple(_model(replies, name, e, (loaded or {}).get(name)) for name, e in on_disk),
        loaded=None
        if loaded is None
        else {name: mib(entry.get("size_vram")) for name, entry in loaded.items()},
        version=_version(replies),
    )


def _version(replies: Replies) -> str:
    return text(mapping(json_of(replies, VERSION)).get("version"))


def _on_disk(replies: Replies) -> list[tuple[str, dict[str, Any]]] | None:
    return _entries(replies, TAGS)


def _entries(replies: Replies, question: Question) -> list[tuple[str, dict[str, Any]]] | None:
    entries = mapping(json_of(replies, question)).get("models")
    if not isinstance(entries, list):
        return None
    return list(names((e.get("name") or e.get("model"), e) for e in mappings(entries)))


def _model(
    replies: Replies, name: str, entry: dict[str, Any], loaded: dict[str, Any] | None
) -> ModelInfo:
    show = json_of(replies, _show(replies, name, entry), _Show) or _Show()
    listed_capabilities = texts(entry.get("capabilities"))
    told = texts(show.capabilities) if listed_capabilities is None else listed_capabilities
    return ModelInfo(
        name=name,
        vision=_has(told, "vision"),
        tools=_has(told, "tools"),
        json=_has(told, "completion"),  # `format` works with whatever completes
        embeddings=_has(told, "embedding"),
        images=_has(told, "image"),
        context_length=positive((loaded or {}).get("context_length")),
        context_limit=_context_limit(entry, show),
        vram_mib=mib((loaded or {}).get("size")),
        vram_at_least_mib=mib(entry.get("size")),
        detailed=told is not None,
    )


def _has(told: list[str] | None, capability: str) -> bool | None:
    """An empty list comes from versions that do not tell capabilities."""
    return capability in told if told else None


def _context_limit(entry: dict[str, Any], show: _Show) -> int | None:
    info = mapping(show.model_info)
    architecture = text(info.get("general.architecture"))
    return positive(info.get(f"{architecture}.context_length")) or positive(
        mapping(entry.get("details")).get("context_length")
    )
