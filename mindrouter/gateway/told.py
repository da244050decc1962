"""What a backend's JSON tells: usage, choices, errors; in an event or in a whole answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from mindrouter.gateway.requests import estimate_tokens
from scheduler.core.jobs import Usage

#: More tokens than any request can have; a backend that reports them is not believed.
MAX_TOKENS = 1_000_000_000
#: Objects within a usage object, at most, and itself.
_MOST_CLOSINGS = 8
#: How a line begins that may tell of an error: an event's name, or llama.cpp's older field.
_ERROR_LINES = (b"event: error", b"event:error", b"error:")
_ERROR_LINES_BEHIND_LF = tuple(b"\n" + begin for begin in _ERROR_LINES)
_ERROR_LINES_BEHIND_CR = tuple(b"\r" + begin for begin in _ERROR_LINES)
_ERROR_NAMES = (b"event: error", b"event:error")
NULL = msgspec.Raw(b"null")


class _PromptDetails(msgspec.Struct):
    cached_tokens: float | None = None


class _UsageFields(msgspec.Struct):
    """``usage`` as OpenAI writes it; a backend's null or absent numbers stay None."""

    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    usage: msgspec.Raw = NULL
    choices: list[msgspec.Raw] | None = None
    error: Any = None
    object: Any = None
    message: Any = None
    code: Any = None

    @property
    def failure(self) -> Any:
        """What it tells of an error, by itself or beside choices; None: it tells of none."""
        if self.object == "error":  # vLLM's older form
            return {"message": self.message, "code": self.code}
        # Beside choices an empty one is a field that was left empty.
        return self.error or (None if self.choices else self.error)


_usage_decoder = msgspec.json.Decoder(_UsageFields)
_event_decoder = msgspec.json.Decoder(_Event)


def read_usage(raw: msgspec.Raw) -> Usage | None:
    """The numbers of a ``usage`` object; None where it is none or cannot be believed."""
    try:
        fields = _usage_decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None
    details = fields.prompt_tokens_details
    prompt, output = fields.prompt_tokens, fields.completion_tokens or 0
    cached = (details and details.cached_tokens) or 0
    if (
        prompt is None
        or min(prompt, output, cached) < 0
        or max(prompt, output, cached) > MAX_TOKENS
    ):
        return None
    return Usage(
        prompt_tokens=int(prompt),
        completion_tokens=int(output),
        cached_tokens=min(int(cached), int(prompt)),
    )


def read_event(event: bytes) -> _Event | None:
    """The JSON of one event's data lines, or None where it is none that concerns us."""
    try:
        return _event_decoder.decode(_data_of(event))
    except (msgspec.MsgspecError, RecursionError):
        return None


def told_error(event: bytes) -> Any:
    """What an event tells, in whatever words, that is named ``error`` or has llama.cpp's older
    ``error:`` field; None: it is neither."""
    if not has_error_line(event):
        return None
    data = _error_field(event)
    if data is None:
        if not any(line.rstrip(b" ") in _ERROR_NAMES for line in event.splitlines()):
            return None
        data = _data_of(event)
    data = data.strip()
    try:
        told = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        told = data.decode("utf-8", "replace")
    return (told.get("error") if isinstance(told, dict) else None) or told or "error"


def _error_field(event: bytes) -> bytes | None:
    return next((line[6:] for line in event.splitlines() if line.startswith(b"error:")), None)


def usage_beside(event: bytes) -> Usage | None:
    """The usage that an event tells beside its error."""
    field = _error_field(event)
    parsed = read_event(event if field is None else b"data:" + field)
    return read_usage(parsed.usage) if parsed is not None else None


def has_error_line(block: bytes) -> bool:
    """Whether a line may tell of an error. Plain searches: where a text has the word, a regular
    expression costs many times as much."""
    return (
        block.startswith(_ERROR_LINES)
        or any(line in block for line in _ERROR_LINES_BEHIND_LF)
        or (b"\r" in block and any(line in block for line in _ERROR_LINES_BEHIND_CR))
    )


def _data_of(event: bytes) -> bytes:
    return b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))


class _Text(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Text | None = None
    text: str | None = None


class _Answer(msgspec.Struct):
    usage: msgspec.Raw = NULL
    choices: msgspec.Raw = NULL
    data: msgspec.Raw = NULL
    error: Any = None


class _Texts(msgspec.Struct):
    choices: list[_Choice] = []


decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_texts = msgspec.json.Decoder(_Texts).decode


def usage_of(body: bytes) -> Usage | None:
    """What a whole answer tells of its usage."""
    try:
        return read_usage(decode_answer(body).usage)
    except (msgspec.MsgspecError, RecursionError):
        return None


def text_tokens(body: bytes) -> int:
    """Estimated tokens of the texts in an answer."""
    try:
        choices = _decode_texts(body).choices
    except (msgspec.MsgspecError, RecursionError):
        return estimate_tokens(len(body))
    texts = [(c.message.content if c.message else c.text) or "" for c in choices]
    return sum(estimate_tokens(len(text.encode("utf-8", "replace"))) for text in texts)


def usage_within(
    part: bytes, read: Callable[[msgspec.Raw], Usage | None] = read_usage
) -> Usage | None:
    """The usage object in a part of a large answer, or None."""
    start = end = part.rfind(b'"usage"')
    for _ in range(_MOST_CLOSINGS if start >= 0 else 0):
        end = part.find(b"}", end + 1)
        if end < 0:
            break
        with contextlib.suppress(msgspec.MsgspecError):
            return read(decode_answer(b"{" + part[start : end + 1] + b"}").usage)
    return None
