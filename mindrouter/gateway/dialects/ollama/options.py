"""Ollama's ``options``, ``format`` and ``think`` → the fields that OpenAI's form has for them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mindrouter.gateway.dialects.strict import (
    Strict,
    cannot_translate,
    given,
    is_object,
    is_text,
    malformed,
    text_of,
)
from mindrouter.gateway.dialects.translation import json_schema_format, thinking_fields

_Number = int | float


class Options(Strict):
    """Ollama's model options, those that it no longer heeds included."""

    # how a model is loaded and run
    numa: bool | None = None
    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None
    num_thread: int | None = None
    num_keep: int | None = None
    # what it generates
    num_predict: int | None = None
    seed: int | None = None
    temperature: _Number | None = None
    top_k: int | None = None
    top_p: _Number | None = None
    min_p: _Number | None = None
    stop: str | list[str] | None = None
    repeat_penalty: _Number | None = None
    presence_penalty: _Number | None = None
    frequency_penalty: _Number | None = None
    # samplers that only llama.cpp has
    tfs_z: _Number | None = None
    typical_p: _Number | None = None
    repeat_last_n: int | None = None
    mirostat: int | None = None
    mirostat_tau: _Number | None = None
    mirostat_eta: _Number | None = None
    penalize_newline: bool | None = None


#: Decided by whoever set the backend up; they change how fast it is, not what it says.
_RUNNING = (
    *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all"),
    *("vocab_only", "use_mmap", "use_mlock", "embedding_only", "num_thread", "num_keep"),
)
_SAME_NAME = (
    *("seed", "temperature", "top_k", "top_p", "min_p", "stop"),
    *("presence_penalty", "frequency_penalty"),
)
#: Samplers without a counterpart, and the value that switches each off.
_OFF: dict[str, Any] = {"tfs_z": 1, "typical_p": 1, "mirostat": 0, "penalize_newline": False}
_TUNING_OF_MIROSTAT = ("mirostat_tau", "mirostat_eta")


def sampling_fields(options: Options | None, without: set[str]) -> dict[str, Any]:
    """``without`` gets what is left out. Raises: GatewayError."""
    if options is None:
        return {}
    _note_all(options, _RUNNING, without)
    for name, off in _OFF.items():
        if getattr(options, name) not in (None, off):
            raise cannot_translate(f"options.{name}")
    if options.repeat_last_n is not None:
        raise cannot_translate("options.repeat_last_n")
    _note_all(options, _TUNING_OF_MIROSTAT, without)  # it is off
    body = {name: value for name in _SAME_NAME if (value := getattr(options, name)) is not None}
    if options.num_predict is not None and options.num_predict >= 0:
        body["max_tokens"] = options.num_predict  # less than 0: no limit, as without the field
    if options.repeat_penalty is not None:
        # vLLM and SGLang know it by the first name, llama.cpp by the second.
        body["repetition_penalty"] = body["repeat_penalty"] = options.repeat_penalty
    return body


def _note_all(options: Options, names: tuple[str, ...], without: set[str]) -> None:
    without.update(f"options.{name}" for name in names if getattr(options, name) is not None)


def format_fields(raw: msgspec.Raw) -> dict[str, Any]:
    """``format``: "json", a schema, or nothing. Raises: GatewayError."""
    if not given(raw) or bytes(raw) == b'""':
        return {}
    if is_object(raw):
        return {"response_format": json_schema_format(raw, strict=True)}
    if is_text(raw) and text_of(raw) == "json":
        return {"response_format": {"type": "json_object"}}
    raise malformed("format", "'json' or a JSON schema is expected")


def think_fields(think: bool | Literal["low", "medium", "high"] | None) -> dict[str, Any]:
    if isinstance(think, str):
        return thinking_fields(True, think)
    return thinking_fields(think)
