"""A stream of chat completion or completion events → Ollama's lines of JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from mindrouter.gateway.dialects.answers import Call
from mindrouter.gateway.dialects.ollama.errors import error_event
from mindrouter.gateway.dialects.ollama.response import (
    Form,
    content_fields,
    head_fields,
    last_fields,
)
from mindrouter.gateway.dialects.pieces import (
    CallArguments,
    CallBegun,
    Piece,
    Pieces,
    Reasoning,
    Refusal,
    Text,
)
from mindrouter.gateway.dialects.translation import Reply, Timings
from mindrouter.gateway.errors import GatewayError
from scheduler.core.jobs import Usage

_encode = msgspec.json.Encoder().encode


class LineStream:
    """Turns one answer. Tool calls have their arguments as an object here, so they are held until
    they are whole; comments have no counterpart, since each line must be JSON."""

    def __init__(self, reply: Reply, form: Form) -> None:
        self._reply = reply
        self._form: Form = form
        self._pieces = Pieces(reply)
        self._head = head_fields(reply)
        self._calls: dict[int, _HeldCall] = {}

    def feed(self, events: bytes) -> bytes:
        """The client's lines for so much of the backend's events. Raises: GatewayError."""
        return b"".join([self._translate(piece) for piece in self._pieces.feed(events)])

    def finish(self, timings: Timings | None = None) -> bytes:
        """The last lines. Raises: GatewayError when the backend had not finished."""
        ending = self._pieces.finish()
        timings = timings or Timings()
        calls = [held.whole() for _, held in sorted(self._calls.items())]
        lines = self._line(text="", calls=calls) if calls else b""
        last = {
            **head_fields(self._reply, timings.total_seconds),
            **content_fields(self._form, text=""),
            **last_fields(ending, self.usage(), timings),
        }
        return lines + _encode(last) + b"\n"

    def error(self, error: GatewayError, request_id: str) -> bytes:
        """What ends the stream instead when it failed."""
        return error_event(error, request_id)

    def usage(self) -> Usage:
        return self._pieces.usage()

    def _translate(self, piece: Piece) -> bytes:
        if isinstance(piece, Text):
            return self._line(piece.logprobs, text=piece.text)
        if isinstance(piece, Reasoning):
            return self._line(text="", thinking=piece.text)
        if isinstance(piece, Refusal):
            return self._line(text=piece.text)
        if isinstance(piece, CallBegun):
            self._calls[piece.position] = _HeldCall(piece)
        elif isinstance(piece, CallArguments):
            self._calls[piece.position].parts.append(piece.text)
        return b""

    def _line(self, logprobs: list[msgspec.Raw] | None = None, **content: Any) -> bytes:
        line = {**self._head, **content_fields(self._form, **content), "done": False}
        if logprobs:
            line["logprobs"] = logprobs
        return _encode(line) + b"\n"


class _HeldCall:
    def __init__(self, begun: CallBegun) -> None:
        self._begun = begun
        self.parts: list[str] = []

    def whole(self) -> Call:
        return Call(self._begun.call_id, self._begun.name, "".join(self.parts))
