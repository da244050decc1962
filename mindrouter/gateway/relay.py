"""Upstream bytes → client bytes.

A stream goes through event by event; any other answer is kept until it is whole, unless it is so
large that it must be passed on while it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from typing import TYPE_CHECKING

import msgspec

from backends.upstream import Response, UpstreamError
from mindrouter.gateway import failures
from mindrouter.gateway.client import Headers
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.events import Events, EventStream
from mindrouter.gateway.failures import Failure
from mindrouter.gateway.requests import Asked, estimate_tokens
from mindrouter.gateway.told import NULL, decode_answer, read_usage, text_tokens, usage_within
from scheduler.core.jobs import Usage
from scheduler.serving import Claim
from scheduler.snapshot import Endpoint

if TYPE_CHECKING:
    from mindrouter.gateway.exchange import Exchange

#: An answer up to this size is held until it is whole, so that a broken one can still be retried.
HELD_BYTES = 1 << 20
#: How much of the beginning and of the end is searched for usage in an answer that is passed on
#: while it comes.
TAIL_BYTES = 64 * 1024
#: How often a stream's delivered tokens are charged beyond its hold (R4), in tokens.
PROGRESS_TOKENS = 32
#: How long a backend may take to end its answer once it has said that it is done.
END_SECONDS = 1.0

#: What a stream says something with: an event's data, or a line of JSON.
_DATA_LINE = re.compile(rb"(?:^|[\r\n])(?:data:|\{)")


class CutShortError(GatewayError):
    """The answer broke off after its first bytes had gone to the client."""


class StreamRelay:
    """A stream of server-sent events."""

    __slots__ = (
        "_asked",
        "_claim",
        "_endpoint",
        "_events",
        "_exchange",
        "_head",
        "_next_report",
        "_unsent",
        "_write_now",
    )

    def __init__(
        self,
        exchange: Exchange,
        claim: Claim,
        asked: Asked,
        endpoint: Endpoint,
        head: Headers,
        events: Events | None = None,
    ) -> None:
        self._exchange = exchange
        self._claim = claim
        self._asked = asked
        self._endpoint = endpoint
        self._head = head
        self._events: Events = events or EventStream(hide_usage=not asked.wants_usage)
        self._next_report = 0  # tokens; at first the moment of the first one is noted, too
        self._write_now = exchange.client.write_now
        self._unsent = b""

    async def run(self, response: Response) -> Failure | None:
        """Relay to the end. A Failure: the client has seen nothing of it.

        Raises: CutShortError after the first event; UpstreamError before it.
        """
        events, client = self._events, self._exchange.client
        first = await self._first_events(response)
        if isinstance(first, Failure):
            return first
        self._exchange.runtime.mark_ok(self._endpoint.backend_id)  # the stream's end may be far off
        if not client.started:
            await client.start_stream(200, self._head)
        self._asked.fields = {}  # it will not be sent again, and may be large
        try:
            self._note()
            await client.write(first)
            while not events.over and not await response.pour(self._take):
                if self._unsent:
                    unsent, self._unsent = self._unsent, b""
                    await client.write(unsent)
            if not events.over and (rest := events.finish()):
                self._note()
                await client.write(rest)
        except UpstreamError as error:
            message = failures.from_exception(error, self._endpoint).error.message
            raise await self._cut_short(error.reason, message) from error
        if isinstance(events.error, GatewayError):  # what a translation met, the early end too
            met = events.error
            raise await self._cut_short(met.code, met.message, quoted=met.quoted)
        if events.error is not None:
            told = failures.from_event(events.error, self._endpoint).error
            raise await self._cut_short("upstream_error", told.message, quoted=True)
        if not events.finished:
            message = f"Backend {self._endpoint.name} ended the stream before it was finished."
            raise await self._cut_short("upstream_ended_early", message)
        self._complete()
        await client.end()
        await _let_end(response)
        return None

    def _take(self, data: bytes) -> bool:
        """Pass on what a read has brought. False: there is something to wait for, or no more."""
        events = self._events
        block = events.feed(data)
        if block:
            if events.estimated_tokens >= self._next_report or events.done:
                self._note()
            if not self._write_now(block):
                self._unsent = block
                return False
        return not (events.done or events.error is not None)

    def _note(self) -> None:
        """Account for what goes to the client next."""
        events = self._events
        if events.first_token_seen and events.estimated_tokens >= self._next_report:
            self._note_progress(events.estimated_tokens)
        if events.done:
            # Many clients leave as soon as they see [DONE], and their answer is whole.
            self._complete()

    async def _cut_short(self, code: str, message: str, *, quoted: bool = False) -> CutShortError:
        if self._events.torn:  # half an event: the one that tells of the error needs its own
            await self._exchange.client.write(b"\n\n")
        return CutShortError(code, message, quoted=quoted)

    async def _first_events(self, response: Response) -> bytes | Failure:
        """Read on to the first event that says anything; comments before it are held with it."""
        events, held = self._events, b""
        while data := await response.read():
            held += events.feed(data)
            if events.over or _DATA_LINE.search(held):
                break
            if len(held) > HELD_BYTES:
                return failures.not_an_answer(self._endpoint, "sent comments without end")
        else:
            held += events.finish()
        says_nothing = not _DATA_LINE.search(held)
        if events.error is not None and (says_nothing or not events.first_token_seen):
            return failures.from_event(events.error, self._endpoint)
        if says_nothing:
            return failures.not_an_answer(self._endpoint, "ended its stream before any event")
        return held

    def _note_progress(self, tokens: int) -> None:
        if self._exchange.record.first_token_at is None:
            self._exchange.record.first_token_at = time.monotonic() + self._exchange.to_wall
        if tokens >= PROGRESS_TOKENS:
            self._claim.progress(self._asked.prompt_tokens, tokens)
            self._next_report = tokens + PROGRESS_TOKENS
        else:
            self._next_report = PROGRESS_TOKENS

    def _complete(self) -> None:
        if self._claim.lease is not None:
            self._exchange.complete(self._claim, self._events.usage or self._estimate())

    def _estimate(self) -> Usage:
        return Usage(
            prompt_tokens=self._asked.prompt_tokens,
            completion_tokens=self._events.estimated_tokens,
            estimated=True,
        )

    def delivered(self) -> Usage | None:
        """What the client has had so far; None before the first event."""
        events = self._events
        if events.usage is None and not events.first_token_seen and not self._exchange.client.left:
            return None
        return events.usage or self._estimate()


async def _read_up_to(response: Response, limit: int) -> tuple[bytes, bool]:
    """(the body, True), or (more than ``limit`` bytes of it, False)."""
    parts: list[bytes] = []
    size = 0
    while data := await response.read():
        parts.append(data)
        size += len(data)
        if size > limit:
            return b"".join(parts), False
    return b"".join(parts), True


async def _let_end(response: Response) -> None:
    """Let a backend end its answer after its last event, so that the connection can be kept."""
    with contextlib.suppress(UpstreamError, TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await response.read_all(HELD_BYTES)


class BodyRelay:
    """An answer that is one JSON document."""

    __slots__ = ("_asked", "_claim", "_endpoint", "_exchange", "_head", "_sent")
    _read_usage = staticmethod(read_usage)

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
        body = response.whole(HELD_BYTES)
        if body is None:
            body, is_whole = await _read_up_to(response, HELD_BYTES)
            if not is_whole:
                await self._pass_on(response, body)
                return None
        try:
            answer = decode_answer(body)
        except (msgspec.MsgspecError, RecursionError):
            return failures.not_an_answer(self._endpoint, "sent an answer that is not valid JSON")
        if answer.choices == answer.data == NULL:
            if answer.error is not None:
                return failures.from_event(answer.error, self._endpoint)
            return failures.not_an_answer(self._endpoint, "sent JSON that is no completion")
        exchange = self._exchange
        exchange.record.first_token_at = exchange.record.first_byte_at
        usage = read_usage(answer.usage) or self._estimate(body)
        exchange.complete(self._claim, usage, at_once=False)
        await exchange.client.respond(200, self._head, body)
        return None

    async def _pass_on(self, response: Response, data: bytes) -> None:
        client = self._exchange.client
        head = list(self._head)
        if length := response.header(b"content-length"):
            head.append((b"content-length", length))
        await client.start_stream(200, head)
        self._asked.fields = {}
        start, tail = data[:TAIL_BYTES], b""
        try:
            while data:
                self._sent += len(data)
                tail = (tail + data)[-TAIL_BYTES:]
                await client.write(data)
                data = await response.read()
        except UpstreamError as error:
            message = failures.from_exception(error, self._endpoint).error.message
            raise CutShortError(error.reason, message) from error
        read = self._read_usage
        usage = usage_within(tail, read) or usage_within(start, read)
        self._exchange.complete(self._claim, usage or self._estimate(b""))
        await client.end()

    def _estimate(self, body: bytes) -> Usage:
        output = 0
        if not self._asked.needs.embeddings:
            output = text_tokens(body) if body else estimate_tokens(self._sent)
        return Usage(
            prompt_tokens=self._asked.prompt_tokens, completion_tokens=output, estimated=True
        )

    def delivered(self) -> Usage | None:
        """What the client has had of an answer that is not whole; None: nothing."""
        return self._estimate(b"") if self._sent else None
