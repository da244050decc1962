"""The asyncio owner of the one mutable ``Scheduler``.

Everything that changes the scheduler happens on the event loop's thread, through a ``Claim``; the
pages, which run in Django's threads, get finished views. Nothing here waits for the database
while a request waits: the configuration, telemetry and checkpoints move in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec
from django.db import DatabaseError
from django.db.models import JSONField, TextField, Value
from django.db.models.functions import Cast
from django.utils import timezone

from accounts.limits import Hold, Holder, Refusal, Use
from backends.draining import disable_drained
from scheduler.admission import Admission, load_unknown
from scheduler.core.checkpoint import BrokenCheckpointError
from scheduler.core.errors import Evicted, Rejected
from scheduler.core.jobs import Job, Usage
from scheduler.core.parts import Parts
from scheduler.core.picture import FlowPicture
from scheduler.core.scheduler import BackendView, QueuedView, Scheduler, Settlement, Ticket
from scheduler.core.tunables import Tunables
from scheduler.metering import SAMPLE_SECONDS, Meter
from scheduler.models import ShareCheckpoint
from scheduler.serving import Claim, LiveView, QueuePicture, SeenLease, Serving
from scheduler.snapshot import BackendTelemetry, Snapshot, load_snapshot, load_telemetry

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

CHECKPOINT_SECONDS = 1.0
CHECKPOINT_PAUSE = 10.0  # times as long as the last one took: with 10,000 users that is 2 s
VIEW_SECONDS = 0.5


class OwnClaim(Claim):
    """A claim on the scheduler of this process."""

    __slots__ = ("_runtime", "hold")
    ticket: Ticket

    def __init__(self, runtime: Runtime, ticket: Ticket, hold: Hold | None) -> None:
        super().__init__(ticket)
        self._runtime = runtime
        self.hold = hold  # what is reserved of limits; None: none concerns it
        ticket.owner = self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Free what is still held."""
        ticket, runtime = self.ticket, self._runtime
        runtime.forget(self)
        if ticket.state == "queued" or ticket.state == "leased":
            runtime.release(self)
        if self.hold is not None and self.settlement is None:
            # What was dropped without being tried was refused, and uses nothing.
            counted = ticket.state != "evicted" or ticket.attempts > 0
            runtime.admission.ledger.release(self.hold, time.monotonic(), counted=counted)
        # What refers to each other would wait for the collector, which takes a tenth of the time
        # of a request where it has to free them.
        ticket.owner = None
        ticket.lease = None

    def wake(self) -> None:
        if self.hold is not None:
            self.hold.proceed()
        super().wake()

    def progress(self, prompt_tokens: int, completion_tokens: int) -> None:
        lease = self.ticket.lease
        if lease is not None:
            self._runtime.scheduler.progress(
                lease, prompt_tokens, completion_tokens, time.monotonic()
            )

    def first_byte(self) -> None:
        if self.ticket.lease is not None:
            self._runtime.scheduler.first_byte(self.ticket.lease, time.monotonic())

    def settle(self, usage: Usage) -> Settlement:
        settlement = self.settlement = self._runtime.settle(self.ticket, usage)
        if self.hold is not None:
            ledger = self._runtime.admission.ledger
            ledger.settle(self.hold, settlement.charged_tokens, time.monotonic())
        return settlement

    def retry(self, exclude: frozenset[int]) -> None:
        self._runtime.retry(self.ticket, exclude)

    async def position(self) -> tuple[int, float | None]:
        return self._runtime.scheduler.position(self.ticket, time.monotonic())

    def _token_rate(self, lease: SeenLease) -> float:
        return self._runtime.scheduler.token_rate(lease.backend_id)


