"""What scheduling needs of a Messages request, whichever form it will be passed on in."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from mindrouter.gateway.dialects.strict import given, is_text
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.requests import (
    MEDIA_TOKENS,
    TOKENS_PER_MESSAGE,
    Asked,
    Opening,
    cache_key_of,
    decode_field,
    estimate_tokens,
    read_count,
    read_fields,
    read_model,
    typed_field,
)
from scheduler.core.jobs import Needs

_NULL = msgspec.Raw(b"null")
_MEDIA = frozenset({"image", "document"})
#: A message has tool results in it, those have what a search found, and that has texts. Of what is
#: deeper only the bytes count: to look into each of hundreds reads the innermost hundreds of times.
_DEEPEST = 3


class _Message(msgspec.Struct):
    role: str
    content: msgspec.Raw = _NULL


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    input: msgspec.Raw = _NULL
    content: msgspec.Raw = _NULL


class _Choice(msgspec.Struct):
    type: str


class _OutputConfig(msgspec.Struct):
    format: msgspec.Raw = _NULL


_messages = msgspec.json.Decoder(list[_Message])
_blocks = msgspec.json.Decoder(list[_Block])


def read_messages(body: bytes, header_cache_key: str | None) -> Asked:
    """``/v1/messages``. Raises: GatewayError."""
    fields = read_fields(body)
    max_tokens = read_count(fields, "max_tokens", 1)
    if max_tokens is None:
        raise GatewayError("invalid_request", "'max_tokens' is missing.", param="max_tokens")
    return _asked(fields, header_cache_key, max_tokens)


def read_count_tokens(body: bytes, header_cache_key: str | None) -> Asked:
    """``/v1/messages/count_tokens``, which generates nothing. Raises: GatewayError."""
    asked = _asked(read_fields(body), header_cache_key, 0)
    asked.stream = False
    return asked


def _asked(fields: dict[str, msgspec.Raw], header_cache_key: str | None, max_tokens: int) -> Asked:
    raw = fields.get("messages", _NULL)
    messages = decode_field(_messages.decode, raw, "messages", "a list of messages")
    if not messages:
        raise GatewayError("invalid_request", "'messages' is empty.", param="messages")
    weight = _Weight()
    for message in messages:
        weight.add(message.content, "messages")
    weight.add(fields.get("system", _NULL), "system")
    tools = _has_tools(fields)
    if tools:
        weight.text_bytes += len(memoryview(fields["tools"]))
    tokens = weight.tokens + TOKENS_PER_MESSAGE * len(messages)
    return Asked(
        model=read_model(fields),
        stream=typed_field(fields, "stream", bool, "true or false") or False,
        wants_usage=True,  # the form always carries it, so nothing is added and nothing hidden
        needs=Needs(vision=weight.vision, tools=tools, json=_wants_json(fields)),
        prompt_tokens=max(1, tokens),
        max_tokens=max_tokens,
        cache_key=header_cache_key or cache_key_of(lambda: _opening(fields, messages), tokens),
        fields=fields,
    )


@dataclass(slots=True)
class _Weight:
    text_bytes: int = 0
    media: int = 0
    vision: bool = False

    @property
    def tokens(self) -> int:
        return estimate_tokens(self.text_bytes) + MEDIA_TOKENS * self.media

    def add(self, content: msgspec.Raw, param: str, depth: int = 0) -> None:
        """Count a content: null, a text, or blocks, of which tool results have their own."""
        if not given(content):
            return
        if is_text(content):
            self.text_bytes += len(memoryview(content)) - 2
            return
        if depth == _DEEPEST:
            self.text_bytes += len(memoryview(content))
            return
        for block in decode_field(_blocks.decode, content, param, "a text or content blocks"):
            if block.type in _MEDIA:
                self.media += 1
                self.vision = self.vision or block.type == "image"
                continue
            for text in (block.text, block.thinking):
                self.text_bytes += len(text.encode("utf-8", "replace")) if text else 0
            if given(block.input):
                self.text_bytes += len(memoryview(block.input))
            self.add(block.content, param, depth + 1)


def _has_tools(fields: dict[str, msgspec.Raw]) -> bool:
    tools = typed_field(fields, "tools", list[msgspec.Raw], "a list of tools")
    if not tools:
        return False
    choice = typed_field(fields, "tool_choice", _Choice, "an object with a 'type'")
    return choice is None or choice.type != "none"


def _wants_json(fields: dict[str, msgspec.Raw]) -> bool:
    config = typed_field(fields, "output_config", _OutputConfig, "an object")
    return (config is not None and given(config.format)) or given(
        fields.get("output_format", _NULL)
    )


def _opening(fields: dict[str, msgspec.Raw], messages: list[_Message]) -> Opening:
    """System prompt and first user message: what a conversation's cached prefix begins with."""
    first = next((m.content for m in messages if m.role == "user"), _NULL)
    return [fields.get("system", _NULL), first]
