"""Anthropic's messages and their content blocks → OpenAI's messages.

OpenAI's form has one place each in a message for reasoning, content and tool calls, and a message
of its own for every tool result.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mindrouter.gateway.dialects.strict import Strict, cannot_translate, malformed, object_text
from mindrouter.gateway.dialects.translation import (
    function_call,
    image_part,
    reasoning_of_message,
    text_or_parts,
)

#: OpenAI's tool results have no mark for failures; the model is told in words.
ERROR_PREFIX = "Error: "


class Text(Strict, tag="text"):
    text: str
    cache_control: Any = None
    citations: list[Any] | None = None


class _Base64(Strict, tag="base64"):
    media_type: str
    data: str


class _Url(Strict, tag="url"):
    url: str


class _Image(Strict, tag="image"):
    source: _Base64 | _Url
    cache_control: Any = None


class _Caller(Strict):
    type: Literal["direct"]


class _ToolUse(Strict, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw
    caller: _Caller | None = None
    cache_control: Any = None


class _ToolResult(Strict, tag="tool_result"):
    tool_use_id: str
    content: str | list[Text | _Image] | None = None
    is_error: bool | None = None
    cache_control: Any = None


class _Thinking(Strict, tag="thinking"):
    thinking: str
    signature: str | None = None


_Block = Text | _Image | _ToolUse | _ToolResult | _Thinking


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


def to_chat_messages(
    system: str | list[Text] | None, messages: list[Message], without: set[str]
) -> list[dict[str, Any]]:
    """``without`` gets the hints that are left out. Raises: GatewayError."""
    chat: list[dict[str, Any]] = []
    if system:
        chat.append(_system(system, "system", without))
    if not messages:
        raise malformed("messages", "there are none")
    for n, message in enumerate(messages):
        path = f"messages[{n}].content"
        if isinstance(message.content, str):
            chat.append({"role": message.role, "content": message.content})
        elif message.role == "user":
            chat += _user(message.content, path, without)
        elif message.role == "assistant":
            chat.append(_assistant(message.content, path, without))
        else:
            chat.append(_system(message.content, path, without))
    return chat


def _system(content: str | list[Any], path: str, without: set[str]) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "system", "content": content}
    parts = [_part(block, f"{path}[{n}]", without) for n, block in enumerate(content)]
    for n, part in enumerate(parts):
        if part["type"] != "text":
            raise cannot_translate(f"{path}[{n}].type", "a system prompt is text")
    return {"role": "system", "content": text_or_parts(parts)}


def _user(blocks: list[_Block], path: str, without: set[str]) -> list[dict[str, Any]]:
    """A message for each tool result, then one for what else the user said."""
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for n, block in enumerate(blocks):
        here = f"{path}[{n}]"
        if not isinstance(block, _ToolResult):
            parts.append(_part(block, here, without))
        elif parts:
            raise malformed(here, "tool results must come before other content")
        else:
            messages.append(_tool_result(block, here, without))
    if parts or not messages:
        messages.append({"role": "user", "content": text_or_parts(parts)})
    return messages


def _tool_result(block: _ToolResult, path: str, without: set[str]) -> dict[str, Any]:
    _note_hints(block, without)
    if isinstance(block.content, list):
        parts = [
            _part(part, f"{path}.content[{n}]", without) for n, part in enumerate(block.content)
        ]
    else:
        parts = [{"type": "text", "text": block.content or ""}]
    if block.is_error:
        if parts and parts[0]["type"] == "text":
            parts[0]["text"] = ERROR_PREFIX + parts[0]["text"]
        else:
            parts.insert(0, {"type": "text", "text": ERROR_PREFIX})
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": text_or_parts(parts),
    }


def _assistant(blocks: list[_Block], path: str, without: set[str]) -> dict[str, Any]:
    thoughts: list[str] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for n, block in enumerate(blocks):
        here = f"{path}[{n}]"
        if isinstance(block, _Thinking):
            thoughts.append(block.thinking)
            if block.signature:
                without.add("signature")
        elif isinstance(block, _ToolUse):
            _note_hints(block, without)
            arguments = object_text(block.input, f"{here}.input")
            calls.append(function_call(block.id, block.name, arguments))
        else:
            parts.append(_part(block, here, without))
    message: dict[str, Any] = {"role": "assistant", "content": text_or_parts(parts)}
    message |= reasoning_of_message("\n\n".join(thoughts))
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message


def _part(block: _Block, path: str, without: set[str]) -> dict[str, Any]:
    """A text or an image; other blocks have no place here."""
    if isinstance(block, Text):
        _note_hints(block, without)
        if block.citations:
            raise cannot_translate(f"{path}.citations")
        return {"type": "text", "text": block.text}
    if isinstance(block, _Image):
        _note_hints(block, without)
        return image_part(_image_url(block.source))
    raise malformed(f"{path}.type", "this kind of block has no place in this message")


def _image_url(source: _Base64 | _Url) -> str:
    if isinstance(source, _Url):
        return source.url
    return f"data:{source.media_type};base64,{source.data}"


def _note_hints(block: Text | _Image | _ToolUse | _ToolResult, without: set[str]) -> None:
    if block.cache_control is not None:
        without.add("cache_control")
