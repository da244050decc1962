"""OpenAI's streams, piece by piece, as the few things that the other forms are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from mindrouter.gateway.dialects.answers import made_up_call_id
from mindrouter.gateway.dialects.completions import (
    CallPart,
    Choice,
    Ending,
    Function,
    Logprobs,
    Said,
    parse_completion,
)
from mindrouter.gateway.dialects.splitter import Splitter, data_of
from mindrouter.gateway.dialects.translation import Reply, ended_early
from scheduler.core.jobs import Usage


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
            if self._begun and not self.ending.reason:  # some servers say no more than that
                self.ending.reason = "tool_calls" if self._calls else "stop"
            return
        body = parse_completion(data)
        if not self._begun:
            self._begun = True
            yield Begun()
        self.ending.note(body)
        for choice in body.choices or ():
            if choice.index == 0:
                yield from self._choice(choice)

    def _choice(self, choice: Choice) -> Iterator[Piece]:
        said = choice.delta or Said(content=choice.text)
        before = self._events_with_content
        for piece in self._said(said, choice.logprobs):
            self._events_with_content = before + 1
            yield piece
        self.ending.note_choice(choice)

    def _said(self, said: Said, logprobs: Logprobs | None) -> Iterator[Piece]:
        if reasoning := said.reasoning_content or said.reasoning:
            yield Reasoning(reasoning)
        if said.content:
            yield Text(said.content, (logprobs and logprobs.content) or [])
        if said.refusal:
            yield Refusal(said.refusal)
        for call in said.tool_calls or ():
            yield from self._call(call)

    def _call(self, call: CallPart) -> Iterator[Piece]:
        function = call.function or Function()
        if call.index not in self._calls:
            self._calls.add(call.index)
            call_id = call.id or made_up_call_id(self._reply, call.index)
            yield CallBegun(call.index, call_id, function.name or "")
        if function.arguments:
            yield CallArguments(call.index, function.arguments)
