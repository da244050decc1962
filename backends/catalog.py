"""From stored rows to what the scheduler knows of a backend: its models by name, its telemetry.

Pure: takes rows (any objects with the attributes below) and returns values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Protocol

from scheduler.core.jobs import CAPABILITIES, ModelSpec, Telemetry

#: Ollama's own rule: a name without a tag means the tag "latest".
IMPLIED_TAG = ":latest"


class ModelRow(Protocol):
    """What is read of a ``BackendModel``. None in a hand-set value is "as detected"."""

    name: str
    by_hand: bool
    listed: bool
    vision: bool | None
    tools: bool | None
    json: bool | None
    embeddings: bool | None
    rerank: bool | None
    transcription: bool | None
    speech: bool | None
    images: bool | None
    moderation: bool | None
    context_length: int | None
    vram_mib: float | None
    detected_vision: bool | None
    detected_tools: bool | None
    detected_json: bool | None
    detected_embeddings: bool | None
    detected_rerank: bool | None
    detected_transcription: bool | None
    detected_speech: bool | None
    detected_images: bool | None
    detected_moderation: bool | None
    detected_context_length: int | None
    detected_vram_mib: float | None


class StatusRow(Protocol):
    """What is read of a ``BackendStatus``."""

    observed_at: datetime | None
    answered_at: datetime | None
    reachable: bool | None
    running: int | None
    waiting: int | None
    kv_use: float | None
    gpu_use: float | None
    loaded_models: dict[str, float | None] | None
    vram_total_mib: float | None
    vram_free_mib: float | None


def models_by_name(engine: str, rows: Iterable[ModelRow]) -> dict[str, ModelSpec]:
    """Every name a client may ask this backend for, with what the backend then offers.

    A model counts when the backend lists it or an admin named it. Names are case-sensitive. On
    Ollama ``x`` and ``x:latest`` are one model under two names; nowhere else is a tag implied.
    ``engine`` is the effective one (see ``effective_engine``).
    """
    offered = [row for row in rows if row.by_hand or row.listed]
    if engine != "ollama":
        return {row.name: _spec(row.name, [row]) for row in offered}
    return _ollama_models(offered)


def effective_engine(configured: str, detected: str) -> str:
    """The engine an admin chose, else the detected one, else the plainest."""
    return configured if configured != "auto" else detected or "openai"


def with_tag(name: str) -> str:
    """``name`` as Ollama stores it: "llama3.2" -> "llama3.2:latest".

    Only the last part may carry a tag: in "host:5000/library/x" the colon belongs to a port.
    """
    return name if ":" in name.rpartition("/")[2] else name + IMPLIED_TAG


def _ollama_models(rows: Sequence[ModelRow]) -> dict[str, ModelSpec]:
    same: dict[str, list[ModelRow]] = {}
    for row in rows:
        same.setdefault(with_tag(row.name), []).append(row)
    models: dict[str, ModelSpec] = {}
    for tagged, group in same.items():
        # What the server itself lists is the name it is sure to know.
        group.sort(key=lambda row: not row.listed)
        spec = _spec(group[0].name, group)
        models[tagged] = spec
        models[tagged.removesuffix(IMPLIED_TAG)] = spec
    return models


def _spec(name: str, rows: Sequence[ModelRow]) -> ModelSpec:
    """One model from its rows: hand-set values first, then detected ones, in the rows' order."""
    known = {field: _first(field, rows) for field in (*CAPABILITIES, "context_length", "vram_mib")}
    return ModelSpec(name=name, **known)


def _first(field: str, rows: Sequence[ModelRow]) -> Any:
    values = [getattr(row, prefix + field) for prefix in ("", "detected_") for row in rows]
    return next((value for value in values if value is not None), None)


def polled(engine: str, status: StatusRow) -> tuple[datetime, Telemetry] | None:
    """When the last poll that still counts began, and what it said (its ``observed_at`` is 0: the
    caller puts it on the scheduler's clock). None when no poll was ever answered.

    After a refused connection all that is known is that nothing runs there: older numbers belong
    to a server that is gone. After a time-out the last good numbers stand, with their age.
    """
    if status.reachable is False and status.answered_at is not None:
        return status.answered_at, Telemetry(observed_at=0.0, reachable=False)
    if status.observed_at is None:
        return None
    return status.observed_at, Telemetry(
        observed_at=0.0,
        reachable=status.reachable,
        running=status.running,
        waiting=status.waiting,
        loaded_models=_loaded_names(engine, status.loaded_models),
        vram_free_mib=available_mib(engine, status),
        vram_total_mib=status.vram_total_mib,
        utilization=status.kv_use if status.kv_use is not None else status.gpu_use,
    )


def available_mib(engine: str, status: StatusRow) -> float | None:
    """The memory that a model which is not loaded can have, in MiB.

    Ollama makes room by itself: it unloads what is idle, and lets a request wait while nothing is.
    So what its loaded models take counts as available too. The other engines keep what they have.
    """
    free, total = status.vram_free_mib, status.vram_total_mib
    if free is None or engine != "ollama" or not status.loaded_models:
        return free
    available = free + sum(size for size in status.loaded_models.values() if size is not None)
    # Polls of the node and of Ollama differ in age, so that a model may be counted twice.
    return available if total is None else min(available, total)


def _loaded_names(engine: str, loaded: dict[str, float | None] | None) -> frozenset[str] | None:
    """The loaded models under every name that ``ModelSpec.name`` may have for them."""
    if loaded is None:
        return None
    if engine != "ollama":
        return frozenset(loaded)
    tagged = {with_tag(name) for name in loaded}
    return frozenset(tagged | {name.removesuffix(IMPLIED_TAG) for name in tagged})
