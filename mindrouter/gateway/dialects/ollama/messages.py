"""Ollama's messages → OpenAI's: images as data URLs, calls and results tied together by ids."""

from __future__ import annotations

import binascii
from typing import Any, Literal

import msgspec

from mindrouter.gateway.dialects.strict import Strict, malformed, object_text
from mindrouter.gateway.dialects.translation import (
    function_call,
    image_part,
    reasoning_of_message,
    text_or_parts,
)

#: First bytes of an image file -> media type. WebP is a RIFF file.
_MAGIC = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
    b"BM": "image/bmp",
}
_MAGIC_CHARACTERS = 8  # of base64, which are six bytes


class _Function(Strict):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")
    index: int | None = None
    description: str | None = None


class _Call(Strict):
    function: _Function
    id: str | None = None
    type: Literal["function"] | None = None


class Message(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[_Call] | None = None
    tool_name: str | None = None
    name: str | None = None  # an older word for it
    tool_call_id: str | None = None


def to_chat_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Raises: GatewayError, which names the field."""
    calls = _OpenCalls()
    return [_message(message, f"messages[{n}]", calls) for n, message in enumerate(messages)]


class _OpenCalls:
    """Calls whose results have not come yet. Ollama's clients need not number them: a result
    belongs to the earliest open call of its tool."""

    def __init__(self) -> None:
        self._open: dict[str, str] = {}  # call id -> tool's name, in order
        self._made_up = 0

    def begin(self, call: _Call) -> str:
        call_id = call.id
        if not call_id:
            call_id = f"call_{self._made_up}"
            self._made_up += 1
        self._open[call_id] = call.function.name
        return call_id

    def answer(self, message: Message, path: str) -> str:
        if message.tool_call_id:
            self._open.pop(message.tool_call_id, None)
            return message.tool_call_id
        wanted = message.tool_name or message.name
        for call_id, name in self._open.items():
            if wanted in (None, name):
                del self._open[call_id]
                return call_id
        raise malformed(path, "a tool's result without a call of that tool before it")


def _message(message: Message, path: str, calls: _OpenCalls) -> dict[str, Any]:
    _check_role(message, path)
    parts = _parts(message, path)
    chat: dict[str, Any] = {"role": message.role}
    if message.role == "tool":
        chat["tool_call_id"] = calls.answer(message, path)
    chat["content"] = text_or_parts(parts)
    chat |= reasoning_of_message(message.thinking or "")
    if message.tool_calls:
        chat["tool_calls"] = [
            function_call(
                calls.begin(call),
                call.function.name,
                object_text(call.function.arguments, f"{path}.tool_calls[{n}].function.arguments"),
            )
            for n, call in enumerate(message.tool_calls)
        ]
        chat["content"] = chat["content"] or None
    return chat


def _check_role(message: Message, path: str) -> None:
    """What a message of this role cannot have."""
    misplaced: list[str] = []
    if message.role != "assistant":
        misplaced += ["tool_calls", "thinking"]
    if message.role != "tool":
        misplaced += ["tool_name", "name", "tool_call_id"]
    for name in misplaced:
        if getattr(message, name):
            raise malformed(f"{path}.{name}", f"it has no place in a {message.role} message")


def _parts(message: Message, path: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if message.content:
        parts.append({"type": "text", "text": message.content})
    return parts + image_parts(message.images or [], f"{path}.images")


def image_parts(images: list[str], path: str) -> list[dict[str, Any]]:
    """Bare base64 as data URLs. Raises: GatewayError."""
    return [image_part(_data_url(data, f"{path}[{n}]")) for n, data in enumerate(images)]


def _data_url(data: str, path: str) -> str:
    try:
        head = binascii.a2b_base64(data[:_MAGIC_CHARACTERS])
    except ValueError:
        head = b""
    for magic, media_type in _MAGIC.items():
        if head.startswith(magic):
            return f"data:{media_type};base64,{data}"
    raise malformed(path, "the base64 of a PNG, JPEG, GIF, WebP or BMP file is expected")
