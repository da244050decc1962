"""OpenAI's answers, whole or as a stream, as the few things that the other forms are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from mindrouter.gateway.dialects.translation import Reply, ended_early, invalid_answer
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.events import read_usage
from mindrouter.gateway.requests import estimate_tokens
from scheduler.core.jobs import Usage

_NULL = msgspec.Raw(b"null")


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Logprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None


class _Said(msgspec.Struct):
    """A message, or the part of one that a stream's event adds."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Said | None = None
    delta: _Said | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: _Logprobs | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _MoreUsage(msgspec.Struct):
    completion_tokens_details: _OutputDetails | None = None


class _EngineTimings(msgspec.Struct):
    """What llama.cpp adds of its own accord, in milliseconds."""

    prompt_ms: float | None = None
    predicted_ms: float | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: msgspec.Raw = _NULL
    timings: _EngineTimings | None = None
    error: msgspec.Raw = _NULL


class _Error(msgspec.Struct):
    message: str


_body = msgspec.json.Decoder(_Body)
_more_usage = msgspec.json.Decoder(_MoreUsage)
_error = msgspec.json.Decoder(_Error | str)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; ``arguments`` is the text that the model wrote."""

    call_id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Ending:
    """How an answer ended. ``reason`` is OpenAI's finish reason, empty while there is none."""

    reason: str = ""
    stop_sequence: str | None = None  # where the engine tells which one it met
    usage: Usage | None = None
    reasoning_tokens: int = 0
    prompt_seconds: float | None = None  # where the engine tells
    output_seconds: float | None = None

    def note(self, body: _Body) -> None:
        if body.usage != _NULL and (usage := read_usage(body.usage)) is not None:
            self.usage = usage
            self.reasoning_tokens = _reasoning_tokens(body.usage)
        if body.timings is not None:
            self.prompt_seconds = _seconds(body.timings.prompt_ms)
            self.output_seconds = _seconds(body.timings.predicted_ms)

    def note_choice(self, choice: _Choice) -> None:
        if choice.finish_reason:
            self.reason = choice.finish_reason
            if isinstance(choice.stop_reason, str):  # a number is a stop token's
                self.stop_sequence = choice.stop_reason


@dataclass(slots=True)
class Answer:
    """A whole answer's first choice: no other form can ask for several."""

    text: str
    reasoning: str
    refusal: str
    calls: list[Call]
    ending: Ending
    logprobs: list[msgspec.Raw] = field(default_factory=list)

    def usage(self, reply: Reply) -> Usage:
        """What the backend told, or an estimate."""
        if self.ending.usage is not None:
            return self.ending.usage
        texts = [self.text, self.reasoning, self.refusal, *(c.arguments for c in self.calls)]
        return Usage(
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=sum(
                estimate_tokens(len(t.encode("utf-8", "replace"))) for t in texts
            ),
            estimated=True,
        )


def read_answer(body: bytes, reply: Reply) -> Answer:
    """A chat completion or a completion. Raises: GatewayError where it is none."""
    parsed = _parse(body)
    if not parsed.choices:
        raise invalid_answer("an answer without choices")
    choice = parsed.choices[0]
    said = choice.message or _Said(content=choice.text)
    ending = Ending()
    ending.note(parsed)
    ending.note_choice(choice)
    if not ending.reason:
        raise ended_early()
    return Answer(
        text=(said.content or "").removeprefix(reply.begun),
        reasoning=said.reasoning_content or said.reasoning or "",
        refusal=said.refusal or "",
        calls=[_whole_call(call, n, reply) for n, call in enumerate(said.tool_calls or ())],
        ending=ending,
        logprobs=(choice.logprobs and choice.logprobs.content) or [],
    )


def _whole_call(call: _Call, position: int, reply: Reply) -> Call:
    function = call.function or _Function()
    return Call(
        call.id or made_up_call_id(reply, position), function.name or "", function.arguments or ""
    )


def made_up_call_id(reply: Reply, position: int) -> str:
    """For engines that give their calls no ids, which results must be able to refer to."""
    return f"call_{reply.reply_id}_{position}"


