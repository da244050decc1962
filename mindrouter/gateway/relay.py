"""Upstream bytes → client bytes.

A stream goes through event by event; any other answer is kept until it is whole, unless it is so
large that it must be passed on while it comes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from backends.upstream import Response, UpstreamError
from mindrouter.gateway import failures
from mindrouter.gateway.client import Headers
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.events import EventStream, UsageFields
from mindrouter.gateway.failures import Failure
from mindrouter.gateway.requests import Asked, estimate_tokens
from scheduler.core.jobs import Usage
from scheduler.runtime import Claim
from scheduler.snapshot import Endpoint

if TYPE_CHECKING:
    from mindrouter.gateway.exchange import Exchange

#: An answer up to this size is held until it is whole, so that a broken one can still be retried.
HELD_BYTES = 1 << 20
#: Where usage is looked for in an answer that is passed on while it comes.
TAIL_BYTES = 64 * 1024
#: How often a stream's delivered tokens are charged beyond its hold (R4), in tokens.
PROGRESS_TOKENS = 32


class CutShortError(GatewayError):
    """The answer broke off after its first bytes had gone to the client.

    ``in_stream``: an error event can say so; otherwise only a broken connection can.
    """

    def __init__(self, code: str, message: str, *, in_stream: bool) -> None:
        super().__init__(code, message)
        self.in_stream = in_stream


class StreamRelay:
    """A stream of server-sent events."""

    __slots__ = ("_asked", "_claim", "_endpoint", "_events", "_exchange", "_head", "_reported")

    def __init__(
        self, exchange: Exchange, claim: Claim, asked: Asked, endpoint: Endpoint, head: Headers
    ) -> None:
        self._exchange = exchange
        self._claim = claim
        self._asked = asked
        self._endpoint = endpoint
        self._head = head
        self._events = EventStream(hide_usage=not asked.wants_usage)
        self._reported = 0

    async def run(self, response: Response) -> Failure | None:
        """Relay to the end. A Failure: the client has seen nothing of it.

        Raises: CutShortError after the first event; UpstreamError before it.
        """
        events, client = self._events, self._exchange.client
        committed = False
        try:
            first = await self._first_events(response)
            if isinstance(first, Failure):
                return first
            if not client.started:
                await client.start_stream(200, self._head)
            committed = True
            await client.write(first)
            while data := await response.read():
                block = events.feed(data)
                if block:
                    self._note_progress()
                    await client.write(block)
            if rest := events.finish():
                await client.write(rest)
        except UpstreamError as error:
            if not committed:
                raise
            message = failures.from_exception(error, self._endpoint).error.message
            raise CutShortError(error.reason, message, in_stream=True) from error
        await self._end()
        return None

    async def _first_events(self, response: Response) -> bytes | Failure:
        """Read on to the first event that says anything; comments before it are held with it."""
        held = b""
        while data := await response.read():
            held += self._events.feed(data)
            if b"data:" in held or self._events.error is not None:
                break
        else:
            held += self._events.finish()
        if self._events.error is not None and not self._events.first_token_seen:
            return failures.from_event(self._events.error, self._endpoint)
        if b"data:" not in held:
            return failures.not_an_answer(self._endpoint, "ended its stream before any event")
        self._note_progress()
        return held

    def _note_progress(self) -> None:
        events = self._events
        if not events.first_token_seen:
            return
        if self._exchange.record.first_token_at is None:
            clock = self._exchange.timeline
            self._exchange.record.first_token_at = clock.wall(time.monotonic())
        if events.content_events - self._reported >= PROGRESS_TOKENS:
            self._reported = events.content_events
            self._claim.progress(self._asked.prompt_tokens, self._reported)

    async def _end(self) -> None:
        events = self._events
        if events.error is not None:
            # It has been passed on as it came; what follows is only the end of the connection.
            error = failures.from_event(events.error, self._endpoint).error
            raise CutShortError("upstream_error", error.message, in_stream=True)
        if not events.finished:
            message = f"Backend {self._endpoint.name} ended the stream before it was finished."
            raise CutShortError("upstream_ended_early", message, in_stream=True)
        usage = self.delivered()
        assert usage is not None  # noqa: S101  a finished stream has delivered something
        self._exchange.complete(self._claim, usage)
        await self._exchange.client.end()

    def delivered(self) -> Usage | None:
        """What the client has had so far; None before the first event."""
        events = self._events
        if events.usage is not None:
            return events.usage
        if not events.first_token_seen and not self._exchange.client.left:
            return None
        return Usage(
            prompt_tokens=self._asked.prompt_tokens,
            completion_tokens=max(0, events.content_events),
            estimated=True,
        )


class _Text(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Text | None = None
    text: str | None = None


class _Answer(msgspec.Struct):
    usage: UsageFields | None = None


class _Texts(msgspec.Struct):
    choices: list[_Choice] = []


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_texts = msgspec.json.Decoder(_Texts).decode


class BodyRelay:
    """An answer that is one JSON document."""

    __slots__ = ("_asked", "_claim", "_endpoint", "_exchange", "_head", "_sent")

    def __init__(
        self, exchange: Exchange, claim: Claim, asked: Asked, endpoint: Endpoint, head: Headers
    ) -> None:
        self._exchange = exchange
        self._claim = claim
        self._asked = asked
        self._endpoint = endpoint
        self._head = head
        self._sent = 0

    async def run(self, response: Response) -> Failure | None:
        """Relay to the end. A Failure: the client has seen nothing of it.

        Raises: CutShortError once bytes have gone to the client; UpstreamError before.
        """
        parts: list[bytes] = []
        size = 0
        while data := await response.read():
            parts.append(data)
            size += len(data)
            if size > HELD_BYTES:
                await self._pass_on(response, b"".join(parts))
                return None
        body = b"".join(parts)
        try:
            answer = _decode_answer(body)
        except (msgspec.MsgspecError, RecursionError):
            return failures.not_an_answer(self._endpoint, "sent an answer that is not valid JSON")
        usage = (answer.usage and answer.usage.usage()) or self._estimate(body)
        self._exchange.record.first_token_at = self._exchange.record.first_byte_at
        self._exchange.complete(self._claim, usage)
        await self._exchange.client.respond(200, self._head, body)
        return None

    async def _pass_on(self, response: Response, data: bytes) -> None:
        client = self._exchange.client
        head = list(self._head)
        if length := response.header(b"content-length"):
            head.append((b"content-length", length))
        await client.start_stream(200, head)
        tail = b""
        try:
            while data:
                self._sent += len(data)
                tail = (tail + data)[-TAIL_BYTES:]
                await client.write(data)
                data = await response.read()
        except UpstreamError as error:
            message = failures.from_exception(error, self._endpoint).error.message
            raise CutShortError(error.reason, message, in_stream=False) from error
        self._exchange.complete(self._claim, usage_in_tail(tail) or self._estimate(b""))
        await client.end()

    def _estimate(self, body: bytes) -> Usage:
        output = 0
        if not self._asked.needs.embeddings:
            output = _text_tokens(body) if body else estimate_tokens(self._sent)
        return Usage(
            prompt_tokens=self._asked.prompt_tokens, completion_tokens=output, estimated=True
        )

    def delivered(self) -> Usage | None:
        """What the client has had of an answer that is not whole; None: nothing."""
        return self._estimate(b"") if self._sent else None


def _text_tokens(body: bytes) -> int:
    """Estimated tokens of the texts in an answer."""
    try:
        choices = _decode_texts(body).choices
    except (msgspec.MsgspecError, RecursionError):
        return estimate_tokens(len(body))
    texts = [(c.message.content if c.message else c.text) or "" for c in choices]
    return sum(estimate_tokens(len(text.encode("utf-8", "replace"))) for text in texts)


def usage_in_tail(tail: bytes) -> Usage | None:
    """The usage object in the last part of a large answer, or None."""
    start = tail.rfind(b'"usage"')
    if start < 0:
        return None
    end = tail.find(b"}", start)
    while end >= 0:
        try:
            answer = _decode_answer(b"{" + tail[start : end + 1] + b"}")
        except msgspec.MsgspecError:
            end = tail.find(b"}", end + 1)
            continue
        return answer.usage.usage() if answer.usage else None
    return None
