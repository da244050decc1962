"""llama.cpp's server: one model (or, in router mode, several) with a fixed number of slots."""

from __future__ import annotations

from itertools import chain
from typing import Any

from backends.engines.observation import ModelInfo, Observation
from backends.engines.openai import MODELS, listed
from backends.engines.replies import (
    Question,
    Replies,
    count,
    first_present,
    json_of,
    mapping,
    mappings,
    names,
    positive,
    samples,
    text,
    texts,
    total,
    yes_no,
)

HEALTH = Question("/health")
PROPS = Question("/props")
METRICS = Question("/metrics")
SLOTS = Question("/slots")
QUESTIONS = (HEALTH, MODELS, PROPS, METRICS)

_RUNNING = "llamacpp:requests_processing"
_WAITING = "llamacpp:requests_deferred"
_WANTED = frozenset({_RUNNING, _WAITING})


def follow_up(replies: Replies) -> tuple[Question, ...]:
    """Whether it makes embeddings and reranks, once; and its slots where it was started without
    metrics.

    Neither is asked of a sleeping server: reading the slots would wake it (metrics do not).
    """
    props = mapping(json_of(replies, PROPS))
    if not props or props.get("is_sleeping") is True:
        return ()
    questions = [_trying("/v1/embeddings", props), _trying("/v1/rerank", props)]
    if not samples(replies, METRICS, _WANTED):
        questions.append(SLOTS)
    return tuple(questions)


def _trying(path: str, props: dict[str, Any]) -> Question:
    # An empty request is turned down at once: 501 where it is off, 400 where it is on.
    identity = f"{props.get('build_info')} {props.get('model_path')} {props.get('model_alias')}"
    return Question(path, "POST", b"{}", cache=identity)


def parse(replies: Replies) -> Observation:
    """JSON schemas are always obeyed. VRAM is not told."""
    props = mapping(json_of(replies, PROPS))
    found = samples(replies, METRICS, _WANTED)
    slots = mappings(json_of(replies, SLOTS))
    sleeping = yes_no(props.get("is_sleeping"))
    entries = listed(replies)
    return Observation(
        models=None if entries is None else _models(replies, props, entries),
        loaded=None if entries is None else _loaded(entries, sleeping),
        running=count(total(first_present(found, _RUNNING))) if found else _busy(slots),
        waiting=count(total(first_present(found, _WAITING))),
        slots=positive(props.get("total_slots")) or len(slots) or None,
        version=text(props.get("build_info")),
        sleeping=sleeping,
    )


def _models(
    replies: Replies, props: dict[str, Any], entries: list[tuple[str, dict[str, Any]]]
) -> tuple[ModelInfo, ...]:
    modalities = mapping(props.get("modalities"))
    caps = mapping(props.get("chat_template_caps"))
    settings = mapping(props.get("default_generation_settings"))
    return tuple(
        ModelInfo(
            name=name,
            vision=yes_no(modalities.get("vision")),
            transcription=yes_no(modalities.get("audio")),
            tools=yes_no(caps.get("supports_tools")),
            json=True,
            embeddings=_does(replies, "/v1/embeddings", props),
            rerank=_does(replies, "/v1/rerank", props),
            context_length=positive(mapping(entry.get("meta")).get("n_ctx"))
            or positive(settings.get("n_ctx")),
            detailed=bool(props),
        )
        for name, entry in names(_with_aliases(entries))
    )


def _with_aliases(
    entries: list[tuple[str, dict[str, Any]]],
) -> list[tuple[str, dict[str, Any]]]:
    aliases = ((alias, e) for _, e in entries for alias in texts(e.get("aliases")) or ())
    return list(chain(entries, aliases))


def _loaded(
    entries: list[tuple[str, dict[str, Any]]], sleeping: bool | None
) -> dict[str, float | None]:
    """All that is listed, unless it sleeps; in router mode each model tells its own state."""
    if sleeping:
        return {}
    return {
        name: None
        for name, entry in _with_aliases(entries)
        if mapping(entry.get("status")).get("value", "loaded") == "loaded"
    }


def _does(replies: Replies, path: str, props: dict[str, Any]) -> bool | None:
    reply = replies.get(_trying(path, props))
    return {501: False, 400: True}.get(reply.status) if reply else None


def _busy(slots: list[dict[str, Any]]) -> int | None:
    return sum(slot.get("is_processing") is True for slot in slots) if slots else None
