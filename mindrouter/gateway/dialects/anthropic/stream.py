"""A stream of chat completion events → Anthropic's sequence of events."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mindrouter.gateway.dialects.anthropic.errors import error_event
from mindrouter.gateway.dialects.anthropic.response import (
    begun_message,
    stop_fields,
    thinking_block,
    usage_fields,
)
from mindrouter.gateway.dialects.pieces import (
    Begun,
    CallArguments,
    CallBegun,
    Heartbeat,
    Piece,
    Pieces,
    Reasoning,
    Refusal,
    Text,
)
from mindrouter.gateway.dialects.translation import Reply, Timings, invalid_answer
from mindrouter.gateway.errors import GatewayError
from scheduler.core.jobs import Usage

_Kind = Literal["text", "thinking", "tool_use"]
_encode = msgspec.json.Encoder().encode
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageStream:
    """Turns one answer. Content blocks come one after the other, each closed before the next."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._pieces = Pieces(reply)
        self._block = -1  # index of the latest content block
        self._open: _Kind | None = None
        self._call: int | None = None  # the tool call that the open block is
        self._called = False
        self._refused = False

    def feed(self, events: bytes) -> bytes:
        """The client's events for so much of the backend's. Raises: GatewayError."""
        return b"".join([self._translate(piece) for piece in self._pieces.feed(events)])

    def finish(self, timings: Timings | None = None) -> bytes:
        """The last events. Raises: GatewayError when the backend had not finished."""
        ending = self._pieces.finish()
        stop = stop_fields(ending, called=self._called, refused=self._refused)
        usage = usage_fields(self.usage())
        last = _event("message_delta", delta=stop, usage=usage)
        return self._close() + last + _event("message_stop")

    def error(self, error: GatewayError, request_id: str) -> bytes:
        """What ends the stream instead when it failed."""
        return error_event(error, request_id)

    def usage(self) -> Usage:
        return self._pieces.usage()

    def _translate(self, piece: Piece) -> bytes:
        if isinstance(piece, Text):
            return self._delta("text", {"type": "text_delta", "text": piece.text})
        if isinstance(piece, Reasoning):
            return self._delta("thinking", {"type": "thinking_delta", "thinking": piece.text})
        if isinstance(piece, CallArguments):
            return self._arguments(piece)
        if isinstance(piece, CallBegun):
            return self._begin_call(piece)
        if isinstance(piece, Refusal):
            self._refused = True
            return self._delta("text", {"type": "text_delta", "text": piece.text})
        if isinstance(piece, Heartbeat):
            return PING
        return self._begin(piece)

    def _begin(self, piece: Begun) -> bytes:
        estimate = Usage(prompt_tokens=self._reply.prompt_tokens, completion_tokens=0)
        message = begun_message(self._reply, usage_fields(estimate))
        return _event("message_start", message=message) + PING

    def _delta(self, kind: _Kind, delta: dict[str, Any]) -> bytes:
        opening = b""
        if self._open != kind:
            empty = {"type": "text", "text": ""} if kind == "text" else thinking_block("")
            opening = self._close() + self._begin_block(kind, empty)
        return opening + _event("content_block_delta", index=self._block, delta=delta)

    def _begin_call(self, piece: CallBegun) -> bytes:
        self._called = True
        block = {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": {}}
        opening = self._close() + self._begin_block("tool_use", block)
        self._call = piece.position
        return opening

    def _arguments(self, piece: CallArguments) -> bytes:
        if piece.position != self._call:
            # A closed block cannot be added to, and no engine is known to go back to one.
            raise invalid_answer("parts of two tool calls at once")
        delta = {"type": "input_json_delta", "partial_json": piece.text}
        return _event("content_block_delta", index=self._block, delta=delta)

    def _begin_block(self, kind: _Kind, block: dict[str, Any]) -> bytes:
        self._block += 1
        self._open = kind
        return _event("content_block_start", index=self._block, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = self._call = None
        return _event("content_block_stop", index=self._block)


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + _encode({"type": kind, **fields}) + b"\n\n"
