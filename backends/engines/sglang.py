"""SGLang: model facts and load, per data-parallel rank, as JSON."""

from __future__ import annotations

from typing import Any

from backends.engines.observation import ModelInfo, Observation
from backends.engines.openai import MODELS, context_of, listed
from backends.engines.replies import (
    Question,
    Replies,
    count,
    first_present,
    json_of,
    mapping,
    mappings,
    mean,
    number,
    positive,
    samples,
    text,
    total,
    yes_no,
)

HEALTH = Question("/health")
INFO = Question("/model_info")
OLDER_INFO = Question("/get_model_info")
LOADS = Question("/v1/loads?include=core,memory,queues")
METRICS = Question("/metrics")  # only there with --enable-metrics
QUESTIONS = (HEALTH, MODELS, INFO, LOADS)

_RUNNING = "sglang:num_running_reqs"
_WAITING = "sglang:num_queue_reqs"
_KV_USE = "sglang:token_usage"
_WANTED = frozenset({_RUNNING, _WAITING, _KV_USE})


def follow_up(replies: Replies) -> tuple[Question, ...]:
    """Older names and the metrics page, where the newer paths are not served."""
    questions = []
    if not mapping(json_of(replies, INFO)):
        questions.append(OLDER_INFO)
    if not _loads(replies):
        questions.append(METRICS)
    return tuple(questions)


def parse(replies: Replies) -> Observation:
    """Counts are summed over the ranks, the use of the KV cache is their mean."""
    models = listed(replies)
    info = mapping(json_of(replies, INFO)) or mapping(json_of(replies, OLDER_INFO))
    return Observation(
        models=None
        if models is None
        else tuple(_model(name, entry, info) for name, entry in models),
        loaded=None if models is None else {name: None for name, _ in models},
        version=text(mapping(json_of(replies, LOADS)).get("version")),
        **(_load_told(_loads(replies)) or _load_measured(replies)),
    )


def _model(name: str, entry: dict[str, Any], info: dict[str, Any]) -> ModelInfo:
    generates = yes_no(info.get("is_generation"))
    parser = info.get("tool_call_parser", 0)
    return ModelInfo(
        name=name,
        vision=yes_no(info.get("has_image_understanding")),
        # Without a parser, tool calls come back as plain text.
        tools=bool(parser) if parser is None or isinstance(parser, str) else None,
        json=True,
        embeddings=None if generates is None else not generates,
        context_length=context_of(entry),
        detailed=bool(info),
    )


def _loads(replies: Replies) -> list[dict[str, Any]]:
    return mappings(mapping(json_of(replies, LOADS)).get("loads"))


def _load_told(loads: list[dict[str, Any]]) -> dict[str, Any]:
    if not loads:
        return {}

    def of(name: str) -> list[float | None]:
        return [number(load.get(name)) for load in loads]

    return {
        "running": count(total(of("num_running_reqs"))),
        "waiting": count(total(of("num_waiting_reqs"))),
        "slots": positive(total(of("max_running_requests"))),
        "kv_use": number(mean(of("token_usage")), 1.0),
    }


def _load_measured(replies: Replies) -> dict[str, Any]:
    found = samples(replies, METRICS, _WANTED)
    return {
        "running": count(total(first_present(found, _RUNNING))),
        "waiting": count(total(first_present(found, _WAITING))),
        "kv_use": number(mean(first_present(found, _KV_USE)), 1.0),
    }
