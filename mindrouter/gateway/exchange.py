"""One completion from first byte to record: read, queue, attempt, relay, settle.

Whatever happens — refusal, a client that leaves, a backend that dies, a fault of our own — the
slot is freed, the tokens are settled and one record is written.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from backends.upstream import Body, UpstreamError
from mindrouter.gateway import failures, limiting, recording, traces
from mindrouter.gateway.client import Client, ClientLeftError, Headers
from mindrouter.gateway.dialects import openai
from mindrouter.gateway.dialects.addresses import OPENAI_ERRORS
from mindrouter.gateway.dialects.form import Errors, Form
from mindrouter.gateway.endusers import background_task, end_user
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.failures import Failure
from mindrouter.gateway.relay import BodyRelay, CutShortError, StreamRelay
from mindrouter.gateway.requests import Asked
from mindrouter.gateway.surfaces.table import Surface
from scheduler.core.errors import SchedulerError
from scheduler.core.jobs import BACKGROUND, Job, Unit, Usage
from scheduler.serving import Claim, SeenLease, Serving
from scheduler.snapshot import Endpoint, Key
from scheduler.spool import Attempt, Record

logger = logging.getLogger(__name__)

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

JSON_HEAD = (b"content-type", b"application/json")
EVENT_STREAM_HEAD: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Operation:
    """An address that serves completions, and how its body is read."""

    name: str  # as recorded
    path: bytes  # at the backend
    read: Callable[[bytes, str | None], Asked]
    dialect: str = openai.NAME  # as recorded
    errors: Errors = OPENAI_ERRORS
    form: Form | None = None  # None: OpenAI's own, which every backend speaks
    surface: Surface | None = None  # where it makes something else than text


class Exchange:
    """Serves one request. ``run`` never raises."""

    __slots__ = (
        "asked",
        "client",
        "key",
        "limit_headers",
        "operation",
        "record",
        "relay",
        "runtime",
        "started",
        "to_wall",
    )

    def __init__(
        self, runtime: Serving, client: Client, operation: Operation, key: Key, record: Record
    ) -> None:
        self.runtime = runtime
        self.client = client
        client.outbox = runtime.outbox
        self.operation = operation
        self.key = key
        self.record = record
        self.started = time.monotonic()
        # The wall clock is read once, so that a jump of it never shows as a wait.
        self.to_wall = record.arrived_at - self.started
        self.asked: Asked | None = None
        self.limit_headers: Headers = []
        self.relay: StreamRelay | BodyRelay | None = None

    async def run(self) -> None:
        task = self.client.task
        assert task is not None  # noqa: S101  servers run requests in tasks
        self.runtime.serving.add(task)
        self.runtime.spool.open(self.record)
        try:
            await self._serve()
        except GatewayError as error:
            unread = None if self.asked else _unreadable_coding(self.client)
            await self._answer_with(unread or error)
        except SchedulerError as error:
            await self._answer_with(limiting.error_of(error))
        except ClientLeftError:
            self._client_left()
        except asyncio.CancelledError:
            # Not raised again: nothing may leave once headers are out, and nobody waits for it.
            if self.client.left:
                self._client_left()
            else:
                await self._answer_with(_shutting_down())
        except Exception:
            logger.exception("Request %s failed in the router itself", self.record.request_id)
            await self._answer_with(GatewayError("internal_error", "The router failed."))
        finally:
            self.client.unwatch()
            self.close_record()
            self.relay = None  # it refers back; without the circle all is freed at once
            self.runtime.serving.discard(task)
            # The relay refers back to here: a large body would stay until the next collection.
            self.asked = self.relay = None

    # ---- admission

    async def _serve(self) -> None:
        asked = self.asked = await self._read()
        self.record.model_requested = asked.model
        self.record.stream = asked.stream
        self.record.prompt_tokens = asked.prompt_tokens
        job = self._job(asked)
        self.client.watch()
        with await self.runtime.submit(job) as claim:
            if claim.limited is not None:
                self._note_limits(claim)
            self.record.queued_at = claim.ticket.enqueued_at + self.to_wall
            try:
                await self._attempt_until_served(claim, asked)
            finally:
                if self.record.ended_at is None:  # not completed
                    self._settle_what_was_used(claim)
                    recording.describe_claim(self.record, claim, self.to_wall)

    async def _read(self) -> Asked:
        """The request, read to its end. Raises: GatewayError, ClientLeftError."""
        return self.operation.read(
            await self.client.read_body(self.runtime.snapshot.max_body_bytes),
            self.client.header(b"x-cache-key"),
        )

    def _note_limits(self, claim: Claim) -> None:
        """How its limits stand, for the response; and what those in shadow would have done."""
        limited = claim.limited
        assert limited is not None  # noqa: S101  asked before
        self.limit_headers = limiting.headers(limited)
        self.record.limits_shadowed = limited.shadowed

    def _job(self, asked: Asked) -> Job:
        """The scheduler's view of the request. Raises: GatewayError."""
        snapshot = self.runtime.snapshot
        model = self._model_of(asked)
        allowed = snapshot.allowed_models.get(self.key.user_id)
        if allowed is not None and model not in allowed:
            raise GatewayError(
                "permission_denied", f"The model {asked.model!r} is not open to your group."
            )
        if self.key.allowed_models is not None and model not in self.key.allowed_models:
            raise GatewayError(
                "permission_denied", f"The model {asked.model!r} is not open to your key."
            )
        name = self.runtime.resolve_alias(model) if model in snapshot.aliases else model
        return Job(
            request_id=self.record.request_id,
            user_id=self.key.user_id,
            unit=self._unit(asked) if self.key.may_name_end_user else self.key.user_id,
            model_name=name,
            needs=asked.needs,
            prompt_tokens=asked.prompt_tokens,
            max_tokens=asked.max_tokens,
            cache_key=asked.cache_key,
            context_tokens=asked.context_tokens,
            key_id=self.key.key_id,
            max_wait_seconds=self._max_wait(name),
        )

    def _max_wait(self, model_name: str) -> float | None:
        """The shorter of the key's and the model's longest wait; the user's is the scheduler's."""
        waits = self.runtime.snapshot.model_waits
        own, models = self.key.max_wait, waits.get(model_name) if waits else None
        return own if models is None else models if own is None else min(own, models)

    def _model_of(self, asked: Asked) -> str:
        """The name that the model or alias is configured by."""
        return asked.model

    def _unit(self, asked: Asked) -> Unit:
        """The end user behind a trusted key, if the request names one; background calls are units
        of their own where they weigh less (R15)."""
        user_id, record = self.key.user_id, self.record
        record.end_user = end_user(self.client, asked, self.operation.dialect)
        record.task = background_task(self.client)
        if record.task and self.runtime.snapshot.tunables.background_weight < 1.0:
            return user_id, record.end_user, BACKGROUND
        return (user_id, record.end_user) if record.end_user else user_id

    # ---- attempts

    async def _attempt_until_served(self, claim: Claim, asked: Asked) -> None:
        tried: set[int] = set()
        while True:
            lease = claim.lease or await self._wait(claim, asked)
            self._note_dispatch(lease)
            failure = await self._attempt(claim, asked, lease)
            if failure is None:
                return
            tried.add(lease.backend_id)
            self._mark(lease.backend_id, failure)
            if not self._is_worth_another(failure, claim.ticket.job.model_name, tried):
                raise failure.error
            self.relay = None  # whatever ends the wait for another slot is none of its business
            claim.retry(frozenset(tried))

    def _note_dispatch(self, lease: SeenLease) -> None:
        """Say in the start marker too where it went: if this process dies, that is all there is."""
        record = self.record
        record.dispatched_at = lease.dispatched_at + self.to_wall
        record.selected_backend_id = lease.backend_id
        record.selected_backend = lease.backend_name
        self.runtime.spool.mark(record)

    def _is_worth_another(self, failure: Failure, model_name: str, tried: set[int]) -> bool:
        snapshot = self.runtime.snapshot
        if len(self.record.attempts) >= snapshot.tunables.backend_max_attempts:
            return False
        if failure.retry != "elsewhere":
            return failure.retry == "anywhere"
        return any(
            model_name in b.models and b.in_service and b.backend_id not in tried
            for b in snapshot.backends
        )

    async def _wait(self, claim: Claim, asked: Asked) -> SeenLease:
        """Wait for a slot. A stream that waits long gets its head and comments meanwhile.

        Raises: Evicted.
        """
        if not asked.stream:
            return await slot(claim)
        interval = max(1.0, self.runtime.snapshot.keepalive_after)
        patience = self.runtime.snapshot.keepalive_after - (time.monotonic() - self.started)
        while (lease := await claim.wait(max(0.0, patience))) is None:
            if not self.client.started:
                await self.client.start_stream(200, [*EVENT_STREAM_HEAD, *self._headers(claim)])
            await self.client.write(openai.waiting_comment(*await claim.position()))
            patience = interval
        return lease

    async def _attempt(self, claim: Claim, asked: Asked, lease: SeenLease) -> Failure | None:
        """Send the request to the leased backend and relay its answer. None: served."""
        endpoint = self.runtime.snapshot.endpoints.get(lease.backend_id)
        if endpoint is None:  # deleted since the lease was given
            error = GatewayError("no_backend_available", "The backend was removed.", retry_after=1)
            return Failure(error, "none", "anywhere")
        started_at = time.monotonic() + self.to_wall
        attempt = Attempt(backend=endpoint.name, started_at=started_at)
        self.record.attempts.append(attempt)
        try:
            failure = await self._exchange(claim, asked, endpoint, attempt)
        except UpstreamError as error:
            failure = failures.from_exception(error, endpoint)
        except CutShortError as error:
            attempt.reason = error.code
            raise
        except asyncio.CancelledError:
            attempt.reason = "client_disconnected" if self.client.left else "shutting_down"
            raise
        finally:
            if attempt.ended_at is None:
                attempt.ended_at = time.monotonic() + self.to_wall
        if failure is not None:
            attempt.reason = failure.error.code
            attempt.status = failure.status
        return failure

    async def _exchange(
        self, claim: Claim, asked: Asked, endpoint: Endpoint, attempt: Attempt
    ) -> Failure | None:
        lease = claim.lease
        assert lease is not None  # noqa: S101  waited for
        path, body = self._message(asked, endpoint, lease.model_name)
        own_id = self.record.request_id.encode()
        headers = b"%bx-request-id: %b\r\n" % (endpoint.headers, own_id)
        if self.record.traceparent or traces.ON:
            headers += traces.headers_for_backend(self.client, self.record)
        response = await self.runtime.upstream.send(
            endpoint.origin,
            method=b"POST",
            path=path,
            headers=headers,
            body=body,
            connect_timeout=endpoint.connect_timeout,
            first_byte_timeout=endpoint.first_byte_timeout,
            chunk_timeout=endpoint.chunk_timeout,
        )
        with response:
            attempt.status = response.status
            if not 200 <= response.status < 300:
                return await failures.from_response(response, endpoint)
            claim.first_byte()
            self.record.first_byte_at = time.monotonic() + self.to_wall
            if response.header(b"content-encoding") not in (None, b"identity"):
                return failures.not_an_answer(endpoint, "sent a compressed answer unasked")
            kind = (response.header(b"content-type") or b"").lower()
            relay = self.relay = self._relay_of(kind, claim, asked, endpoint)
            if relay is None:
                return failures.not_an_answer(endpoint, "sent something that is no completion")
            failure = await relay.run(response)
            if failure is None:
                self.runtime.mark_ok(endpoint.backend_id)
            return failure

    def _message(self, asked: Asked, endpoint: Endpoint, model_name: str) -> tuple[bytes, Body]:
        """The path and the body that this backend gets."""
        return self.operation.path, asked.body_for(model_name)

    def _relay_of(
        self, kind: bytes, claim: Claim, asked: Asked, endpoint: Endpoint
    ) -> StreamRelay | BodyRelay | None:
        """What relays an answer of this content type. None: nothing can."""
        if asked.stream and kind.startswith(b"text/event-stream"):
            head = [*EVENT_STREAM_HEAD, *self._headers(claim)]
            return StreamRelay(self, claim, asked, endpoint, head)
        if b"json" in kind and not self.client.started:
            return BodyRelay(self, claim, asked, endpoint, [JSON_HEAD, *self._headers(claim)])
        return None

    def _mark(self, backend_id: int, failure: Failure) -> None:
        if failure.verdict == "failed":
            self.runtime.mark_failed(backend_id)
        elif failure.verdict == "busy":
            self.runtime.mark_busy(backend_id, failure.busy_seconds)

    # ---- the end

    def complete(self, claim: Claim, usage: Usage, *, at_once: bool = True) -> None:
        """The answer is whole: settle and record, before the client has its last byte.

        Not ``at_once``: the client's ``respond`` follows, which lets nothing leave before.
        """
        claim.settle(usage)
        record = self.record
        record.outcome, record.status = "completed", 200
        recording.describe_usage(record, usage)
        recording.describe_claim(record, claim, self.to_wall)
        record.attempts[-1].ended_at = time.monotonic() + self.to_wall
        self.close_record(at_once=at_once)

    def close_record(self, *, at_once: bool = True) -> None:
        """Write the record, once."""
        record = self.record
        if record.ended_at is None:
            record.ended_at = time.monotonic() + self.to_wall
            record.configuration_version = self.runtime.snapshot.version
            self.runtime.spool.close(record, at_once=at_once)

    def _settle_what_was_used(self, claim: Claim) -> None:
        """An answer that was not completed costs what was delivered of it (R4, R6)."""
        lease = claim.lease
        if lease is None or self.asked is None:
            return
        usage = self.relay.delivered() if self.relay is not None else None
        if usage is None and self.client.left:
            # Leaving is not free, or a backend could be kept busy for nothing.
            usage = claim.usage_of_abandoned(lease, self.asked.prompt_tokens)
        if usage is not None:
            claim.settle(usage)
            recording.describe_usage(self.record, usage)

    def _client_left(self) -> None:
        record = self.record
        record.outcome, record.reason, record.status = "cancelled", "client_disconnected", 499

    async def _answer_with(self, error: GatewayError) -> None:
        """Tell the client, in the form that fits what it has so far, and note it."""
        record = self.record
        record.outcome = "failed" if record.attempts else "refused"
        record.reason, record.message = error.code, error.kept
        record.status = 200 if self.client.started else error.status
        self.close_record()
        if self.client.started and isinstance(self.relay, BodyRelay):
            await self.client.cut()  # nothing can be added to half a JSON document
        elif self.client.started:
            await self.client.end_and_close(self._error_event(error))
        else:
            await self.respond_error(error)

    def _error_event(self, error: GatewayError) -> bytes:
        return self.operation.errors.event(error, self.record.request_id)

    async def respond_error(self, error: GatewayError) -> None:
        """An error as a response of its own."""
        headers = [*error_headers(error), *self._headers_of_record(), *self.limit_headers]
        body = self.operation.errors.body(error, self.record.request_id)
        if self.client.unread:
            await self.client.respond_unread(error.status, headers, body)
        else:
            await self.client.respond(error.status, headers, body)

    def _headers(self, claim: Claim) -> Headers:
        """Where it went, how long it waited and why it went there, as far as is known."""
        lease = claim.lease
        if lease is None:
            return self.limit_headers
        waited = lease.dispatched_at - claim.ticket.enqueued_at
        found = _placement_headers(lease.backend_name, waited, lease.decision.reason)
        return found + self.limit_headers if self.limit_headers else found

    def _headers_of_record(self) -> Headers:
        """The same for an answer that is an error, when the lease is gone."""
        record = self.record
        if record.dispatched_at is None or record.queued_at is None:
            return []
        waited = record.dispatched_at - record.queued_at
        reason = record.decision.reason if record.decision is not None else ""
        return _placement_headers(record.selected_backend, waited, reason)


