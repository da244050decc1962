"""Requests in another dialect than OpenAI's own: passed on where the backend speaks it,
translated where it does not.

Everything else, from the queue to the record, is the ordinary exchange's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from backends.upstream import Body, Response
from mindrouter.gateway.client import Headers
from mindrouter.gateway.dialects.form import NDJSON, Form, OwnAnswer
from mindrouter.gateway.dialects.ollama import forms as ollama
from mindrouter.gateway.dialects.translation import (
    Reply,
    StreamTranslation,
    Timings,
    Translated,
)
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.events import Events, EventStream
from mindrouter.gateway.exchange import EVENT_STREAM_HEAD, JSON_HEAD, Exchange, slot
from mindrouter.gateway.failures import Failure
from mindrouter.gateway.models import without_implied_tag
from mindrouter.gateway.relay import BodyRelay, StreamRelay
from mindrouter.gateway.requests import Asked
from mindrouter.gateway.told import usage_of
from scheduler.core.jobs import Job, Usage
from scheduler.serving import Claim, SeenLease
from scheduler.snapshot import Endpoint
from scheduler.spool import Attempt

#: A whole answer is read up to this size before it is given a form.
MAX_ANSWER_BYTES = 64 << 20
#: An address that a backend turned out to lack is asked for again after so many seconds.
LACKING_SECONDS = 600.0
#: The engine that repeats the beginning of an answer which the client wrote (``Reply.begun``).
_REPEATS_BEGUN = "llamacpp"
_NANOSECOND = 1e-9
_NOTHING = Usage(prompt_tokens=0, completion_tokens=0)
_lacking: dict[tuple[int, bytes], float] = {}  # {(backend, address): until when}


class FormExchange(Exchange):
    """One request whose operation has a form. ``run`` never raises."""

    __slots__ = ("_native", "_reply", "_stream", "_translated")

    _native: bool  # whether the current attempt's backend speaks the form
    _translated: Translated | None  # what the others get
    _reply: Reply
    _stream: StreamTranslation | None  # what translates the current attempt's stream

    @property
    def form(self) -> Form:
        form = self.operation.form
        assert form is not None  # noqa: S101  that is what this class is for
        return form

    def _job(self, asked: Asked) -> Job:
        """Where no backend speaks the form, what cannot be translated is refused before it waits.

        Raises: GatewayError.
        """
        self._native, self._translated, self._stream = False, None, None
        job = super()._job(asked)
        endpoints = self.runtime.snapshot.endpoints
        having = [b for b in self.runtime.snapshot.backends if job.model_name in b.models]
        if having and not any(self._is_native(endpoints[b.backend_id], asked) for b in having):
            self._prepare(asked)
        return job

    def _model_of(self, asked: Asked) -> str:
        if self.form.dialect != ollama.NAME:
            return asked.model
        return without_implied_tag(asked.model, self.runtime)

    def _is_native(self, endpoint: Endpoint, asked: Asked) -> bool:
        form, engine = self.form, endpoint.engine
        if engine not in form.speakers or (asked.stream and engine in form.streams_unfit):
            return False
        lacking_until = _lacking.get((endpoint.backend_id, form.path))
        return lacking_until is None or time.monotonic() >= lacking_until

    def _prepare(self, asked: Asked) -> OwnAnswer | None:
        """Translate it, once, unless it is answered without a backend. Raises: GatewayError."""
        own = self.form.own_answer(asked)
        if own is None and self._translated is None:
            self._translated = self.form.translate(asked.fields)
        return own

    async def _wait(self, claim: Claim, asked: Asked) -> SeenLease:
        """Lines of JSON have no comments to wait with. Raises: Evicted."""
        if self.form.takes_comments:
            return await super()._wait(claim, asked)
        return await slot(claim)

    async def _exchange(
        self, claim: Claim, asked: Asked, endpoint: Endpoint, attempt: Attempt
    ) -> Failure | None:
        self._native, self._stream = self._is_native(endpoint, asked), None
        if self._native:
            failure = await super()._exchange(claim, asked, endpoint, attempt)
            if failure is None or not _address_is_lacking(failure):
                return failure
            until = time.monotonic() + LACKING_SECONDS
            _lacking[endpoint.backend_id, self.form.path] = until
            self._native = False
        try:
            own = self._prepare(asked)
        except GatewayError as error:
            return Failure(error, "none", "elsewhere")
        self._reply = self._reply_for(asked, endpoint)
        if own is not None:
            await self._answer_itself(own(self._reply), claim, asked)
            return None
        return await super()._exchange(claim, asked, endpoint, attempt)

    def _message(self, asked: Asked, endpoint: Endpoint, model_name: str) -> tuple[bytes, Body]:
        if self._native or self._translated is None:
            return self.form.path, asked.body_for(model_name)
        return self._translated.path, self._translated.body_for(model_name)

    def _reply_for(self, asked: Asked, endpoint: Endpoint) -> Reply:
        translated, repeats = self._translated, endpoint.engine == _REPEATS_BEGUN
        return Reply(
            reply_id=self.record.request_id,
            model=asked.model,
            created=self.record.arrived_at,
            prompt_tokens=asked.prompt_tokens,
            begun=translated.begun if translated and repeats else "",
            settings=translated.settings if translated else {},
        )

    async def _answer_itself(self, body: bytes, claim: Claim, asked: Asked) -> None:
        kind = self.form.stream_type if asked.stream else JSON_HEAD[1]
        head = [(b"content-type", kind), *self._headers(claim)]
        self.complete(claim, _NOTHING)
        await self.client.respond(200, head, body + b"\n" if kind == NDJSON else body)

    # ---- the answer

    def _relay_of(
        self, kind: bytes, claim: Claim, asked: Asked, endpoint: Endpoint
    ) -> StreamRelay | BodyRelay | None:
        form = self.form
        streams = NDJSON if self._native and form.stream_type == NDJSON else b"text/event-stream"
        if asked.stream and kind.startswith(streams):
            head = [*self._stream_head(), *self._headers(claim), *self._left_out()]
            events = self._events(claim, asked, endpoint)
            return StreamRelay(self, claim, asked, endpoint, head, events)
        # Ollama answers some requests for a stream with its only line.
        one_line = not asked.stream or form.stream_type == NDJSON
        if b"json" in kind and one_line and not self.client.started:
            head = [JSON_HEAD, *self._headers(claim), *self._left_out()]
            return FormBodyRelay(self, claim, asked, endpoint, head, self._maker(claim, endpoint))
        return None

    def _stream_head(self) -> Headers:
        return [(b"content-type", self.form.stream_type), *EVENT_STREAM_HEAD[1:]]

    def _left_out(self) -> Headers:
        """Which hints of the client were set aside, as the backend has no words for them."""
        translated = None if self._native else self._translated
        if translated is None or not translated.without:
            return []
        return [(b"x-mindrouter-not-translated", ", ".join(translated.without).encode())]

    def _events(self, claim: Claim, asked: Asked, endpoint: Endpoint) -> Events:
        form = self.form
        assert form.stream is not None  # noqa: S101  such a form's requests never ask for streams
        assert form.watch is not None  # noqa: S101
        if self._native:
            return form.watch(asked, endpoint.engine)
        self._stream = form.stream(self._reply)
        return TranslatedEvents(self._stream, lambda: self._timings(claim))

    def _maker(self, claim: Claim, endpoint: Endpoint) -> Maker:
        """What makes the client's answer and its usage of the backend's."""
        form = self.form

        def watched(body: bytes, asked: Asked) -> tuple[bytes, Usage | None]:
            return body, form.usage_in(body, asked, endpoint.engine)

        def translated(body: bytes, asked: Asked) -> tuple[bytes, Usage | None]:
            return form.whole(body, self._reply, self._timings(claim)), usage_of(body)

        return watched if self._native else translated

    def _timings(self, claim: Claim) -> Timings:
        """What the parts took, until now. Of an answer that came as a whole all counts as output.
        None is 0: clients divide by them."""
        now, lease, first = time.monotonic(), claim.lease, self.record.first_token_at
        begun = self.started if lease is None else lease.dispatched_at
        spoke = begun if first is None else first - self.to_wall
        return Timings(
            total_seconds=now - self.started,
            load_seconds=begun - self.started,
            prompt_seconds=max(_NANOSECOND, spoke - begun),
            output_seconds=max(_NANOSECOND, now - spoke),
        )

    def _error_event(self, error: GatewayError) -> bytes:
        if self._stream is not None:
            return self._stream.error(error, self.record.request_id)
        return super()._error_event(error)


def _address_is_lacking(failure: Failure) -> bool:
    """Whether it was the address that the backend did not know, and not the model."""
    return failure.status in (404, 405) and failure.error.code != "model_not_found"


class TranslatedEvents:
    """OpenAI's events on their way into the client's form; to a relay like an ``EventStream``."""

    torn = False  # a translation only ever gives whole events

    def __init__(self, stream: StreamTranslation, timings: Callable[[], Timings]) -> None:
        self.error: Any = None  # the backend's own, or what the translation met
        self.done = False  # all has been said, the last events included
        self._events = EventStream(hide_usage=False)
        self._stream = stream
        self._timings = timings

    def feed(self, data: bytes) -> bytes:
        """The client's bytes for so much of the backend's."""
        return self._translated(self._events.feed(data), ended=self._events.done)

    def finish(self) -> bytes:
        """What is left when the backend has ended."""
        rest = self._events.finish()
        return self._translated(rest, ended=self._events.error is None)

    def _translated(self, events: bytes, *, ended: bool) -> bytes:
        told = b""
        try:
            told = self._stream.feed(events)
            if ended:
                told += self._stream.finish(self._timings())
                self.done = True
        except GatewayError as error:
            self.error = error
        self.error = self.error or self._events.error
        return told

    @property
    def usage(self) -> Usage | None:
        return self._events.usage

    @property
    def first_token_seen(self) -> bool:
        return self._events.first_token_seen

    @property
    def estimated_tokens(self) -> int:
        return self._events.estimated_tokens

    @property
    def over(self) -> bool:
        return self.done or self.error is not None

    @property
    def finished(self) -> bool:
        return self.done


Maker = Callable[[bytes, Asked], tuple[bytes, Usage | None]]


class FormBodyRelay(BodyRelay):
    """A whole answer, read to its end before it is given the client's form."""

    __slots__ = ("_make",)

    def __init__(
        self,
        exchange: Exchange,
        claim: Claim,
        asked: Asked,
        endpoint: Endpoint,
        head: Headers,
        make: Maker,
    ) -> None:
        super().__init__(exchange, claim, asked, endpoint, head)
        self._make = make

    async def run(self, response: Response) -> Failure | None:
        """Relay to the end. A Failure: the client has seen nothing of it.

        Raises: UpstreamError.
        """
        body = await response.read_all(MAX_ANSWER_BYTES)
        try:
            told, usage = self._make(body, self._asked)
        except GatewayError as error:
            return Failure(error, "none", "elsewhere")
        exchange = self._exchange
        exchange.record.first_token_at = exchange.record.first_byte_at
        exchange.complete(self._claim, usage or self._estimate(body), at_once=False)
        await exchange.client.respond(200, self._head, told)
        return None
