"""What scheduling needs of a Responses request, whichever form it will be passed on in."""

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
_MEDIA = frozenset({"input_image", "input_file", "input_audio"})
#: What would need a backend to remember; the next request may go to another one.
_STATE = ("previous_response_id", "conversation", "prompt")


class _Item(msgspec.Struct):
    role: str | None = None
    content: msgspec.Raw = _NULL
    output: msgspec.Raw = _NULL
    arguments: str | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Format(msgspec.Struct):
    type: str


class _Text(msgspec.Struct):
    format: _Format | None = None


_items = msgspec.json.Decoder(list[_Item])
_parts = msgspec.json.Decoder(list[_Part])


def read_responses(body: bytes, header_cache_key: str | None) -> Asked:
    """``/v1/responses``. Raises: GatewayError."""
    fields = read_fields(body)
    _refuse_state(fields)
    items = _read_items(fields)
    weight = _Weight()
    weight.add(fields.get("instructions", _NULL))
    for item in items:
        weight.add(item.content)
        weight.add(item.output)
        weight.text_bytes += len((item.arguments or "").encode("utf-8", "replace"))
    tools = _has_tools(fields)
    if tools:
        weight.text_bytes += len(memoryview(fields["tools"]))
    tokens = weight.tokens + TOKENS_PER_MESSAGE * len(items)
    named = header_cache_key or typed_field(fields, "prompt_cache_key", str, "a text")
    return Asked(
        model=read_model(fields),
        stream=typed_field(fields, "stream", bool, "true or false") or False,
        wants_usage=True,  # the form always carries it, so nothing is added and nothing hidden
        needs=Needs(vision=weight.vision, tools=tools, json=_wants_json(fields)),
        prompt_tokens=max(1, tokens),
        max_tokens=read_count(fields, "max_output_tokens", 1),
        cache_key=named or cache_key_of(lambda: _opening(fields, items), tokens),
        fields=fields,
    )


def _refuse_state(fields: dict[str, msgspec.Raw]) -> None:
    for name in _STATE:
        if given(fields.get(name, _NULL)):
            message = f"'{name}' is not available: the router keeps no conversations."
            raise GatewayError("invalid_request", message, param=name)
    if typed_field(fields, "background", bool, "true or false"):
        message = "'background' is not available: the router keeps no answers."
        raise GatewayError("invalid_request", message, param="background")


def _read_items(fields: dict[str, msgspec.Raw]) -> list[_Item]:
    raw = fields.get("input", _NULL)
    if not given(raw):
        raise GatewayError("invalid_request", "'input' is missing.", param="input")
    if is_text(raw):
        return [_Item(role="user", content=raw)]
    items = decode_field(_items.decode, raw, "input", "a text or a list of items")
    if not items:
        raise GatewayError("invalid_request", "'input' is empty.", param="input")
    return items


@dataclass(slots=True)
class _Weight:
    text_bytes: int = 0
    media: int = 0
    vision: bool = False

    @property
    def tokens(self) -> int:
        return estimate_tokens(self.text_bytes) + MEDIA_TOKENS * self.media

    def add(self, content: msgspec.Raw) -> None:
        """Count a content: null, a text, or parts."""
        if not given(content):
            return
        if is_text(content):
            self.text_bytes += len(memoryview(content)) - 2
            return
        for part in decode_field(_parts.decode, content, "input", "well-formed content parts"):
            if part.type in _MEDIA:
                self.media += 1
                self.vision = self.vision or part.type == "input_image"
            elif part.text is not None:
                self.text_bytes += len(part.text.encode("utf-8", "replace"))


def _has_tools(fields: dict[str, msgspec.Raw]) -> bool:
    tools = typed_field(fields, "tools", list[msgspec.Raw], "a list of tools")
    return bool(tools) and bytes(fields.get("tool_choice", _NULL)) != b'"none"'


def _wants_json(fields: dict[str, msgspec.Raw]) -> bool:
    text = typed_field(fields, "text", _Text, "an object")
    wanted = text and text.format
    return bool(wanted) and wanted.type in ("json_object", "json_schema")


def _opening(fields: dict[str, msgspec.Raw], items: list[_Item]) -> Opening:
    """Instructions and first user message: what a conversation's cached prefix begins with."""
    kept = [fields.get("instructions", _NULL)]
    for item in items:
        if item.role in ("system", "developer", "user"):
            kept.append(item.content)
        if item.role == "user":
            break
    return kept
