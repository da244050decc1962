"""Answers of backends that speak the Responses API themselves: their cost and their end."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from mindrouter.gateway.dialects.native import NativeStream
from mindrouter.gateway.dialects.splitter import data_of
from mindrouter.gateway.dialects.translation import invalid_answer
from mindrouter.gateway.told import MAX_TOKENS
from scheduler.core.jobs import Usage

_DELTA = re.compile(rb'"type"\s*:\s*"response\.[a-z_]+\.delta"')
_LAST = re.compile(rb'"type"\s*:\s*"(?:response\.(?:completed|incomplete|failed)|error)"')


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Counts(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None


class _Response(msgspec.Struct):
    usage: _Counts | None = None
    error: Any = None


class _Event(msgspec.Struct):
    type: str
    response: _Response | None = None
    error: Any = None
    message: str | None = None


_event = msgspec.json.Decoder(_Event)
_answer = msgspec.json.Decoder(_Response)


def usage_in_answer(body: bytes) -> Usage | None:
    """The usage of a whole response; None where it tells none.

    Raises: GatewayError where it is no response.
    """
    try:
        return _usage(_answer.decode(body).usage)
    except (msgspec.MsgspecError, RecursionError):
        raise invalid_answer("an answer that is not a response") from None


class ResponseEvents(NativeStream):
    """A native stream of ``/v1/responses``."""

    def _look(self, event: bytes) -> bool:
        if _DELTA.search(event):
            self._count()
            return True
        if not _LAST.search(event):
            return True
        try:
            parsed = _event.decode(data_of(event) or b"")
        except (msgspec.MsgspecError, RecursionError):
            return True
        response = parsed.response or _Response()
        if parsed.type in ("error", "response.failed"):
            self.error = parsed.error or response.error or parsed.message or "error"
            return False
        if parsed.type in ("response.completed", "response.incomplete"):
            self.done = True
            self.usage = _usage(response.usage)
        return True


def _usage(counts: _Counts | None) -> Usage | None:
    if counts is None or counts.input_tokens is None:
        return None
    prompt, output = counts.input_tokens, counts.output_tokens or 0
    details = counts.input_tokens_details
    cached = (details and details.cached_tokens) or 0
    if not all(0 <= n <= MAX_TOKENS for n in (prompt, output, cached)):
        return None
    return Usage(prompt_tokens=prompt, completion_tokens=output, cached_tokens=min(cached, prompt))
