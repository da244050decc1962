"""A stream of chat completion events → the events of the Responses API, in its order."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mindrouter.gateway.dialects.answers import Call
from mindrouter.gateway.dialects.pieces import (
    CallArguments,
    CallBegun,
    Heartbeat,
    Piece,
    Pieces,
    Reasoning,
    Refusal,
    Text,
)
from mindrouter.gateway.dialects.responses.errors import error_event
from mindrouter.gateway.dialects.responses.response import (
    ItemStatus,
    begun_response,
    call_item,
    ended_response,
    item_id,
    last_status,
    message_item,
    reasoning_item,
    reasoning_part,
    refusal_part,
    text_part,
    usage_fields,
)
from mindrouter.gateway.dialects.translation import Reply, Timings, invalid_answer
from mindrouter.gateway.errors import GatewayError
from scheduler.core.jobs import Usage

_PartKind = Literal["output_text", "refusal", "reasoning_text"]
_encode = msgspec.json.Encoder().encode


class ResponseStream:
    """Turns one answer. Output items come one after the other, each done before the next."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._pieces = Pieces(reply)
        self._events = _Events()
        self._output: list[dict[str, Any]] = []  # the items that are done
        self._item: _Words | _CallItem | None = None

    def feed(self, events: bytes) -> bytes:
        """The client's events for so much of the backend's. Raises: GatewayError."""
        return b"".join([self._translate(piece) for piece in self._pieces.feed(events)])

    def finish(self, timings: Timings | None = None) -> bytes:
        """The last events. Raises: GatewayError when the backend had not finished."""
        ending = self._pieces.finish()
        closing = self._close(last_status(ending))
        usage = usage_fields(self.usage(), ending.reasoning_tokens)
        response = ended_response(self._reply, ending, self._output, usage, timings or Timings())
        return closing + self._events.event(f"response.{response['status']}", response=response)

    def error(self, error: GatewayError, request_id: str) -> bytes:
        """What ends the stream instead when it failed."""
        return error_event(error, request_id, self._events.sequence_number)

    def usage(self) -> Usage:
        return self._pieces.usage()

    def _translate(self, piece: Piece) -> bytes:
        if isinstance(piece, Text):
            return self._say("output_text", piece.text, piece.logprobs)
        if isinstance(piece, Reasoning):
            return self._say("reasoning_text", piece.text)
        if isinstance(piece, Refusal):
            return self._say("refusal", piece.text)
        if isinstance(piece, CallArguments):
            return self._arguments(piece)
        if isinstance(piece, CallBegun):
            return self._begin_call(piece)
        if isinstance(piece, Heartbeat):
            return b":\n\n"
        created = self._events.event("response.created", response=begun_response(self._reply))
        return created + self._events.event(
            "response.in_progress", response=begun_response(self._reply)
        )

    def _say(self, kind: _PartKind, text: str, logprobs: list[msgspec.Raw] | None = None) -> bytes:
        thinks = kind == "reasoning_text"
        opening = b""
        item = self._item
        if not isinstance(item, _Words) or item.thinks != thinks:
            opening = self._close("completed")
            item = _Words(self._events, self._reply, len(self._output), thinks=thinks)
            self._item = item
            opening += item.begin()
        return opening + item.say(kind, text, logprobs or [])

    def _begin_call(self, piece: CallBegun) -> bytes:
        closing = self._close("completed")
        item = self._item = _CallItem(self._events, self._reply, len(self._output), piece)
        return closing + item.begin()

    def _arguments(self, piece: CallArguments) -> bytes:
        item = self._item
        if not isinstance(item, _CallItem) or item.position != piece.position:
            raise invalid_answer("parts of two tool calls at once")
        return item.add(piece.text)

    def _close(self, status: ItemStatus) -> bytes:
        if self._item is None:
            return b""
        closing, item = self._item.end(status)
        self._output.append(item)
        self._item = None
        return closing


