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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from django.conf import settings
from django.db import DatabaseError, connection
from django.utils import timezone

from backends.draining import disable_drained
from backends.upstream import Upstream
from scheduler.core.errors import Evicted, Rejected
from scheduler.core.jobs import Job, Telemetry, Usage
from scheduler.core.picture import FlowPicture
from scheduler.core.scheduler import (
    BackendView,
    Lease,
    QueuedView,
    Scheduler,
    Settlement,
    ShareView,
    Stats,
    Ticket,
)
from scheduler.core.tunables import Tunables
from scheduler.models import ShareCheckpoint
from scheduler.snapshot import (
    BackendTelemetry,
    Snapshot,
    configuration_version,
    load_snapshot,
    load_telemetry,
)
from scheduler.spool import Spool

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

POLL_SECONDS = 1.0
CHECKPOINT_SECONDS = 1.0
SYNC_SECONDS = 0.5
ANNOUNCE_SECONDS = 0.02
VIEW_SECONDS = 0.5
CLOSE_SECONDS = 2.0

_current: Runtime | None = None


def current() -> Runtime | None:
    """The runtime of this process, or None where none runs."""
    return _current


@dataclass(frozen=True, slots=True)
class LiveView:
    """What the pages show of the running scheduler."""

    taken_at: float  # epoch seconds
    stats: Stats
    backends: list[BackendView]
    shares: list[ShareView]
    gap: float  # tokens per unit of weight
    gap_bound: float
    configuration_version: int


@dataclass(frozen=True, slots=True)
class QueuePicture:
    """Everything that waited at one moment."""

    taken_at: float  # monotonic seconds, as ``enqueued at`` in the flows
    flows: list[FlowPicture]


class Claim:
    """One job's way through the scheduler: waiting, holding a slot, settled.

    Used as a context manager: whatever happened, leaving it frees what is still held. A job that
    waits leaves the queue; a slot that was not settled is given back without charge.
    """

    __slots__ = ("_runtime", "_waiter", "settlement", "ticket")

    def __init__(self, runtime: Runtime, ticket: Ticket) -> None:
        self._runtime = runtime
        self._waiter: asyncio.Future[None] | None = None
        self.ticket = ticket
        self.settlement: Settlement | None = None
        ticket.owner = self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runtime.forget(self)
        if self.ticket.state in ("queued", "leased"):
            self._runtime.release(self)
        # What refers to each other would wait for the collector, which takes a tenth of the time
        # of a request where it has to free them.
        self.ticket.owner = None
        self.ticket.lease = None

    @property
    def lease(self) -> Lease | None:
        return self.ticket.lease if self.ticket.state == "leased" else None

    async def wait(self, seconds: float | None = None) -> Lease | None:
        """Wait for a slot, at most ``seconds``. None: still waiting.

        Raises: Evicted.
        """
        if self.ticket.state == "queued":
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(seconds):
                    await self._waiter
            except TimeoutError:
                return None
            finally:
                self._waiter = None
        if self.ticket.state == "evicted":
            raise self.ticket.error or Evicted("no_backend_available", "The job was dropped.")
        return self.ticket.lease

    def wake(self) -> None:
        """The ticket has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def progress(self, prompt_tokens: int, completion_tokens: int) -> None:
        """So much has been delivered (R4)."""
        lease = self.ticket.lease
        if lease is not None:
            self._runtime.scheduler.progress(
                lease, prompt_tokens, completion_tokens, time.monotonic()
            )

    def settle(self, usage: Usage) -> Settlement:
        """The answer has ended, whole or not: free the slot and charge what was used (R5)."""
        self.settlement = self._runtime.settle(self.ticket, usage)
        return self.settlement

    def retry(self, exclude: frozenset[int]) -> None:
        """The attempt failed before any output: back to the job's place in the order (P6)."""
        self._runtime.retry(self.ticket, exclude)


