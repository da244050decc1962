"""A Messages request → a chat completion request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from mindrouter.gateway.dialects.anthropic.messages import Message, Text, to_chat_messages
from mindrouter.gateway.dialects.strict import (
    Strict,
    cannot_translate,
    decode_strictly,
    object_text,
    read_strictly,
)
from mindrouter.gateway.dialects.translation import (
    CHAT_PATH,
    Translated,
    begun_answer,
    json_schema_format,
    stream_fields,
    thinking_fields,
)

#: Efforts beyond what open models know; the nearest they do is used, and told.
_EFFORT = {"xhigh": "high", "max": "high"}


class _Metadata(Strict):
    user_id: str | None = None


class _Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class _Format(Strict):
    type: Literal["json_schema"]
    schema: msgspec.Raw


class _OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class _Edit(Strict):
    """The one edit that changes nothing here: all thinking stays where the client sent it."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class _ContextManagement(Strict):
    edits: list[_Edit] = []


class _ToolKind(msgspec.Struct):
    type: str | None = None


class _Tool(Strict):
    name: str
    input_schema: msgspec.Raw
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None


class _ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Request(Strict):
    model: str
    max_tokens: int
    messages: list[Message]
    system: str | list[Text] | None = None
    stream: bool | None = None
    temperature: int | float | None = None
    top_p: int | float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None
    metadata: _Metadata | None = None
    context_management: _ContextManagement | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_control: Any = None


_request = msgspec.json.Decoder(_Request)
_tool_kind = msgspec.json.Decoder(_ToolKind)
_tool = msgspec.json.Decoder(_Tool)


def to_chat(fields: Mapping[str, msgspec.Raw]) -> Translated:
    """Raises: GatewayError, which names what cannot be expressed."""
    request = read_strictly(fields, _request)
    without: set[str] = set()
    for hint in ("cache_control", "service_tier"):
        if getattr(request, hint) is not None:
            without.add(hint)
    body: dict[str, Any] = {
        "model": request.model,
        "messages": to_chat_messages(request.system, request.messages, without),
        "max_tokens": request.max_tokens,
        **_sampling(request),
        **_tools(request, without),
        **_reasoning(request, without),
        **stream_fields(bool(request.stream)),
    }
    if wanted := (request.output_config and request.output_config.format) or request.output_format:
        object_text(wanted.schema, "output_config.format.schema")
        body["response_format"] = json_schema_format(wanted.schema, strict=True)
    if request.metadata is not None and request.metadata.user_id is not None:
        body["user"] = request.metadata.user_id
    continuing, begun = begun_answer(body["messages"])
    return Translated(
        path=CHAT_PATH,
        body={**body, **continuing},
        without=tuple(sorted(without)),
        begun=begun,
    )


def _sampling(request: _Request) -> dict[str, Any]:
    wanted = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences or None,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _tools(request: _Request, without: set[str]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if request.tools:
        body["tools"] = [
            _function(raw, f"tools[{n}]", without) for n, raw in enumerate(request.tools)
        ]
    choice = request.tool_choice
    if choice is None:
        return body
    if (choice.type == "tool") != (choice.name is not None):
        raise cannot_translate("tool_choice.name", "only type 'tool' has a name")
    plain = {"auto": "auto", "any": "required", "none": "none"}
    body["tool_choice"] = plain.get(
        choice.type, {"type": "function", "function": {"name": choice.name}}
    )
    if choice.disable_parallel_tool_use is not None:
        body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return body


def _function(raw: msgspec.Raw, path: str, without: set[str]) -> dict[str, Any]:
    kind = decode_strictly(raw, _tool_kind, path).type
    if kind not in (None, "custom"):
        raise cannot_translate(f"{path}.type", f"the tool {kind!r} runs at Anthropic's only")
    tool = decode_strictly(raw, _tool, path)
    object_text(tool.input_schema, f"{path}.input_schema")
    for hint in ("cache_control", "eager_input_streaming"):
        if getattr(tool, hint) is not None:
            without.add(hint)
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _reasoning(request: _Request, without: set[str]) -> dict[str, Any]:
    thinking = request.thinking
    asked = request.output_config and request.output_config.effort
    effort = _EFFORT.get(asked, asked) if asked else None
    if effort != asked:
        without.add("output_config.effort")
    if thinking is None:
        return thinking_fields(None, effort)
    if thinking.budget_tokens is not None:
        # Templates may heed it, but no engine promises to.
        without.add("thinking.budget_tokens")
    if thinking.display is not None:
        without.add("thinking.display")
    return thinking_fields(thinking.type != "disabled", effort, thinking.budget_tokens)
