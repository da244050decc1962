"""What a poll learns, the same for every engine. None is unknown, never 0 and never no."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model as the backend describes it."""

    name: str
    vision: bool | None = None
    tools: bool | None = None
    json: bool | None = None
    embeddings: bool | None = None
    rerank: bool | None = None
    transcription: bool | None = None
    speech: bool | None = None
    images: bool | None = None
    moderation: bool | None = None
    #: Tokens, as it runs now.
    context_length: int | None = None
    #: Tokens at most: what the model could do, where it is not known what it is set to.
    context_limit: int | None = None
    #: Taken while it is loaded, wherever (GPU or not).
    vram_mib: float | None = None
    #: Known of a model that is not loaded: its weights take this much.
    vram_at_least_mib: float | None = None
    #: False: the details could not be read this time, so unknown ones say nothing new.
    detailed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One poll's answers, put together."""

    #: None: the list could not be read. Then the poll as a whole counts as failed.
    models: tuple[ModelInfo, ...] | None = None
    #: {name: VRAM in MiB, or None}
    loaded: Mapping[str, float | None] | None = None
    running: int | None = None
    waiting: int | None = None
    slots: int | None = None
    #: 0..1, of the KV cache.
    kv_use: float | None = None
    vram_total_mib: float | None = None
    vram_free_mib: float | None = None
    version: str = ""
    #: Its weights are put away. llama.cpp wakes by itself at the next request.
    sleeping: bool | None = None
    #: Why it cannot serve at present, or "".
    unready: str = ""
