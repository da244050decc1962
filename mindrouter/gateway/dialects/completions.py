"""OpenAI's chat completions and completions, as far as other forms have a place for them.

The same types read whole answers and the events of a stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from mindrouter.gateway.dialects.translation import invalid_answer
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.told import read_usage
from scheduler.core.jobs import Usage

_NULL = msgspec.Raw(b"null")


class Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class CallPart(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: Function | None = None


class Logprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None


class Said(msgspec.Struct):
    """A message, or the part of one that a stream's event adds."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[CallPart] | None = None


class Choice(msgspec.Struct):
    index: int = 0
    message: Said | None = None
    delta: Said | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: Logprobs | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _MoreUsage(msgspec.Struct):
    completion_tokens_details: _OutputDetails | None = None


class _EngineTimings(msgspec.Struct):
    """What llama.cpp adds of its own accord, in milliseconds."""

    prompt_ms: float | None = None
    predicted_ms: float | None = None


class Completion(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: msgspec.Raw = _NULL
    timings: _EngineTimings | None = None
    error: msgspec.Raw = _NULL


class _Error(msgspec.Struct):
    message: str


_completion = msgspec.json.Decoder(Completion)
_more_usage = msgspec.json.Decoder(_MoreUsage)
_error = msgspec.json.Decoder(_Error | str)


@dataclass(slots=True)
class Ending:
    """How an answer ended. ``reason`` is OpenAI's finish reason, empty while there is none."""

    reason: str = ""
    stop_sequence: str | None = None  # where the engine tells which one it met
    usage: Usage | None = None
    reasoning_tokens: int = 0
    prompt_seconds: float | None = None  # where the engine tells
    output_seconds: float | None = None

    def note(self, body: Completion) -> None:
        if body.usage != _NULL and (usage := read_usage(body.usage)) is not None:
            self.usage = usage
            self.reasoning_tokens = _reasoning_tokens(body.usage)
        if body.timings is not None:
            self.prompt_seconds = _seconds(body.timings.prompt_ms)
            self.output_seconds = _seconds(body.timings.predicted_ms)

    def note_choice(self, choice: Choice) -> None:
        if choice.finish_reason:
            self.reason = choice.finish_reason
            if isinstance(choice.stop_reason, str):  # a number is a stop token's
                self.stop_sequence = choice.stop_reason


def parse_completion(data: bytes | str) -> Completion:
    """A whole answer, or one event of a stream. Raises: GatewayError."""
    try:
        parsed = _completion.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        raise invalid_answer("an answer that is not a completion") from None
    if parsed.error != _NULL:
        raise GatewayError("upstream_error", _error_message(parsed.error))
    return parsed


def _error_message(raw: msgspec.Raw) -> str:
    try:
        error = _error.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return "The backend told of an error."
    return error if isinstance(error, str) else error.message


def _reasoning_tokens(raw: msgspec.Raw) -> int:
    try:
        details = _more_usage.decode(raw).completion_tokens_details
    except (msgspec.MsgspecError, RecursionError):
        return 0
    return max(0, (details and details.reasoning_tokens) or 0)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