class Runtime(Serving):
    """The scheduler in the process that serves."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(Tunables())
        self.admission = Admission()
        self._claims: dict[str, OwnClaim] = {}  # under way, by request id
        self._settled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0  # on the loop's clock
        self._view: LiveView | None = None
        self._viewing: asyncio.Task[LiveView] | None = None  # taking the next one

    # ---- life

    async def _begin(self) -> None:
        """Load the configuration and the last checkpoint. Raises: DatabaseError."""
        snapshot, telemetry, checkpoint = await self._ask_database(load_all)
        now = time.monotonic()
        self._adopt(snapshot, now)
        self._observe(telemetry, now)
        if checkpoint is not None:
            with broken_checkpoint_told():
                self.scheduler.restore(checkpoint, now)
        await self._learn_budgets()

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._background(), self._write_checkpoints(), self._meter_shares()]

    async def _end(self) -> None:
        """Save the shares."""
        if self._timer is not None:
            self._timer.cancel()
        with contextlib.suppress(DatabaseError):
            await self._save_checkpoint()

    @property
    def in_touch(self) -> bool:
        return True

    # ---- a job's way

    async def submit(self, job: Job) -> OwnClaim:
        """Check limits, queue a job and serve at once what can be served. Raises: Rejected."""
        now = time.monotonic()
        hold = self._admit(job, now) if self.admission.has_limits else None
        try:
            claim = OwnClaim(self, self.scheduler.submit(job, now), hold)
            self._pump(now)
            if hold is not None:
                self._check_queue(claim, hold, now)
            if claim.ticket.state == "evicted":
                error = claim.ticket.error
                assert error is not None  # noqa: S101  an evicted ticket says why
                raise Rejected(error.reason, error.message, error.retry_after)
        except Rejected:
            if hold is not None:
                self.admission.ledger.release(hold, now, counted=False)
            raise
        if hold is not None:
            claim.limited = self.admission.limited(hold, now)
        self._claims[job.request_id] = claim
        return claim

    def resume(
        self,
        job: Job,
        *,
        age: float,
        attempts: int,
        avoid: frozenset[int] = frozenset(),
        running: tuple[int, float] | None = None,
    ) -> OwnClaim:
        """Take up a job that another scheduler has had for ``age`` seconds; ``running`` is
        (backend id, for how many seconds). Nothing is granted yet. Raises: Rejected."""
        now = time.monotonic()
        ticket = self.scheduler.resume(
            job,
            now,
            enqueued_at=now - age,
            attempts=attempts,
            avoid=avoid,
            running=None if running is None else (running[0], now - running[1]),
        )
        hold = self.admission.adopt(None, job, now)
        claim = self._claims[job.request_id] = OwnClaim(self, ticket, hold)
        return claim

    def _admit(self, job: Job, now: float) -> Hold | None:
        answer = self.admission.admit(job, now)
        if isinstance(answer, Refusal):
            raise self._reached(answer, job, now)
        return answer

    def _check_queue(self, claim: OwnClaim, hold: Hold, now: float) -> None:
        """The bounds of keys and models, which concern only what has to wait."""
        if claim.ticket.state == "queued" and (full := hold.wait()) is not None:
            self.scheduler.cancel(claim.ticket, now)
            raise self._reached(full, claim.ticket.job, now)

    def _reached(self, refusal: Refusal, job: Job, now: float) -> Rejected:
        if refusal.resets_at is None and refusal.is_worth_waiting:
            return self.admission.reached(refusal, self.scheduler.retry_after(job, now))
        return self.admission.reached(refusal)

    async def use_of(self, holders: Sequence[Holder]) -> list[Use]:
        return self.admission.use_of(holders)

    def forget(self, claim: OwnClaim) -> None:
        """Its request has ended: it can be evicted no more."""
        self._claims.pop(claim.ticket.job.request_id, None)

    def settle(self, ticket: Ticket, usage: Usage) -> Settlement:
        lease = ticket.lease
        assert lease is not None  # noqa: S101  only a leased job has output
        now = time.monotonic()
        settlement = self.scheduler.settle(lease, usage, now)
        self._settled = True
        self._pump(now)
        return settlement

    def retry(self, ticket: Ticket, exclude: frozenset[int]) -> None:
        lease = ticket.lease
        assert lease is not None  # noqa: S101  only an attempt can fail
        now = time.monotonic()
        self.scheduler.retry(lease, now, exclude=exclude)
        self._pump(now)

    def release(self, claim: OwnClaim) -> None:
        """Leave the queue, or give the slot back without charge (R6)."""
        now = time.monotonic()
        self.scheduler.cancel(claim.ticket, now)
        self._pump(now)

    def mark_failed(self, backend_id: int) -> None:
        """P5: this backend gets nothing for the fail window."""
        self.scheduler.mark_failed(backend_id, time.monotonic())

    def mark_busy(self, backend_id: int, seconds: float) -> None:
        """P5: this backend said that it is full; it is offered nothing for ``seconds``."""
        self.scheduler.mark_busy(backend_id, time.monotonic(), seconds)

    def mark_ok(self, backend_id: int) -> None:
        """P5: this backend has answered."""
        now = time.monotonic()
        if self.scheduler.mark_ok(backend_id, now):
            self._arm(now)

    def _pump(self, now: float) -> None:
        for ticket in self.scheduler.pump(now):
            if ticket.owner is not None:
                ticket.owner.wake()
        if self.scheduler.waits:
            self._arm(now)

    def _arm(self, now: float) -> None:
        """Wake up by ourselves when time alone will change something."""
        event = self.scheduler.next_event(now)
        if event is None:
            return
        when = self._loop.time() + max(0.0, event - now)
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        # The time is kept here, as uvloop's handles do not know it when it is now.
        self._timer, self._timer_at = self._loop.call_at(when, self._on_timer), when

    def _on_timer(self) -> None:
        self._timer = None
        self._pump(time.monotonic())

    # ---- views

    def backends(self) -> list[BackendView]:
        return self.scheduler.backend_states(time.monotonic())

    async def _all_waiting(self) -> list[QueuedView]:
        return self.scheduler.queue(time.monotonic())

    async def _take_picture(self) -> QueuePicture:
        now = time.monotonic()
        flows: list[FlowPicture] = []
        for part in self.scheduler.queue_parts(now):
            flows += part
            await asyncio.sleep(0)  # who comes meanwhile is served
        return QueuePicture(now, flows)

    async def _evict(self, request_id: str) -> bool:
        claim = self._claims.get(request_id)
        if claim is None or claim.ticket.state != "queued":
            return False
        now = time.monotonic()
        why = "An administrator removed this request from the queue."
        self.scheduler.evict(claim.ticket, Evicted("permission_denied", why), now)
        self._pump(now)
        return True

    async def _current_view(self) -> LiveView:
        view = self._view
        if view is not None and 0 <= time.time() - view.taken_at < VIEW_SECONDS:
            return view
        if self._viewing is None or self._viewing.done():
            self._viewing = asyncio.create_task(self._take_view())
        return await asyncio.shield(self._viewing)  # others may be waiting for it too

    async def _take_view(self) -> LiveView:
        wall, now = time.time(), time.monotonic()
        backends = self.scheduler.backend_states(now)
        stats = await pausing(self.scheduler.stats_in_parts(now))
        gap, bound = await pausing(self.scheduler.service_gap_in_parts(now))
        self._view = LiveView(
            taken_at=wall,
            stats=stats,
            backends=backends,
            shares=stats.users,
            gap=gap,
            gap_bound=bound,
            configuration_version=self.snapshot.version,
            limits_refused=dict(self.admission.ledger.refused),
            limits_shadowed=dict(self.admission.ledger.shadowed),
            burst=self.scheduler.burst_level(now),
        )
        return self._view

    # ---- background

    async def _polled(self, now: float) -> None:
        self._pump(now)
        if orphans := self.admission.tidy(self._claims, now):
            logger.error("Released what %d lost requests had reserved", orphans)
        try:
            await self._learn_budgets()
        except DatabaseError as error:
            logger.warning("Cannot read what is used of budgets yet: %s", error)
        await self._end_drains()

    async def _learn_budgets(self) -> None:
        """What was used before of budgets that are new here. Raises: DatabaseError."""
        admission = self.admission
        if admission.unknown:
            unknown = list(admission.unknown)
            admission.tell_used(
                await self._ask_database(load_unknown, unknown, self.spool.directory)
            )

    async def _end_drains(self) -> None:
        """Disable the draining backends that have nothing left to finish.

        The snapshot that says "draining" is in force, so nothing new has begun since on a backend
        that is idle here.
        """
        if not self.snapshot.draining:
            return
        states = self.scheduler.backend_states(time.monotonic())
        idle = self.snapshot.draining - {state.id for state in states if state.in_flight}
        if not idle:
            return
        try:
            names = await self._ask_database(disable_drained, idle)
        except DatabaseError as error:
            logger.warning("Cannot disable drained backends yet: %s", error)
            return
        for name in names:
            logger.info("Backend %s has been drained and is disabled now", name)

    def _adopt(self, snapshot: Snapshot, now: float) -> None:
        self.scheduler.configure(
            tunables=snapshot.tunables,
            users=snapshot.users,
            backends=snapshot.backends,
            strategies=snapshot.strategies,
            now=now,
        )
        super()._adopt(snapshot, now)
        held = {
            request_id: (claim.hold, claim.ticket.job)
            for request_id, claim in self._claims.items()
            if claim.settlement is None
        }
        self.spool.flush()  # a record is in the file as soon as it is open no more
        under_way = {*self._claims, *(one.request_id for one in self.spool.open_records())}
        for request_id, hold in self.admission.configure(snapshot, held, under_way, now).items():
            self._claims[request_id].hold = hold

    def _observe(self, telemetry: list[BackendTelemetry], now: float) -> None:
        to_monotonic = now - time.time()
        super()._observe(telemetry, now)
        for known in telemetry:
            moment = min(now, known.observed_at + to_monotonic)
            self.scheduler.observe(known.backend_id, known.at(moment))

    async def _write_checkpoints(self) -> None:
        taken = 0.0
        while True:
            await asyncio.sleep(max(CHECKPOINT_SECONDS, CHECKPOINT_PAUSE * taken))
            began = time.monotonic()
            try:
                await self._save_checkpoint()
            except DatabaseError as error:
                self._settled = True  # tried again in a second
                logger.warning("Cannot save the shares: %s", error)
            except asyncio.CancelledError:
                self._settled = True  # the last checkpoint of all has them
                raise
            except Exception:
                logger.exception("Cannot save the shares")
            taken = time.monotonic() - began

    async def _meter_shares(self) -> None:
        meter = Meter()
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            try:
                await self._ask_database(meter.sample, await self._current_view())
            except DatabaseError as error:
                logger.warning("Shares were not sampled: %s", error)
            except Exception:
                logger.exception("Shares were not sampled")

    async def _save_checkpoint(self) -> None:
        if self._settled:
            self._settled = False
            state = await pausing(self.scheduler.checkpoint_in_parts(time.monotonic()))
            await self._ask_database(save_state, state)


@contextlib.contextmanager
def broken_checkpoint_told() -> Iterator[None]:
    """Go on without, rather than serve nobody."""
    try:
        yield
    except BrokenCheckpointError as error:
        logger.error("Saved shares cannot be read, and are left out: %s", error)


async def pausing(parts: Parts[_T]) -> _T:
    """What all the parts together show; whoever comes meanwhile is served between two of them."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            seen: _T = end.value
            return seen
        await asyncio.sleep(0)


# ---- in the database's thread


def load_all() -> tuple[Snapshot, list[BackendTelemetry], dict[str, Any] | None]:
    checkpoint = ShareCheckpoint.objects.filter(pk=1).values_list("state", flat=True).first()
    return load_snapshot(), load_telemetry(), checkpoint


def save_state(state: dict[str, Any]) -> None:
    # Not encoded by the field: json.dumps keeps the interpreter to itself for as long as it takes
    # (10,000 users: 75 ms), and this process serves nobody meanwhile. msgspec takes half of that.
    text = Value(msgspec.json.encode(state).decode(), TextField())
    ShareCheckpoint.objects.update_or_create(
        pk=1, defaults={"saved_at": timezone.now(), "state": Cast(text, JSONField())}
    )
