"""vLLM, from V0 to 0.32: model list, metrics page, and the paths that it serves."""

from __future__ import annotations

import msgspec

from backends.engines.observation import ModelInfo, Observation
from backends.engines.openai import MODELS, context_of, listed
from backends.engines.replies import (
    Question,
    Replies,
    Sample,
    count,
    first_present,
    json_of,
    mapping,
    mean,
    number,
    samples,
    text,
    total,
)

HEALTH = Question("/health")
VERSION = Question("/version")
METRICS = Question("/metrics")
QUESTIONS = (HEALTH, MODELS, VERSION, METRICS)

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_SWAPPED = "vllm:num_requests_swapped"  # V0: taken off the GPU, waiting to go on
_KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # newest name first
_SLEEP = "vllm:engine_sleep_state"
_WANTED = frozenset({_RUNNING, _WAITING, _SWAPPED, *_KV_USE, _SLEEP})

_PATHS = {
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "transcription": "/v1/audio/transcriptions",
    "speech": "/v1/audio/speech",
    "images": "/v1/images/generations",
    "moderation": "/v1/moderations",
}


class _Description(msgspec.Struct):
    """What is read of ``/openapi.json``."""

    paths: dict[str, msgspec.Raw]


def follow_up(replies: Replies) -> tuple[Question, ...]:
    """Its own description, once per version and model."""
    models = listed(replies)
    if not models:
        return ()
    return (_description(replies, models[0][0]),)


def _description(replies: Replies, model_name: str) -> Question:
    return Question("/openapi.json", cache=f"{_version(replies)} {model_name}")


def parse(replies: Replies) -> Observation:
    """Counts are summed over the engines (data-parallel replicas), the KV-cache use is their mean.

    Every model can be held to a JSON schema. Vision and tools are not told: unknown.
    """
    found = samples(replies, METRICS, _WANTED)
    models = listed(replies)
    sleeping = _sleeping(found)
    able = _able(replies, models[0][0]) if models else {}
    kv_use = mean(first_present(found, *_KV_USE))
    return Observation(
        models=None
        if models is None
        else tuple(
            ModelInfo(name=name, json=True, context_length=context_of(entry), **able)
            for name, entry in models
        ),
        loaded=None if models is None or sleeping else {name: None for name, _ in models},
        running=count(total(first_present(found, _RUNNING))),
        waiting=_waiting(found),
        kv_use=number(kv_use, 1.0),
        version=_version(replies),
        sleeping=sleeping,
        unready="asleep until it is woken" if sleeping else "",
    )


def _version(replies: Replies) -> str:
    return text(mapping(json_of(replies, VERSION)).get("version"))


def _waiting(found: list[Sample]) -> int | None:
    waiting = total(first_present(found, _WAITING))
    return (
        None if waiting is None else count(waiting + (total(first_present(found, _SWAPPED)) or 0))
    )


def _sleeping(found: list[Sample]) -> bool | None:
    """True when no engine is awake. `/health` says 200 all the same."""
    awake = [s.value for s in found if s.name == _SLEEP and s.labels.get("sleep_state") == "awake"]
    return not any(value > 0 for value in awake) if awake else None


def _able(replies: Replies, model_name: str) -> dict[str, bool]:
    """What the model is for, by the paths that are served. Newer versions serve only those of
    its tasks; older ones serve chat and embeddings whatever it is, which tells nothing."""
    described = json_of(replies, _description(replies, model_name), _Description)
    if described is None:
        return {}
    served = {capability for capability, path in _PATHS.items() if path in described.paths}
    chats = "/v1/chat/completions" in described.paths
    if chats == ("embeddings" in served) and (chats or not served):
        return {}
    return {capability: capability in served for capability in _PATHS}
