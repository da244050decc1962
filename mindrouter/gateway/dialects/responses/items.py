"""The items of a Responses input → chat messages.

Reasoning, text and function calls that follow each other are one answer of the model, which in
OpenAI's chat form is one message.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mindrouter.gateway.dialects.strict import (
    Strict,
    cannot_translate,
    decode_strictly,
    malformed,
)
from mindrouter.gateway.dialects.translation import (
    function_call,
    image_part,
    reasoning_of_message,
    text_or_parts,
)

_Status = Literal["in_progress", "completed", "incomplete"]


class _InputText(Strict, tag="input_text"):
    text: str
    prompt_cache_breakpoint: Any = None


class _InputImage(Strict, tag="input_image"):
    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None
    prompt_cache_breakpoint: Any = None


class _OutputText(Strict, tag="output_text"):
    text: str
    annotations: list[Any] | None = None
    logprobs: Any = None


class _Refusal(Strict, tag="refusal"):
    refusal: str


_Part = _InputText | _InputImage | _OutputText | _Refusal


class _Message(Strict):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part]
    type: Literal["message"] | None = None
    id: str | None = None
    status: _Status | None = None
    phase: str | None = None


class _Caller(Strict):
    type: Literal["direct"]


class _FunctionCall(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status | None = None
    caller: _Caller | None = None


class _FunctionOutput(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[_InputText | _InputImage]
    id: str | None = None
    status: _Status | None = None
    caller: _Caller | None = None


class _Words(Strict):
    type: Literal["summary_text", "reasoning_text"]
    text: str


class _Reasoning(Strict):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[_Words] = []
    content: list[_Words] | None = None
    encrypted_content: str | None = None
    status: _Status | None = None


class _Kind(msgspec.Struct):
    type: str | None = None


_Item = _Message | _FunctionCall | _FunctionOutput | _Reasoning
_kind = msgspec.json.Decoder(_Kind)
_DECODERS: dict[str | None, msgspec.json.Decoder[Any]] = {
    None: msgspec.json.Decoder(_Message),
    "message": msgspec.json.Decoder(_Message),
    "function_call": msgspec.json.Decoder(_FunctionCall),
    "function_call_output": msgspec.json.Decoder(_FunctionOutput),
    "reasoning": msgspec.json.Decoder(_Reasoning),
}


def to_chat_messages(
    instructions: str | None, items: str | list[msgspec.Raw], without: set[str]
) -> list[dict[str, Any]]:
    """``without`` gets the hints that are left out. Raises: GatewayError."""
    conversation = _Conversation(without)
    if instructions:
        conversation.say("system", [{"type": "text", "text": instructions}])
    if isinstance(items, str):
        conversation.say("user", [{"type": "text", "text": items}])
    else:
        for n, raw in enumerate(items):
            conversation.add(_read_item(raw, f"input[{n}]"), f"input[{n}]")
    return conversation.messages()


def _read_item(raw: msgspec.Raw, path: str) -> _Item:
    kind = decode_strictly(raw, _kind, path).type
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise cannot_translate(f"{path}.type", f"there is no {kind!r} among chat messages")
    item: _Item = decode_strictly(raw, decoder, path)
    return item


class _Conversation:
    def __init__(self, without: set[str]) -> None:
        self._done: list[dict[str, Any]] = []
        self._without = without
        # the model's answer that is being put together
        self._thoughts: list[str] = []
        self._said: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, item: _Item, path: str) -> None:
        if isinstance(item, _Reasoning):
            self._think(item, path)
        elif isinstance(item, _FunctionCall):
            self._calls.append(function_call(item.call_id, item.name, item.arguments))
        elif isinstance(item, _FunctionOutput):
            self._close_answer()
            parts = self._parts(item.output, f"{path}.output")
            content = text_or_parts(parts)
            self._done.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif item.role == "assistant":
            if self._said or self._calls:
                self._close_answer()
            self._said = self._parts(item.content, f"{path}.content")
        else:
            role = "system" if item.role == "developer" else item.role
            self.say(role, self._parts(item.content, f"{path}.content"))

    def say(self, role: str, parts: list[dict[str, Any]]) -> None:
        """A message that is not the model's. What opens a conversation for the model (its
        instructions, then a system or developer message) is one message: templates that take any
        take one, at the beginning."""
        self._close_answer()
        first = self._done[0] if len(self._done) == 1 else None
        if role == "system" and first is not None and first["role"] == "system":
            before = first["content"]
            earlier = [{"type": "text", "text": before}] if isinstance(before, str) else before
            first["content"] = text_or_parts([*earlier, *parts])
            return
        self._done.append({"role": role, "content": text_or_parts(parts)})

    def messages(self) -> list[dict[str, Any]]:
        self._close_answer()
        return self._done

    def _think(self, item: _Reasoning, path: str) -> None:
        if self._said or self._calls:
            self._close_answer()
        words = item.content or item.summary
        if item.encrypted_content:
            if not words:
                raise cannot_translate(f"{path}.encrypted_content")
            self._without.add("encrypted_content")
        self._thoughts.append("\n\n".join(word.text for word in words))

    def _close_answer(self) -> None:
        if not (self._thoughts or self._said or self._calls):
            return
        message: dict[str, Any] = {"role": "assistant", "content": text_or_parts(self._said)}
        message |= reasoning_of_message("\n\n".join(filter(None, self._thoughts)))
        if self._calls:
            message["tool_calls"] = self._calls
            message["content"] = message["content"] or None
        self._done.append(message)
        self._thoughts, self._said, self._calls = [], [], []

    def _parts(self, content: str | list[Any], path: str) -> list[dict[str, Any]]:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        return [self._part(part, f"{path}[{n}]") for n, part in enumerate(content)]

    def _part(self, part: _Part, path: str) -> dict[str, Any]:
        if isinstance(part, _Refusal):
            return {"type": "text", "text": part.refusal}
        if isinstance(part, _OutputText):
            if part.annotations:
                raise cannot_translate(f"{path}.annotations")
            return {"type": "text", "text": part.text}
        if part.prompt_cache_breakpoint is not None:
            self._without.add("prompt_cache_breakpoint")
        if isinstance(part, _InputText):
            return {"type": "text", "text": part.text}
        if part.file_id is not None:
            raise cannot_translate(f"{path}.file_id", "the router keeps no files")
        if not part.image_url:
            raise malformed(f"{path}.image_url", "it is missing")
        return image_part(part.image_url, part.detail)