def _parse(data: bytes | str) -> _Body:
    try:
        parsed = _body.decode(data)
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


# ---- streams


@dataclass(frozen=True, slots=True)
class Begun:
    """The backend has begun to answer."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A comment: the backend is alive but has nothing to say yet."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    logprobs: list[msgspec.Raw] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Refusal:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Tool call number ``position`` begins."""

    position: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of tool call number ``position``."""

    position: int
    text: str


Piece = Begun | Heartbeat | Text | Reasoning | Refusal | CallBegun | CallArguments


class Pieces:
    """Reads a stream of chat completion or completion events.

    Takes any cut of the bytes. ``ending`` is complete once the stream has ended.
    """

    def __init__(self, reply: Reply) -> None:
        self.ending = Ending()
        self._reply = reply
        self._split = Splitter()
        self._begun = False
        self._calls: set[int] = set()
        self._events_with_content = 0

    def feed(self, data: bytes) -> Iterator[Piece]:
        """What the new bytes say, in order. Raises: GatewayError."""
        for event in self._split.events(data):
            yield from self._read(event)

    def finish(self) -> Ending:
        """Raises: GatewayError when the backend had not finished."""
        if not self.ending.reason:
            raise ended_early()
        return self.ending

    def usage(self) -> Usage:
        """What the backend told, or an estimate: events with content are about a token each."""
        return self.ending.usage or Usage(
            prompt_tokens=self._reply.prompt_tokens,
            completion_tokens=self._events_with_content,
            estimated=True,
        )

    def _read(self, event: bytes) -> Iterator[Piece]:
        data = data_of(event)
        if data is None:
            if event.startswith(b":"):
                yield Heartbeat()
            return
        if data.strip() == b"[DONE]":
            return
        body = _parse(data)
        if not self._begun:
            self._begun = True
            yield Begun()
        self.ending.note(body)
        for choice in body.choices or ():
            if choice.index == 0:
                yield from self._choice(choice)

    def _choice(self, choice: _Choice) -> Iterator[Piece]:
        said = choice.delta or _Said(content=choice.text)
        before = self._events_with_content
        for piece in self._said(said, choice.logprobs):
            self._events_with_content = before + 1
            yield piece
        self.ending.note_choice(choice)

    def _said(self, said: _Said, logprobs: _Logprobs | None) -> Iterator[Piece]:
        if reasoning := said.reasoning_content or said.reasoning:
            yield Reasoning(reasoning)
        if said.content:
            yield Text(said.content, (logprobs and logprobs.content) or [])
        if said.refusal:
            yield Refusal(said.refusal)
        for call in said.tool_calls or ():
            yield from self._call(call)

    def _call(self, call: _Call) -> Iterator[Piece]:
        function = call.function or _Function()
        if call.index not in self._calls:
            self._calls.add(call.index)
            call_id = call.id or made_up_call_id(self._reply, call.index)
            yield CallBegun(call.index, call_id, function.name or "")
        if function.arguments:
            yield CallArguments(call.index, function.arguments)


class Splitter:
    """Cuts bytes into whole server-sent events, or with ``end`` into whole lines."""

    #: More than this without an end is no stream that anybody could read.
    MAX_BYTES = 32 << 20

    def __init__(self, end: bytes = b"\n\n") -> None:
        self._end = end
        self._rest = b""

    def events(self, data: bytes) -> list[bytes]:
        """The events that are whole now, each with its end. Raises: GatewayError."""
        if self._end == b"\n\n" and b"\r" in data:
            # Only engines behind some proxy write these; JSON never holds a bare one.
            data = data.replace(b"\r", b"")
        parts = (self._rest + data).split(self._end)
        self._rest = parts.pop()
        if len(self._rest) > self.MAX_BYTES:
            raise invalid_answer("an event without end")
        return [part + self._end for part in parts]

    def rest(self) -> bytes:
        """What has come since the last whole event."""
        rest, self._rest = self._rest, b""
        return rest


def data_of(event: bytes) -> bytes | None:
    """The data lines of an event; None where it has none, as comments do."""
    lines = [line[5:] for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
