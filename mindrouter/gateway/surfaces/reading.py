"""The bodies of addresses that make something else than text → what scheduling needs."""

from __future__ import annotations

from typing import Any

import msgspec

from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.requests import (
    MEDIA_TOKENS,
    Asked,
    estimate_tokens,
    read_count,
    read_fields,
    read_model,
    typed_field,
)
from mindrouter.gateway.surfaces import estimates
from mindrouter.gateway.surfaces.form import Form, malformed
from scheduler.core.jobs import Needs, Task

Fields = dict[str, msgspec.Raw]
#: What engines call the two sides of a comparison: vLLM's older and newer names, SGLang's.
_SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("query", "items"))
#: What is read of a form, besides what it is for.
FORM_FIELDS = frozenset({"model", "stream", "user", "safety_identifier", "prompt", "n", "size"})
_YES = frozenset({"true", "1", "yes", "on"})
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def read_rerank(body: bytes, header_cache_key: str | None) -> Asked:
    """``/v1/rerank``. Raises: GatewayError."""
    fields = read_fields(body)
    query = _required(fields, "query")
    documents = _required(fields, "documents" if "texts" not in fields else "texts")
    return _asked(fields, "rerank", estimates.pair_tokens(query, documents))


def read_score(body: bytes, header_cache_key: str | None) -> Asked:
    """``/v1/score``. Raises: GatewayError."""
    fields = read_fields(body)
    for left, right in _SIDES:
        if left in fields and right in fields:
            tokens = estimates.pair_tokens(_value(fields, left), _value(fields, right))
            return _asked(fields, "rerank", tokens)
    return _asked(fields, "rerank", estimate_tokens(len(body)))  # the backend may understand it


def read_moderation(body: bytes, header_cache_key: str | None) -> Asked:
    """``/v1/moderations``. Raises: GatewayError."""
    fields = read_fields(body)
    tokens = estimates.input_tokens(_required(fields, "input"))
    return _asked(fields, "moderation", tokens, needs_model=False)


def read_speech(body: bytes, header_cache_key: str | None) -> Asked:
    """``/v1/audio/speech``. Raises: GatewayError."""
    fields = read_fields(body)
    text = typed_field(fields, "input", str, "a text")
    if not text:
        raise malformed("'input' is missing.", "input")
    asked = _asked(fields, "speech", estimates.input_tokens(text))
    asked.max_tokens = estimates.spoken_tokens(text)
    asked.stream = typed_field(fields, "stream_format", str, "a text") == "sse"
    return asked


def read_images(body: bytes, header_cache_key: str | None) -> Asked:
    """``/v1/images/generations``, and edits whose images are named by links.

    Raises: GatewayError.
    """
    fields = read_fields(body)
    prompt = _required(fields, "prompt")
    images = _value(fields, "images") if "images" in fields else []
    media = MEDIA_TOKENS * len(images) if isinstance(images, list) else MEDIA_TOKENS
    asked = _asked(fields, "images", estimates.input_tokens(prompt) + media, needs_model=False)
    size = typed_field(fields, "size", str, "a text")
    asked.max_tokens = estimates.image_tokens(read_count(fields, "n", 1) or 1, size)
    asked.stream = typed_field(fields, "stream", bool, "true or false") or False
    return asked


# ---- forms


def read_audio_form(form: Form) -> Asked:
    """``/v1/audio/transcriptions`` and ``translations``. Raises: GatewayError."""
    if form.files == 0:
        raise malformed("'file' is missing.", "file")
    tokens = estimates.audio_file_tokens(form.file_bytes)
    asked = _asked_by_form(form, "transcription", tokens)
    asked.max_tokens = None  # nobody knows how much is said in it
    return asked


def read_image_form(form: Form) -> Asked:
    """``/v1/images/edits`` and ``variations``. Raises: GatewayError."""
    if form.files == 0:
        raise malformed("'image' is missing.", "image")
    prompt = estimates.input_tokens(form.fields.get("prompt", ""))
    asked = _asked_by_form(form, "images", prompt + MEDIA_TOKENS * form.files)
    count = form.fields.get("n") or "1"
    if not (count.isascii() and count.isdigit() and int(count[:9]) > 0 and len(count) < 10):
        raise malformed("'n' must be a whole number of at least 1.", "n")
    asked.max_tokens = estimates.image_tokens(int(count), form.fields.get("size"))
    return asked


def _asked_by_form(form: Form, task: Task, tokens: int) -> Asked:
    texts = ("model", "user", "safety_identifier")
    read = {name: form.fields[name] for name in texts if name in form.fields}
    asked = _asked({name: msgspec.Raw(_encode(text)) for name, text in read.items()}, task, tokens)
    asked.stream = form.fields.get("stream", "").strip().lower() in _YES
    return asked


# ---- parts of it


def _asked(fields: Fields, task: Task, tokens: int, *, needs_model: bool = True) -> Asked:
    """Without its model only where OpenAI's own API has a usual one: then the model is ""."""
    named = needs_model or fields.get("model") not in (None, msgspec.Raw(b"null"))
    return Asked(
        model=read_model(fields) if named else "",
        stream=False,
        wants_usage=True,  # there is no other kind of stream here
        needs=Needs(task=task),
        prompt_tokens=max(1, tokens),
        max_tokens=0,
        cache_key=None,
        fields=fields,
        context_tokens=0,  # one of many texts has to fit, or none: the backend knows
    )


def _required(fields: Fields, name: str) -> Any:
    value = _value(fields, name) if name in fields else None
    if value is None or value == []:
        raise malformed(f"'{name}' is missing.", name)
    return value


def _value(fields: Fields, name: str) -> Any:
    try:
        return _decode(fields[name])
    except (msgspec.DecodeError, RecursionError) as error:
        raise malformed(f"'{name}' is not valid: {error}.", name) from None


def choose_model(asked: Asked, names: list[str]) -> None:
    """Name the model of a request that came without one, if there is no choice.

    Raises: GatewayError.
    """
    if len(names) != 1:
        why = "no model is known to do this" if not names else f"there are {', '.join(names[:5])}"
        raise GatewayError("invalid_request", f"'model' is missing; {why}.", param="model")
    asked.model = names[0]
    asked.fields = {**asked.fields, "model": msgspec.Raw(_encode(asked.model))}