class Runtime:
    """Scheduler, configuration, upstream connections and spool of one process."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(Tunables())
        self.snapshot = Snapshot()
        self.upstream = Upstream()
        self.spool = Spool(settings.SPOOL_DIR)
        self.stopping = False
        self.database_away = False
        self.serving: set[asyncio.Task[Any]] = set()  # one task for each request under way
        self._claims: dict[str, Claim] = {}  # under way, by request id
        self._loop = asyncio.get_running_loop()
        # One reads the configuration, one saves shares: a lock on writing delays no reading.
        self._database = ThreadPoolExecutor(2, thread_name_prefix="database")
        self._settled = False
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0  # on the loop's clock
        self._view: LiveView | None = None
        self._telemetry: dict[int, Telemetry] = {}

    # ---- life

    @classmethod
    async def start(cls) -> Runtime:
        """Load the configuration and the last checkpoint, and begin. Raises: DatabaseError."""
        global _current
        runtime = cls()
        try:
            snapshot, telemetry, checkpoint = await runtime._ask_database(_load_everything)
        except BaseException:
            runtime.spool.stop()
            runtime._database.shutdown(wait=False)
            raise
        now = time.monotonic()
        runtime._adopt(snapshot, now)
        runtime._observe(telemetry, now)
        if checkpoint is not None:
            runtime.scheduler.restore(checkpoint, now)
        for job in (
            runtime._watch_configuration(),
            runtime._write_checkpoints(),
            runtime._announce_records(),
            runtime._sync_records(),
        ):
            runtime._tasks.append(asyncio.create_task(job))
        _current = runtime
        return runtime

    async def stop(self) -> None:
        """End the background work, save the shares, close connections and the spool."""
        global _current
        self.stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        with contextlib.suppress(DatabaseError):
            await self._save_checkpoint()
        self._database.shutdown(wait=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.upstream.close()
        await asyncio.to_thread(self.spool.stop)
        if _current is self:
            _current = None

    # ---- a job's way

    def submit(self, job: Job) -> Claim:
        """Queue a job and serve at once what can be served. Raises: Rejected."""
        now = time.monotonic()
        claim = Claim(self, self.scheduler.submit(job, now))
        self._pump(now)
        if claim.ticket.state == "evicted":
            error = claim.ticket.error
            assert error is not None  # noqa: S101  an evicted ticket says why
            raise Rejected(error.reason, error.message, error.retry_after)
        self._claims[job.request_id] = claim
        return claim

    def forget(self, claim: Claim) -> None:
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

    def release(self, claim: Claim) -> None:
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
        self.scheduler.mark_ok(backend_id, now)
        self._arm(now)

    def first_byte(self, ticket: Ticket) -> None:
        """The backend has begun to answer; feeds its latency (P2)."""
        if ticket.lease is not None:
            self.scheduler.first_byte(ticket.lease, time.monotonic())

    def usage_of_abandoned(self, lease: Lease, prompt_tokens: int) -> Usage:
        """What a running job has cost whose client left before it had any output (R4): its prompt
        and the time it ran, at the backend's measured rate."""
        seconds = max(0.0, time.monotonic() - lease.dispatched_at)
        rate = self.scheduler.token_rate(lease.backend_id)
        limit = lease.ticket.job.max_tokens
        tokens = int(seconds * rate)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=tokens if limit is None else min(tokens, limit),
            estimated=True,
        )

    def position(self, claim: Claim) -> tuple[int, float | None]:
        """Jobs until this one is served, itself included, and an estimate in seconds."""
        return self.scheduler.position(claim.ticket, time.monotonic())

    def resolve_alias(self, name: str) -> str:
        """The model that ``name`` stands for: an alias's first target that a backend can serve
        now, busy or not; else the first that one lists, else the first that one has."""
        targets = self.snapshot.aliases.get(name)
        if targets is None:
            return name
        known = self.snapshot.models
        for names in (self._served_models(), self.snapshot.listed_models, known):
            for target in targets:
                if target in known and target in names:
                    return target
        return targets[0]

    def _served_models(self) -> set[str]:
        """The models of the backends that are neither failed nor down."""
        states = self.scheduler.backend_states(time.monotonic())
        able = {state.id for state in states if state.state in ("ready", "unknown")}
        return {name for b in self.snapshot.backends if b.backend_id in able for name in b.models}

    def loaded_models(self) -> set[str]:
        """What backends have in memory, as they name it, by the last poll of each."""
        return set().union(*(t.loaded_models or () for t in self._telemetry.values()))

    def cancel_serving(self) -> None:
        """End every request under way, as at the end of a shutdown's patience."""
        for task in self.serving:
            task.cancel()

    def _pump(self, now: float) -> None:
        for ticket in self.scheduler.pump(now):
            if ticket.owner is not None:
                ticket.owner.wake()
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

    # ---- views for Django's threads

    def view(self) -> LiveView:
        """A view at most ``VIEW_SECONDS`` old; to be called from any other thread.

        Raises: TimeoutError when the event loop does not answer within 2 s.
        """
        return self._ask(self._current_view)

    def waiting(self) -> list[QueuedView]:
        """Every waiting job in the order of service; to be called from any other thread."""
        return self._ask(lambda: self.scheduler.queue(time.monotonic()))

    def queue_picture(self) -> QueuePicture:
        """Everything that waits, taken in small parts; to be called from any other thread.

        Raises: TimeoutError when the event loop does not answer within 5 s.
        """
        return asyncio.run_coroutine_threadsafe(self._take_picture(), self._loop).result(5.0)

    async def _take_picture(self) -> QueuePicture:
        now = time.monotonic()
        flows: list[FlowPicture] = []
        for part in self.scheduler.queue_parts(now):
            flows += part
            await asyncio.sleep(0)  # who comes meanwhile is served
        return QueuePicture(now, flows)

    def evict(self, request_id: str) -> bool:
        """Drop a waiting job, whose client gets an error that no retry mends; to be called from any
        other thread. False: no such job waits."""
        return self._ask(lambda: self._evict(request_id))

    def _evict(self, request_id: str) -> bool:
        claim = self._claims.get(request_id)
        if claim is None or claim.ticket.state != "queued":
            return False
        now = time.monotonic()
        why = "An administrator removed this request from the queue."
        self.scheduler.evict(claim.ticket, Evicted("cancelled_by_admin", why), now)
        self._pump(now)
        return True

    def _ask(self, question: Callable[[], _T]) -> _T:
        async def answer() -> _T:
            return question()

        future: Future[_T] = asyncio.run_coroutine_threadsafe(answer(), self._loop)
        return future.result(timeout=2.0)

    def _current_view(self) -> LiveView:
        wall = time.time()
        if self._view is None or not 0 <= wall - self._view.taken_at < VIEW_SECONDS:
            now = time.monotonic()
            gap, bound = self.scheduler.service_gap(now)
            self._view = LiveView(
                taken_at=wall,
                stats=self.scheduler.stats(now),
                backends=self.scheduler.backend_states(now),
                shares=self.scheduler.shares(now),
                gap=gap,
                gap_bound=bound,
                configuration_version=self.snapshot.version,
            )
        return self._view

    async def _ask_database(self, question: Callable[..., _T], *args: Any) -> _T:
        def ask() -> _T:
            try:
                return question(*args)
            finally:
                # Kept, it would be one connection more for each thread, or a broken one.
                connection.close()

        return await self._loop.run_in_executor(self._database, ask)

    # ---- background

    async def _watch_configuration(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                snapshot, telemetry = await self._ask_database(_load_changes, self.snapshot.version)
            except DatabaseError as error:
                self._database_is(away=True, error=error)
                continue
            except Exception:
                logger.exception("Cannot load the configuration; the last one stays in force")
                continue
            self._database_is(away=False)
            now = time.monotonic()
            if snapshot is not None:
                self._adopt(snapshot, now)
            self._observe(telemetry, now)
            self._pump(now)
            await self._end_drains()

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

    def _database_is(self, *, away: bool, error: Exception | None = None) -> None:
        if away != self.database_away:
            self.database_away = away
            if away:
                logger.error("The database is away, running on what is known: %s", error)
            else:
                logger.info("The database is back")

    def _adopt(self, snapshot: Snapshot, now: float) -> None:
        self.scheduler.configure(
            tunables=snapshot.tunables,
            users=snapshot.users,
            backends=snapshot.backends,
            strategies=snapshot.strategies,
            now=now,
        )
        self.snapshot = snapshot

    def _observe(self, telemetry: list[BackendTelemetry], now: float) -> None:
        to_monotonic = now - time.time()
        self._telemetry = {known.backend_id: known.telemetry for known in telemetry}
        for known in telemetry:
            moment = min(now, known.observed_at + to_monotonic)
            self.scheduler.observe(known.backend_id, known.at(moment))

    async def _write_checkpoints(self) -> None:
        while True:
            await asyncio.sleep(CHECKPOINT_SECONDS)
            try:
                await self._save_checkpoint()
            except DatabaseError as error:
                self._settled = True  # tried again in a second
                logger.warning("Cannot save the shares: %s", error)
            except Exception:
                logger.exception("Cannot save the shares")

    async def _save_checkpoint(self) -> None:
        if self._settled:
            self._settled = False
            await self._ask_database(_save_state, self.scheduler.checkpoint(time.monotonic()))

    async def _announce_records(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_SECONDS)
            self.spool.announce()

    async def _sync_records(self) -> None:
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            await asyncio.to_thread(self.spool.sync)


# ---- in the database's thread


def _load_everything() -> tuple[Snapshot, list[BackendTelemetry], dict[str, Any] | None]:
    checkpoint = ShareCheckpoint.objects.filter(pk=1).values_list("state", flat=True).first()
    return load_snapshot(), load_telemetry(), checkpoint


def _load_changes(known_version: int) -> tuple[Snapshot | None, list[BackendTelemetry]]:
    changed = configuration_version() != known_version
    return load_snapshot() if changed else None, load_telemetry()


def _save_state(state: dict[str, Any]) -> None:
    ShareCheckpoint.objects.update_or_create(
        pk=1, defaults={"saved_at": timezone.now(), "state": state}
    )
