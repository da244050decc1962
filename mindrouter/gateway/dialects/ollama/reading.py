"""What scheduling needs of a request in Ollama's form, whichever form it will be passed on in.

Streams are Ollama's default.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import msgspec

from mindrouter.gateway.dialects.strict import given
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.requests import (
    MEDIA_TOKENS,
    MOST_TOKENS,
    TOKENS_PER_MESSAGE,
    Asked,
    Opening,
    beginnings,
    cache_key_of,
    decode_field,
    estimate_tokens,
    read_fields,
    read_model,
    typed_field,
    weigh_inputs,
)
from scheduler.core.jobs import Needs

Fields = dict[str, msgspec.Raw]
_NULL = msgspec.Raw(b"null")
_NO_PROMPT = re.compile(rb'""|\[\s*\]')


class _Message(msgspec.Struct):
    role: str
    content: msgspec.Raw = _NULL
    thinking: msgspec.Raw = _NULL
    images: list[msgspec.Raw] | None = None
    tool_calls: msgspec.Raw = _NULL

    @property
    def text_bytes(self) -> int:
        values = (self.content, self.thinking, self.tool_calls)
        return sum(len(memoryview(value)) for value in values if given(value))


class _Options(msgspec.Struct):
    num_predict: int | float | None = None


_messages = msgspec.json.Decoder(list[_Message])


def read_chat(body: bytes, header_cache_key: str | None) -> Asked:
    """``/api/chat``. Raises: GatewayError."""
    fields = read_fields(body)
    raw = fields.get("messages")
    messages = []
    if raw is not None and given(raw):
        messages = decode_field(_messages.decode, raw, "messages", "a list of messages")
    images = sum(len(message.images or ()) for message in messages)
    tools = bool(typed_field(fields, "tools", list[msgspec.Raw], "a list of tools"))
    text_bytes = sum(message.text_bytes for message in messages)
    if tools:
        text_bytes += len(memoryview(fields["tools"]))
    tokens = estimate_tokens(text_bytes) + TOKENS_PER_MESSAGE * len(messages)
    needs = Needs(vision=images > 0, tools=tools, json=_wants_json(fields))
    return _generating(
        fields,
        needs,
        tokens + MEDIA_TOKENS * images,
        header_cache_key,
        lambda: _opening(messages),
    )


def read_generate(body: bytes, header_cache_key: str | None) -> Asked:
    """``/api/generate``. Raises: GatewayError."""
    fields = read_fields(body)
    images = typed_field(fields, "images", list[msgspec.Raw], "a list of images") or ()
    texts = [fields.get(name, _NULL) for name in ("system", "prompt", "suffix")]
    text_bytes = sum(len(memoryview(text)) for text in texts if given(text))
    needs = Needs(vision=bool(images), json=_wants_json(fields))
    return _generating(
        fields,
        needs,
        estimate_tokens(text_bytes) + MEDIA_TOKENS * len(images),
        header_cache_key,
        lambda: beginnings(texts),
    )


def read_embed(body: bytes, header_cache_key: str | None) -> Asked:
    """``/api/embed``. Raises: GatewayError."""
    fields = read_fields(body)
    return _embedding(fields, *weigh_inputs(fields, "input"), header_cache_key)


def read_embeddings(body: bytes, header_cache_key: str | None) -> Asked:
    """``/api/embeddings``, the older form of it. Raises: GatewayError."""
    fields = read_fields(body)
    prompt = typed_field(fields, "prompt", str, "a text")
    if prompt is None:
        raise GatewayError("invalid_request", "'prompt' is missing.", param="prompt")
    tokens = estimate_tokens(len(prompt.encode("utf-8", "replace")))
    return _embedding(fields, tokens, tokens, header_cache_key)


def asks_to_load(asked: Asked, prompt_field: str) -> Literal["load", "unload"] | None:
    """Whether a request without a prompt asks for a model to be loaded or unloaded.

    ``prompt_field``: "messages" or "prompt".
    """
    raw = asked.fields.get(prompt_field, _NULL)
    if given(raw) and _NO_PROMPT.fullmatch(raw) is None:
        return None
    if prompt_field == "prompt" and given(asked.fields.get("images", _NULL)):
        return None
    keep = asked.fields.get("keep_alive", _NULL)
    return "unload" if bytes(keep).strip(b'"') in (b"0", b"0.0", b"0s", b"0m", b"0h") else "load"


def _generating(
    fields: Fields,
    needs: Needs,
    prompt_tokens: int,
    header_cache_key: str | None,
    opening: Callable[[], Opening],
) -> Asked:
    stream = typed_field(fields, "stream", bool, "true or false")
    options = typed_field(fields, "options", _Options, "an object of options")
    limit = options.num_predict if options is not None else None
    return Asked(
        model=read_model(fields),
        stream=True if stream is None else stream,
        wants_usage=True,  # the form always carries it, so nothing is added and nothing hidden
        needs=needs,
        prompt_tokens=max(1, prompt_tokens),
        max_tokens=min(int(limit), MOST_TOKENS) if limit is not None and limit >= 0 else None,
        cache_key=header_cache_key or cache_key_of(opening, prompt_tokens),
        fields=fields,
    )


def _embedding(
    fields: Fields, prompt_tokens: int, longest: int, header_cache_key: str | None
) -> Asked:
    return Asked(
        model=read_model(fields),
        stream=False,
        wants_usage=True,
        needs=Needs(embeddings=True),
        prompt_tokens=max(1, prompt_tokens),
        max_tokens=0,
        cache_key=header_cache_key,
        fields=fields,
        context_tokens=longest,
    )


def _wants_json(fields: Fields) -> bool:
    raw = fields.get("format", _NULL)
    return given(raw) and bytes(raw) != b'""'


def _opening(messages: list[_Message]) -> Opening:
    """System prompt and first user message: what a conversation's cached prefix begins with."""
    kept = []
    for message in messages:
        if message.role in ("system", "user"):
            kept.append(message.content)
        if message.role == "user":
            break
    return kept