class _Events:
    """Writes events, which are numbered through the whole stream."""

    def __init__(self) -> None:
        self.sequence_number = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        data = _encode({"type": kind, "sequence_number": self.sequence_number, **fields})
        self.sequence_number += 1
        return f"event: {kind}\ndata: ".encode() + data + b"\n\n"


class _Words:
    """An item of text: a message, or reasoning. Its parts come one after the other too."""

    def __init__(self, events: _Events, reply: Reply, position: int, *, thinks: bool) -> None:
        self.thinks = thinks
        self._events = events
        self._position = position
        self._id = item_id("rs" if thinks else "msg", reply, position)
        self._parts: list[dict[str, Any]] = []  # those that are done
        self._kind: _PartKind | None = None  # of the one that is not
        self._texts: list[str] = []
        self._logprobs: list[msgspec.Raw] = []

    def begin(self) -> bytes:
        item = self._as_item("in_progress")
        return self._events.event(
            "response.output_item.added", output_index=self._position, item=item
        )

    def say(self, kind: _PartKind, text: str, logprobs: list[msgspec.Raw]) -> bytes:
        opening = b""
        if kind != self._kind:
            opening = self._end_part()
            self._kind = kind
            opening += self._part_event("response.content_part.added", part=self._part())
        self._texts.append(text)
        fields: dict[str, Any] = {"delta": text}
        if kind == "output_text":
            self._logprobs += logprobs
            fields["logprobs"] = logprobs
        return opening + self._part_event(f"response.{kind}.delta", **fields)

    def end(self, status: ItemStatus) -> tuple[bytes, dict[str, Any]]:
        closing = self._end_part()
        item = self._as_item(status)
        return closing + self._events.event(
            "response.output_item.done", output_index=self._position, item=item
        ), item

    def _end_part(self) -> bytes:
        if self._kind is None:
            return b""
        part = self._part()
        fields = {name: part[name] for name in ("text", "refusal", "logprobs") if name in part}
        closing = self._part_event(f"response.{self._kind}.done", **fields)
        closing += self._part_event("response.content_part.done", part=part)
        self._parts.append(part)
        self._kind, self._texts, self._logprobs = None, [], []
        return closing

    def _part(self) -> dict[str, Any]:
        text = "".join(self._texts)
        if self._kind == "refusal":
            return refusal_part(text)
        return reasoning_part(text) if self.thinks else text_part(text, self._logprobs)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._events.event(
            kind,
            item_id=self._id,
            output_index=self._position,
            content_index=len(self._parts),
            **fields,
        )

    def _as_item(self, status: ItemStatus) -> dict[str, Any]:
        make = reasoning_item if self.thinks else message_item
        return make(self._id, list(self._parts), status)


class _CallItem:
    """A function call."""

    def __init__(self, events: _Events, reply: Reply, position: int, begun: CallBegun) -> None:
        self.position = begun.position
        self._events = events
        self._begun = begun
        self._texts: list[str] = []
        self._id = item_id("fc", reply, position)
        self._output_index = position

    def begin(self) -> bytes:
        item = self._as_item("in_progress")
        return self._events.event(
            "response.output_item.added", output_index=self._output_index, item=item
        )

    def add(self, text: str) -> bytes:
        self._texts.append(text)
        return self._arguments_event("delta", delta=text)

    def end(self, status: ItemStatus) -> tuple[bytes, dict[str, Any]]:
        item = self._as_item(status)
        closing = self._arguments_event("done", name=item["name"], arguments=item["arguments"])
        return closing + self._events.event(
            "response.output_item.done", output_index=self._output_index, item=item
        ), item

    def _arguments_event(self, what: str, **fields: Any) -> bytes:
        return self._events.event(
            f"response.function_call_arguments.{what}",
            item_id=self._id,
            output_index=self._output_index,
            **fields,
        )

    def _as_item(self, status: ItemStatus) -> dict[str, Any]:
        call = Call(self._begun.call_id, self._begun.name, "".join(self._texts))
        return call_item(self._id, call, status)
