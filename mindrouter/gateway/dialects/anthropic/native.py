"""Answers of backends that speak Anthropic's form themselves: what they cost and how they end."""

from __future__ import annotations

from typing import Any

import msgspec

from mindrouter.gateway.dialects.native import NativeStream
from mindrouter.gateway.dialects.splitter import data_of
from mindrouter.gateway.dialects.translation import invalid_answer
from mindrouter.gateway.told import MAX_TOKENS
from scheduler.core.jobs import Usage


class _Counts(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Message(msgspec.Struct):
    usage: _Counts | None = None


class _Event(msgspec.Struct):
    type: str
    message: _Message | None = None
    usage: _Counts | None = None
    error: Any = None


class _Answer(msgspec.Struct):
    type: str
    usage: _Counts | None = None


_event = msgspec.json.Decoder(_Event)
_answer = msgspec.json.Decoder(_Answer)


def usage_in_answer(body: bytes, *, cached_apart: bool, prompt_tokens: int) -> Usage | None:
    """The usage of a whole message; None where it tells none.

    ``cached_apart``: the engine counts cached tokens beside ``input_tokens``, as Anthropic and
    llama.cpp do; vLLM counts them in. Raises: GatewayError where it is no message.
    """
    try:
        answer = _answer.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        raise invalid_answer("an answer that is not a message") from None
    counts = answer.usage or _Counts()
    return _usage(counts, cached_apart=cached_apart, prompt_tokens=prompt_tokens)


class MessageEvents(NativeStream):
    """A native stream of ``/v1/messages``."""

    def __init__(self, *, prompt_tokens: int, cached_apart: bool) -> None:
        super().__init__(prompt_tokens=prompt_tokens)
        self._cached_apart = cached_apart
        self._counts = _Counts()

    def _look(self, event: bytes) -> bool:
        if b"content_block_delta" in event:
            self._count()
            return True
        if b'"usage"' not in event and b'"error"' not in event and b"message_stop" not in event:
            return True
        try:
            parsed = _event.decode(data_of(event) or b"")
        except (msgspec.MsgspecError, RecursionError):
            return True
        if parsed.type == "error":
            self.error = parsed.error or "error"
            return False
        if parsed.message is not None and parsed.message.usage is not None:
            self._note(parsed.message.usage)
        if parsed.usage is not None:
            self._note(parsed.usage)
            self.usage = self._so_far()
        self.done = parsed.type == "message_stop"
        return True

    def _note(self, counts: _Counts) -> None:
        """The counts at the end replace those of the beginning, as far as they are told."""
        for name in _Counts.__struct_fields__:
            if (value := getattr(counts, name)) is not None:
                setattr(self._counts, name, value)

    def _so_far(self) -> Usage | None:
        return _usage(
            self._counts, cached_apart=self._cached_apart, prompt_tokens=self._prompt_tokens
        )


def _usage(counts: _Counts, *, cached_apart: bool, prompt_tokens: int) -> Usage | None:
    output, cached = counts.output_tokens, counts.cache_read_input_tokens or 0
    written = counts.cache_creation_input_tokens or 0
    told = counts.input_tokens
    if output is None:
        return None
    prompt = prompt_tokens if told is None else told + (cached + written if cached_apart else 0)
    if not all(0 <= n <= MAX_TOKENS for n in (prompt, output, cached)):
        return None
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        cached_tokens=min(cached, prompt),
        estimated=told is None,
    )
