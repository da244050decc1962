"""A gateway's end of the bus: the same claims as in process, on a scheduler elsewhere.

What a gateway holds is known here, in its tables. Messages only tell the scheduler of changes; when
one may have been lost, or another scheduler has taken over, everything is told again. So nothing
depends on a single message, and running requests never notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import msgspec
from django.conf import settings

from accounts.limits import Holder, Use
from scheduler.bus import redis
from scheduler.bus.messages import (
    VERSION,
    Again,
    Ask,
    Beat,
    Bye,
    Cancel,
    Ended,
    FirstByte,
    Inward,
    Leased,
    Mark,
    Progress,
    Queued,
    Refused,
    Register,
    Retry,
    Runs,
    Settle,
    Submit,
    ToGateway,
    Told,
    ToScheduler,
    Waits,
    decode_broadcast,
    decode_evicted,
    decode_outward,
    decode_picture,
    decode_position,
    decode_uses,
    decode_view,
    decode_waiting,
    encode,
    read,
)
from scheduler.bus.wire import Command, Line
from scheduler.core.decisions import Decision, WaitReason
from scheduler.core.errors import Evicted, Rejected, SchedulerError
from scheduler.core.jobs import Job, Usage
from scheduler.core.tickets import Settlement, TicketState
from scheduler.core.views import BackendView, QueuedView
from scheduler.runtime import load_all
from scheduler.serving import (
    ANSWER_SECONDS,
    PICTURE_SECONDS,
    Claim,
    LiveView,
    QueuePicture,
    SeenLease,
    Serving,
)
from scheduler.snapshot import Snapshot

logger = logging.getLogger(__name__)

#: A new request is answered or refused within this time and one ``SWEEP_SECONDS``.
ADMISSION_SECONDS = 2.75
SWEEP_SECONDS = 0.1
#: Without a beat for so long, new requests are refused at once.
OUT_OF_TOUCH_SECONDS = 3.0
#: Without a beat for so long, waiting requests are given up.
GIVE_UP_SECONDS = 10.0
#: What is not urgent may wait for company.
LAZY_SECONDS = 0.03
RETRY_AFTER = 2
_AWAY = "The scheduler cannot be reached right now."


class RemoteLease:
    """A slot that the scheduler has granted."""

    __slots__ = (
        "backend_id",
        "backend_name",
        "decision",
        "dispatched_at",
        "hold",
        "model_name",
        "token_rate",
    )

    def __init__(self, told: Leased, decision: Decision, now: float) -> None:
        self.backend_id = told.backend_id
        self.backend_name = told.backend_name
        self.model_name = told.model_name
        self.dispatched_at = now
        self.decision = decision
        self.token_rate = told.token_rate
        self.hold = told.hold


class RemoteTicket:
    """A job that this gateway has submitted."""

    __slots__ = (
        "attempts",
        "avoid",
        "enqueued_at",
        "error",
        "job",
        "lease",
        "position_at_arrival",
        "state",
        "wait_reason",
    )

    def __init__(self, job: Job, now: float) -> None:
        self.job = job
        self.enqueued_at = now
        self.state: TicketState = "queued"
        self.error: Evicted | None = None
        self.lease: RemoteLease | None = None
        self.attempts = 0
        self.avoid: frozenset[int] = frozenset()
        self.position_at_arrival = 1
        self.wait_reason: WaitReason = "none"


class RemoteClaim(Claim):
    """A claim on the scheduler at the other end of the bus."""

    __slots__ = ("_runtime", "answered", "number")
    ticket: RemoteTicket

    def __init__(self, runtime: RemoteRuntime, number: int, ticket: RemoteTicket) -> None:
        super().__init__(ticket)
        self._runtime = runtime
        self.number = number
        self.answered: asyncio.Future[SchedulerError | None] | None = None  # until it is

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ticket = self.ticket
        self._runtime.forget(self)
        if ticket.state in ("queued", "leased"):
            ticket.state = "cancelled"
            self._runtime.put(Cancel(self.number))

    def progress(self, prompt_tokens: int, completion_tokens: int) -> None:
        lease = self.ticket.lease
        if lease is None:
            return
        cost = self._runtime.snapshot.tunables.cost
        if cost(prompt_tokens, completion_tokens) > lease.hold:
            self._runtime.put_lazily(Progress(self.number, prompt_tokens, completion_tokens))

    def first_byte(self) -> None:
        lease = self.ticket.lease
        if lease is not None:
            seconds = time.monotonic() - lease.dispatched_at
            self._runtime.put_lazily(FirstByte(self.number, seconds))

    def settle(self, usage: Usage) -> Settlement:
        self.ticket.state = "settled"
        self.settlement = self._runtime.settle(self, usage)
        return self.settlement

    def retry(self, exclude: frozenset[int]) -> None:
        ticket = self.ticket
        ticket.state, ticket.lease, ticket.avoid = "queued", None, exclude
        self._runtime.put(Retry(self.number, list(exclude)))

    async def position(self) -> tuple[int, float | None]:
        try:
            answer = await self._runtime.ask("position", self.number, ANSWER_SECONDS)
        except TimeoutError:
            return self.ticket.position_at_arrival, None
        return decode_position(answer)

    def _token_rate(self, lease: SeenLease) -> float:
        known = self.ticket.lease
        return 0.0 if known is None else known.token_rate

    def answer(self, refusal: SchedulerError | None = None) -> None:
        """The scheduler has let it in, or has not."""
        if self.answered is not None and not self.answered.done():
            self.answered.set_result(refusal)


class RemoteRuntime(Serving):
    """What serves requests where the scheduler is another process."""

    def __init__(self) -> None:
        super().__init__()
        self.name = secrets.token_hex(6)
        self._out = redis.OUT + self.name
        self._writer = Line(settings.REDIS_URL)
        self._reader = Line(settings.REDIS_URL)
        self._positions: dict[str, bytes] = {}
        self._numbers = itertools.count(1)
        self._claims: dict[int, RemoteClaim] = {}
        self._unanswered: dict[int, RemoteClaim] = {}  # oldest first
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._settlements = itertools.count(1)
        self._unsaved: deque[Ended] = deque()
        self._states: list[BackendView] = []
        self._names: dict[int, str] = {}
        # ---- the way to the scheduler
        self._epoch = 0
        self._session = 0
        self._registered = False
        self._sent = 0  # batches in this session
        self._received = 0
        self._heard_at = float("-inf")
        self._looked_at = float("-inf")  # when the positions were found
        self._passed_over = False  # what lies before them, since the last beat
        self.found = asyncio.Event()  # the scheduler has been heard for the first time
        self._outbox: list[ToScheduler] = []
        self._wanted = asyncio.Event()
        self._lazy: asyncio.TimerHandle | None = None
        self._beat_due = True
        self._beaten_at = float("-inf")  # when the last beat that came through was begun

    # ---- life

    @classmethod
    async def start(cls) -> Self:
        """Load the configuration and begin; wait a little for the scheduler, so that the first
        request finds it. Raises: DatabaseError."""
        runtime = await super().start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OUT_OF_TOUCH_SECONDS):
                await runtime.found.wait()
        return runtime

    async def _begin(self) -> None:
        snapshot, telemetry, _ = await self._ask_database(load_all)
        now = time.monotonic()
        self._adopt(snapshot, now)
        self._observe(telemetry, now)
        self._wanted.set()

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._background(), self._send(), self._receive(), self._sweep()]

    async def _end(self) -> None:
        """Tell the scheduler what is left to tell, and that this is the end."""
        if self._lazy is not None:
            self._lazy.cancel()
        with contextlib.suppress(*redis.ERRORS):
            self._outbox.append(Bye())
            await self._send_once()
            await self._writer.execute(
                ("DEL", redis.GATEWAY + self.name), ("SREM", redis.GATEWAYS, self.name)
            )
        self._writer.close()
        self._reader.close()

    @property
    def in_touch(self) -> bool:
        return time.monotonic() - self._heard_at < OUT_OF_TOUCH_SECONDS

    # ---- a job's way

    async def submit(self, job: Job) -> RemoteClaim:
        if not self.in_touch:
            raise Rejected("no_backend_available", _AWAY, RETRY_AFTER)
        number = next(self._numbers)
        claim = RemoteClaim(self, number, RemoteTicket(job, time.monotonic()))
        claim.answered = self._loop.create_future()
        self._claims[number] = self._unanswered[number] = claim
        self.put(Submit(number, job))
        try:
            refusal = await claim.answered
        except BaseException:  # the client has left
            claim.__exit__(None, None, None)
            raise
        claim.answered = None
        if refusal is not None:
            self.forget(claim)
            raise refusal
        return claim

    def forget(self, claim: RemoteClaim) -> None:
        """Its request has ended."""
        self._claims.pop(claim.number, None)
        self._unanswered.pop(claim.number, None)

    def settle(self, claim: RemoteClaim, usage: Usage) -> Settlement:
        told = Settle(
            claim.number,
            next(self._settlements),
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            usage.estimated,
        )
        self._unsaved.append(Ended(self._running(claim, time.monotonic()), told))
        self.put(told)
        prices = self.snapshot.tunables  # as they are in force here
        cost = prices.cost(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        return Settlement(cost, cost)

    def mark_failed(self, backend_id: int) -> None:
        self.put(Mark(backend_id, "failed"))

    def mark_busy(self, backend_id: int, seconds: float) -> None:
        self.put(Mark(backend_id, "busy", seconds))

    def mark_ok(self, backend_id: int) -> None:
        self.put_lazily(Mark(backend_id, "ok"))

    # ---- to the scheduler

    def put(self, message: ToScheduler) -> None:
        """Send this with whatever else there is by the end of this turn of the loop."""
        if self._registered:  # else it will be told with everything
            self._outbox.append(message)
            self._wanted.set()

    def put_lazily(self, message: ToScheduler) -> None:
        """Send this with the next message, or soon."""
        if self._registered:
            self._outbox.append(message)
            if self._lazy is None:
                self._lazy = self._loop.call_later(LAZY_SECONDS, self._lazy_is_due)

    def _lazy_is_due(self) -> None:
        self._lazy = None
        if self._outbox:
            self._wanted.set()

    async def _send(self) -> None:
        """One batch after the other: the longer one takes, the more go into the next."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._send_once()
            except redis.ERRORS as error:
                self._lose(error)
                await asyncio.sleep(redis.PAUSE_SECONDS)
                self._wanted.set()

    async def _send_once(self) -> None:
        commands: list[Command] = []
        now, beats = time.monotonic(), self._beat_due
        if beats:
            self._beat_due = False
            milliseconds = round(redis.GATEWAY_SECONDS * 1000)
            commands += [
                ("SET", redis.GATEWAY + self.name, b"", "PX", milliseconds),
                ("SADD", redis.GATEWAYS, self.name),
                ("EXPIRE", self._out, redis.OUT_EXPIRES_SECONDS),
            ]
        if self._epoch:
            commands.append(redis.adding(redis.IN, self._batch(), redis.IN_ENTRIES))
        if commands:
            await self._writer.execute(*commands)
        if beats:
            self._beaten_at = now

    def _batch(self) -> bytes:
        if not self._registered:
            self._begin_session()
        messages, self._outbox = self._outbox, []
        self._sent += 1
        return encode(Inward(VERSION, self.name, self._epoch, self._session, self._sent, messages))

    def _begin_session(self) -> None:
        """Tell everything that this gateway has."""
        now = time.monotonic()
        waits, runs, anew = [], [], []
        for claim in self._claims.values():
            ticket = claim.ticket
            if claim.answered is not None and ticket.state == "queued":
                anew.append(Submit(claim.number, ticket.job))
            elif ticket.state == "queued":
                waits.append(self._waiting(claim, now))
            elif ticket.state == "leased":
                runs.append(self._running(claim, now))
        self._outbox = [Register(waits, runs, list(self._unsaved)), *anew]
        self._session += 1
        self._sent = self._received = 0
        self._registered = True

    @staticmethod
    def _waiting(claim: RemoteClaim, now: float) -> Waits:
        ticket = claim.ticket
        age = now - ticket.enqueued_at
        return Waits(claim.number, ticket.job, age, ticket.attempts, list(ticket.avoid))

    @staticmethod
    def _running(claim: RemoteClaim, now: float) -> Runs:
        ticket, lease = claim.ticket, claim.ticket.lease
        assert lease is not None  # noqa: S101  it runs
        return Runs(
            claim.number,
            ticket.job,
            now - ticket.enqueued_at,
            ticket.attempts,
            lease.backend_id,
            now - lease.dispatched_at,
        )

    def _lose(self, error: BaseException) -> None:
        if self._registered:
            logger.warning("Lost touch with the scheduler: %s", error)
        self._registered = False
        self._beat_due = True

    # ---- from the scheduler

    async def _receive(self) -> None:
        while True:
            try:
                if not self._positions:
                    await self._find_scheduler()
                found = await redis.read(self._reader, self._positions)
            except redis.ERRORS as error:
                self._lose(error)
                await asyncio.sleep(redis.PAUSE_SECONDS)
                continue
            for _, data in found.get(redis.ALL, ()):
                self._hear(data)
            if time.monotonic() - self._beaten_at > redis.GATEWAY_SECONDS:
                self._register_again()  # given up perhaps, and its slots granted to others
            for _, data in found.get(self._out, ()):
                self._take(data)

    async def _find_scheduler(self) -> None:
        """Begin with the last beat, whoever's it is, and with whatever is told from now on."""
        position, data = await redis.last_entry(self._reader, redis.ALL)
        own, _ = await redis.last_entry(self._reader, self._out)
        self._positions = {redis.ALL: position, self._out: own}
        self._looked_at = time.monotonic()
        self._passed_over = self._session > 0
        if data and (batch := read(decode_broadcast, data)) is not None:
            self._follow(batch.beat)

    def _hear(self, data: bytes) -> None:
        batch = read(decode_broadcast, data)
        if batch is None or batch.beat.epoch < self._epoch:
            return  # another version's, or of a leader that has been replaced
        beat = batch.beat
        self._heard_at = time.monotonic()
        self.found.set()
        self._follow(beat)
        if self._passed_over:  # an answer, perhaps, and nothing else would tell
            self._passed_over = False
            self._register_again()
        if beat.backends:
            self._states = beat.backends
        saved = beat.saved.get(self.name, 0)
        unsaved = self._unsaved
        while unsaved and unsaved[0].settle.serial <= saved:
            unsaved.popleft()

    def _follow(self, beat: Beat) -> None:
        if beat.epoch > self._epoch:
            self._epoch = beat.epoch
            self._registered = False
            self._wanted.set()

    def _take(self, data: bytes) -> None:
        batch = read(decode_outward, data)
        if batch is None or (batch.epoch, batch.session) != (self._epoch, self._session):
            return  # an older leader's, or of before all was told again
        if not self._registered:
            return  # nor that: all will be told again
        self._received += 1
        if batch.number != self._received:
            self._register_again()
            return
        for message in batch.messages:
            self._heed(message)

    def _register_again(self) -> None:
        self._registered = False
        self._wanted.set()

    def _heed(self, message: ToGateway) -> None:
        match message:
            case Leased():
                self._on_leased(message)
            case Queued():
                self._on_queued(message)
            case Refused():
                self._on_refused(message)
            case Told():
                answer = self._questions.get(message.question)
                if answer is not None and not answer.done():
                    answer.set_result(message.answer)
            case Again():
                self._register_again()

    def _on_leased(self, told: Leased) -> None:
        claim = self._claims.get(told.number)
        if claim is None or claim.ticket.state != "queued":
            return  # it has left, which the scheduler has been told
        ticket = claim.ticket
        if told.attempt != ticket.attempts + 1:
            return
        decision = told.decision._replace(names=self._names)
        ticket.lease = RemoteLease(told, decision, time.monotonic())
        ticket.attempts = told.attempt
        ticket.position_at_arrival, ticket.wait_reason = told.position_at_arrival, told.wait_reason
        ticket.state = "leased"
        claim.limited = claim.limited or told.limited
        self._unanswered.pop(told.number, None)
        claim.answer()
        claim.wake()

    def _on_queued(self, told: Queued) -> None:
        claim = self._unanswered.pop(told.number, None)
        if claim is not None:
            claim.ticket.position_at_arrival = told.position_at_arrival
            claim.ticket.wait_reason = told.wait_reason
            claim.limited = told.limited
            claim.answer()

    def _on_refused(self, told: Refused) -> None:
        claim = self._claims.get(told.number)
        if claim is None or claim.ticket.state != "queued":
            return
        kind = Evicted if told.after_queueing else Rejected
        error = kind(told.reason, told.message, told.retry_after, hopeless=told.hopeless)
        self._drop(claim, error)

    def _drop(self, claim: RemoteClaim, error: SchedulerError) -> None:
        """It waits no more."""
        self._unanswered.pop(claim.number, None)
        claim.ticket.state = "evicted"
        if claim.answered is not None:
            refusal = Rejected(
                error.reason, error.message, error.retry_after, hopeless=error.hopeless
            )
            claim.answer(refusal)
            return
        claim.ticket.error = Evicted(error.reason, error.message, error.retry_after)
        claim.wake()

    # ---- time

    async def _sweep(self) -> None:
        beat_at = 0.0
        while True:
            now = time.monotonic()
            self._give_up(now)
            if now - beat_at >= redis.BEAT_SECONDS:
                beat_at = now
                self._beat_due = True
                self._wanted.set()
            await asyncio.sleep(SWEEP_SECONDS)

    def _give_up(self, now: float) -> None:
        """Answer whoever has waited too long for a scheduler that does not answer."""
        late = [
            claim
            for claim in self._unanswered.values()
            if now - claim.ticket.enqueued_at > ADMISSION_SECONDS
        ]
        silent = now - self._heard_at
        if silent > GIVE_UP_SECONDS:
            late = [claim for claim in self._claims.values() if claim.ticket.state == "queued"]
        for claim in late:
            self._drop(claim, Rejected("no_backend_available", _AWAY, RETRY_AFTER))
            self.put(Cancel(claim.number))
        if min(silent, now - self._looked_at) > OUT_OF_TOUCH_SECONDS:
            self._positions = {}  # begin anew: Redis may be another one, or its clock be set back

    # ---- looking

    def backends(self) -> list[BackendView]:
        return self._states

    async def ask(self, what: str, argument: Any, seconds: float) -> bytes:
        """The scheduler's answer to a question. Raises: TimeoutError."""
        if not self.in_touch:
            raise TimeoutError(_AWAY)
        number = next(self._numbers)
        answer = self._questions[number] = self._loop.create_future()
        self.put(Ask(number, what, argument))
        try:
            async with asyncio.timeout(seconds):
                told: bytes = await answer
        finally:
            del self._questions[number]
        if not told:
            raise TimeoutError("The scheduler cannot answer this.")
        return told

    async def _current_view(self) -> LiveView:
        return decode_view(await self.ask("view", None, ANSWER_SECONDS))

    async def _all_waiting(self) -> list[QueuedView]:
        taken_at, views = decode_waiting(await self.ask("waiting", None, ANSWER_SECONDS))
        offset = time.monotonic() - taken_at
        return [replace(view, enqueued_at=view.enqueued_at + offset) for view in views]

    async def _take_picture(self) -> QueuePicture:
        return QueuePicture(*decode_picture(await self.ask("picture", None, PICTURE_SECONDS)))

    async def use_of(self, holders: Sequence[Holder]) -> list[Use]:
        asked = msgspec.to_builtins(holders)
        return decode_uses(await self.ask("limits", asked, ANSWER_SECONDS))

    async def _evict(self, request_id: str) -> bool:
        return decode_evicted(await self.ask("evict", request_id, ANSWER_SECONDS))

    # ---- configuration

    def _adopt(self, snapshot: Snapshot, now: float) -> None:
        super()._adopt(snapshot, now)
        self._names = {key: endpoint.name for key, endpoint in snapshot.endpoints.items()}

    async def _polled(self, now: float) -> None:
        pass
