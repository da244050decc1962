"""A Responses request → a chat completion request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from mindrouter.gateway.dialects.responses.items import to_chat_messages
from mindrouter.gateway.dialects.strict import (
    Strict,
    cannot_translate,
    decode_strictly,
    given,
    is_text,
    object_text,
    read_strictly,
    text_of,
)
from mindrouter.gateway.dialects.translation import (
    CHAT_PATH,
    Translated,
    json_schema_format,
    stream_fields,
    thinking_fields,
)

_NULL = msgspec.Raw(b"null")
_LOGPROBS = "message.output_text.logprobs"
#: Asks for reasoning in a form that can be sent back; here the reasoning itself can.
_ENCRYPTED = "reasoning.encrypted_content"
#: What would need a backend to remember.
_STATE = ("store", "background", "previous_response_id", "conversation", "prompt")
_CHOICES = ("none", "auto", "required")
#: They decide where and how cheaply something runs, not what is said.
_HINTS = (
    *("prompt_cache_options", "prompt_cache_retention", "service_tier", "stream_options"),
    "max_tool_calls",  # of tools that run at OpenAI's, which are refused
)


class _Reasoning(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class _PlainFormat(Strict, tag="text"):
    pass


class _ObjectFormat(Strict, tag="json_object"):
    pass


class _SchemaFormat(Strict, tag="json_schema"):
    name: str
    schema: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class _Text(Strict):
    format: _PlainFormat | _ObjectFormat | _SchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class _ToolKind(msgspec.Struct):
    type: str


class _FunctionTool(Strict):
    type: Literal["function"]
    name: str
    parameters: msgspec.Raw = _NULL
    description: str | None = None
    strict: bool | None = None


class _NamedFunction(Strict):
    type: Literal["function"]
    name: str


class _Request(Strict):
    model: str
    input: msgspec.Raw
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: int | float | None = None
    top_p: int | float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: msgspec.Raw = _NULL
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    stream_options: Any = None


_request = msgspec.json.Decoder(_Request)
_items = msgspec.json.Decoder(list[msgspec.Raw])
_tool_kind = msgspec.json.Decoder(_ToolKind)
_function_tool = msgspec.json.Decoder(_FunctionTool)
_named_function = msgspec.json.Decoder(_NamedFunction)


def to_chat(fields: Mapping[str, msgspec.Raw]) -> Translated:
    """Raises: GatewayError, which names what cannot be expressed."""
    request = read_strictly(fields, _request)
    for name in _STATE:
        if getattr(request, name):
            raise cannot_translate(name, "the router keeps nothing")
    without = {hint for hint in _HINTS if getattr(request, hint) is not None}
    items = (
        text_of(request.input)
        if is_text(request.input)
        else decode_strictly(request.input, _items, "input")
    )
    body: dict[str, Any] = {
        "model": request.model,
        "messages": to_chat_messages(request.instructions, items, without),
        **_same_fields(request),
        **_logprobs(request, without),
        **_tools(request),
        **_reasoning(request, without),
        **_text(request),
        **stream_fields(bool(request.stream)),
    }
    return Translated(
        path=CHAT_PATH,
        body=body,
        without=tuple(sorted(without)),
        settings=_settings(request, fields),
    )


def _same_fields(request: _Request) -> dict[str, Any]:
    wanted = {
        "max_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "parallel_tool_calls": request.parallel_tool_calls,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _logprobs(request: _Request, without: set[str]) -> dict[str, Any]:
    include = request.include or []
    for n, name in enumerate(include):
        if name == _ENCRYPTED:
            without.add(f"include: {name}")
        elif name != _LOGPROBS:
            raise cannot_translate(f"include[{n}]", f"{name!r} is not known here")
    if request.top_logprobs:
        return {"logprobs": True, "top_logprobs": request.top_logprobs}
    return {"logprobs": True} if _LOGPROBS in include else {}


def _tools(request: _Request) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if request.tools:
        body["tools"] = [_function(raw, f"tools[{n}]") for n, raw in enumerate(request.tools)]
    choice = request.tool_choice
    if not given(choice):
        return body
    if is_text(choice):
        body["tool_choice"] = text_of(choice)
        if body["tool_choice"] not in _CHOICES:
            raise cannot_translate("tool_choice", f"{body['tool_choice']!r} is not known here")
        return body
    name = decode_strictly(choice, _named_function, "tool_choice").name
    body["tool_choice"] = {"type": "function", "function": {"name": name}}
    return body


def _function(raw: msgspec.Raw, path: str) -> dict[str, Any]:
    kind = decode_strictly(raw, _tool_kind, path).type
    if kind != "function":
        raise cannot_translate(f"{path}.type", f"the tool {kind!r} runs at OpenAI's only")
    tool = decode_strictly(raw, _function_tool, path)
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if given(tool.parameters):
        object_text(tool.parameters, f"{path}.parameters")
        function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _reasoning(request: _Request, without: set[str]) -> dict[str, Any]:
    reasoning = request.reasoning
    if reasoning is None:
        return {}
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) is not None:
            without.add(f"reasoning.{name}")  # the reasoning itself comes, whole
    if reasoning.effort == "none":
        return thinking_fields(False)
    return thinking_fields(None, reasoning.effort)


def _text(request: _Request) -> dict[str, Any]:
    text = request.text
    if text is None:
        return {}
    body: dict[str, Any] = {}
    if text.verbosity is not None:
        body["verbosity"] = text.verbosity
    if isinstance(text.format, _ObjectFormat):
        body["response_format"] = {"type": "json_object"}
    elif isinstance(text.format, _SchemaFormat):
        wanted = text.format
        object_text(wanted.schema, "text.format.schema")
        more = {"description": wanted.description, "strict": wanted.strict}
        given_ones = {name: value for name, value in more.items() if value is not None}
        body["response_format"] = json_schema_format(wanted.schema, wanted.name, **given_ones)
    return body


def _settings(request: _Request, fields: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """What the answer repeats of the request, with OpenAI's defaults for what was not set."""
    parallel = request.parallel_tool_calls
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": True if parallel is None else parallel,
        "previous_response_id": None,
        "reasoning": fields.get("reasoning", {"effort": None, "summary": None}),
        "store": False,
        "temperature": request.temperature,
        "text": fields.get("text", {"format": {"type": "text"}}),
        "tool_choice": request.tool_choice if given(request.tool_choice) else "auto",
        "tools": request.tools or [],
        "top_p": request.top_p,
        "truncation": "disabled",
    }