async def slot(claim: Claim) -> SeenLease:
    """Wait for it without a limit. Raises: Evicted."""
    lease = await claim.wait()
    assert lease is not None  # noqa: S101  waited for without a limit
    return lease


def _placement_headers(backend: str, waited: float, reason: str) -> Headers:
    milliseconds = b"%d" % round(waited * 1000) if waited > 0.0 else b"0"
    return [*_choice_headers(backend, reason), (b"x-mindrouter-queue-ms", milliseconds)]


@lru_cache(maxsize=1024)
def _choice_headers(backend: str, reason: str) -> Headers:
    return [
        (b"x-mindrouter-backend", _CONTROL.sub("?", backend).encode("latin-1", "replace")),
        (b"x-mindrouter-reason", reason.encode()),
    ]


def error_headers(error: GatewayError) -> Headers:
    headers: Headers = [(b"content-type", b"application/json"), *error.headers]
    if error.status in (429, 503):
        headers.append((b"retry-after", b"%d" % min(60, max(1, error.retry_after or 1))))
    if error.retry_is_hopeless:
        headers.append((b"x-should-retry", b"false"))
    return headers


def _unreadable_coding(client: Client) -> GatewayError | None:
    """Why a compressed body could not be read, which says more than that it is no JSON."""
    coding = client.header(b"content-encoding")
    if not coding or coding.lower() == "identity":
        return None
    message = f"Bodies with Content-Encoding {coding[:40]!r} are not read: send it as it is."
    return GatewayError(
        "invalid_request", message, status=415, headers=((b"accept-encoding", b"identity"),)
    )


def _shutting_down() -> GatewayError:
    return GatewayError("shutting_down", "The router is shutting down.", retry_after=5)
