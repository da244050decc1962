"""What a process that serves requests has, whichever process schedules them.

Configuration, connections and records are its own. The scheduler may live in the same process
(``scheduler.runtime``) or in another one; the gateway and the pages use both alike, through
``Serving`` and ``Claim``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from django.conf import settings
from django.db import DatabaseError, connection

from accounts.limits import Holder, Standing, Use
from accounts.uses import note_uses
from backends.outbox import Outbox
from backends.upstream import Upstream
from scheduler import pulse
from scheduler.captures import CAPTURES, CaptureSpool
from scheduler.core.decisions import Decision, WaitReason
from scheduler.core.errors import Evicted
from scheduler.core.jobs import Job, Telemetry, Usage
from scheduler.core.picture import FlowPicture
from scheduler.core.tickets import Settlement, TicketState
from scheduler.core.views import BackendView, QueuedView, ShareView, Stats
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
SYNC_SECONDS = 0.5
USES_SECONDS = 10.0
ANNOUNCE_SECONDS = 0.02
CLOSE_SECONDS = 2.0
CANCEL_AGAIN_SECONDS = 1.0
ANSWER_SECONDS = 2.0
PICTURE_SECONDS = 5.0

_current: Serving | None = None


def current() -> Serving | None:
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
    burst: float = 0.0  # credits, in tokens per unit of weight (R10)
    #: {limit: requests} since the scheduler began: refused for it, and admitted since in shadow.
    limits_refused: dict[str, int] = field(default_factory=dict)
    limits_shadowed: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueuePicture:
    """Everything that waited at one moment."""

    taken_at: float  # monotonic seconds, as ``enqueued at`` in the flows
    flows: list[FlowPicture]


class Limited(NamedTuple):
    """How the limits stood that a job was admitted under."""

    requests: Standing | None  # of those on requests, the one with least left
    tokens: Standing | None
    shadowed: tuple[dict[str, Any], ...]  # what those in shadow would have refused it for


class SeenLease(Protocol):
    """A held slot, as the gateway sees it."""

    @property
    def backend_id(self) -> int: ...
    @property
    def backend_name(self) -> str: ...
    @property
    def model_name(self) -> str: ...
    @property
    def dispatched_at(self) -> float: ...
    @property
    def decision(self) -> Decision: ...


class SeenTicket(Protocol):
    """A submitted job, as the gateway sees it. Times are this process's monotonic seconds."""

    @property
    def job(self) -> Job: ...
    @property
    def state(self) -> TicketState: ...
    @property
    def error(self) -> Evicted | None: ...
    @property
    def lease(self) -> SeenLease | None: ...
    @property
    def enqueued_at(self) -> float: ...
    @property
    def position_at_arrival(self) -> int: ...
    @property
    def wait_reason(self) -> WaitReason: ...


class Claim(ABC):
    """One job's way through the scheduler: waiting, holding a slot, settled.

    Used as a context manager: whatever happened, leaving it frees what is still held. A job that
    waits leaves the queue; a slot that was not settled is given back without charge.
    """

    __slots__ = ("_waiter", "limited", "settlement", "ticket")

    def __init__(self, ticket: SeenTicket, limited: Limited | None = None) -> None:
        self.limited = limited  # None: no limit concerns it
        self._waiter: asyncio.Future[None] | None = None
        self.ticket = ticket
        self.settlement: Settlement | None = None

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    @property
    def lease(self) -> SeenLease | None:
        return self.ticket.lease if self.ticket.state == "leased" else None

    async def wait(self, seconds: float | None = None) -> SeenLease | None:
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

    @abstractmethod
    def progress(self, prompt_tokens: int, completion_tokens: int) -> None:
        """So much has been delivered (R4)."""

    @abstractmethod
    def first_byte(self) -> None:
        """The backend has begun to answer; feeds its latency (P2)."""

    @abstractmethod
    def settle(self, usage: Usage) -> Settlement:
        """The answer has ended, whole or not: free the slot and charge what was used (R5)."""

    @abstractmethod
    def retry(self, exclude: frozenset[int]) -> None:
        """The attempt failed before any output: back to the job's place in the order (P6)."""

    @abstractmethod
    async def position(self) -> tuple[int, float | None]:
        """Jobs until this one is served, itself included, and an estimate in seconds."""

    @abstractmethod
    def _token_rate(self, lease: SeenLease) -> float:
        """Output tokens per second of one request at the lease's backend."""

    def usage_of_abandoned(self, lease: SeenLease, prompt_tokens: int) -> Usage:
        """What a running job has cost whose client left before it had any output (R4): its prompt
        and the time it ran, at the backend's measured rate."""
        seconds = max(0.0, time.monotonic() - lease.dispatched_at)
        limit = self.ticket.job.max_tokens
        tokens = int(seconds * self._token_rate(lease))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=tokens if limit is None else min(tokens, limit),
            estimated=True,
        )


async def end_tasks(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel them until they have ended; a library may mistake one cancellation for the end of
    a time limit of its own."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)  # what they ended with is of no interest


class Serving(ABC):
    """The configuration, upstream connections and spool of one process, and its scheduler."""

    kind = "gateway"  # what the process is, for those who watch it

    def __init__(self) -> None:
        self.snapshot = Snapshot()
        self.spool = Spool(settings.SPOOL_DIR)
        self.outbox = Outbox(self.spool.flush)  # nothing leaves before its record is written
        self.upstream = Upstream(outbox=self.outbox)
        self.captures = CaptureSpool(settings.SPOOL_DIR / CAPTURES)
        self.stopping = False
        self.database_away = False
        self.serving: set[asyncio.Task[Any]] = set()  # one task for each request under way
        self._loop = asyncio.get_running_loop()
        # One reads the configuration, one saves shares: a lock on writing delays no reading.
        self._database = ThreadPoolExecutor(2, thread_name_prefix="database")
        self._keys_used: dict[int, float] = {}  # {key: when last}, until it is stored
        self._tasks: list[asyncio.Task[None]] = []
        self._telemetry: dict[int, Telemetry] = {}
        self._loop_lag = 0.0  # seconds; the worst since the last pulse
        self._started_at = time.time()

    # ---- life

    @classmethod
    async def start(cls) -> Self:
        """Load the configuration and begin. Raises: DatabaseError."""
        global _current
        serving = cls()
        try:
            await serving._begin()
        except BaseException:
            serving.spool.stop()
            serving._database.shutdown(wait=False)
            raise
        for job in serving._background():
            serving._tasks.append(asyncio.create_task(job))
        _current = serving
        return serving

    async def stop(self) -> None:
        """End the background work, close connections and the spool."""
        global _current
        self.stopping = True
        await end_tasks(self._tasks)
        await self._store_uses_once()
        await self._end()
        self._database.shutdown(wait=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.upstream.close()
        self.spool.flush()
        await asyncio.to_thread(self.spool.stop)
        await asyncio.to_thread(self.captures.write)
        pulse.remove(self.kind)
        if _current is self:
            _current = None

    @abstractmethod
    async def _begin(self) -> None:
        """Load what is needed before the first request. Raises: DatabaseError."""

    @abstractmethod
    async def _end(self) -> None:
        """Leave the scheduler, after the background work has ended."""

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        return [
            self._watch_configuration(),
            self._follow_the_clock(),
            self._announce_records(),
            self._sync_records(),
            self._store_uses(),
            self._beat_the_pulse(),
        ]

    @property
    @abstractmethod
    def in_touch(self) -> bool:
        """Whether the scheduler can be reached."""

    @property
    def is_whole(self) -> bool:
        """Whether none of the background work has ended before its time."""
        return not any(task.done() for task in self._tasks)

    # ---- a job's way

    @abstractmethod
    async def submit(self, job: Job) -> Claim:
        """Check limits, queue a job and serve at once what can be served. Raises: Rejected."""

    @abstractmethod
    def mark_failed(self, backend_id: int) -> None:
        """P5: this backend gets nothing for the fail window."""

    @abstractmethod
    def mark_busy(self, backend_id: int, seconds: float) -> None:
        """P5: this backend said that it is full; it is offered nothing for ``seconds``."""

    @abstractmethod
    def mark_ok(self, backend_id: int) -> None:
        """P5: this backend has answered."""

    def cancel_serving(self) -> None:
        """End every request under way, as at the end of a shutdown's patience."""
        for task in self.serving:
            task.cancel()

    @abstractmethod
    async def use_of(self, holders: Sequence[Holder]) -> list[Use]:
        """How the limits stand of those of the holders that have any."""

    # ---- models

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
        able = {state.id for state in self.backends() if state.state in ("ready", "unknown")}
        return {name for b in self.snapshot.backends if b.backend_id in able for name in b.models}

    def loaded_models(self) -> set[str]:
        """What backends have in memory, as they name it, by the last poll of each."""
        return set().union(*(t.loaded_models or () for t in self._telemetry.values()))

    @abstractmethod
    def backends(self) -> list[BackendView]:
        """Every backend as the scheduler knows it; a second old at most."""

    # ---- views for Django's threads

    def view(self) -> LiveView:
        """A view at most 1 s old; to be called from any other thread.

        Raises: TimeoutError when the scheduler does not answer within 2 s.
        """
        return self._ask(self._current_view(), ANSWER_SECONDS)

    def waiting(self) -> list[QueuedView]:
        """Every waiting job in the order of service; to be called from any other thread."""
        return self._ask(self._all_waiting(), ANSWER_SECONDS)

    def queue_picture(self) -> QueuePicture:
        """Everything that waits, taken in small parts; to be called from any other thread.

        Raises: TimeoutError when the scheduler does not answer within 5 s.
        """
        return self._ask(self._take_picture(), PICTURE_SECONDS)

    def limits_of(self, holders: Sequence[Holder]) -> list[Use]:
        """As ``use_of``; to be called from any other thread."""
        return self._ask(self.use_of(holders), ANSWER_SECONDS)

    def evict(self, request_id: str) -> bool:
        """Drop a waiting job, whose client gets an error that no retry mends; to be called from any
        other thread. False: no such job waits."""
        return self._ask(self._evict(request_id), ANSWER_SECONDS)

    def _ask(self, question: Coroutine[Any, Any, _T], seconds: float) -> _T:
        return asyncio.run_coroutine_threadsafe(question, self._loop).result(seconds)

    @abstractmethod
    async def _current_view(self) -> LiveView: ...
    @abstractmethod
    async def _all_waiting(self) -> list[QueuedView]: ...
    @abstractmethod
    async def _take_picture(self) -> QueuePicture: ...
    @abstractmethod
    async def _evict(self, request_id: str) -> bool: ...

    # ---- configuration

    async def _ask_database(self, question: Callable[..., _T], *args: Any) -> _T:
        def ask() -> _T:
            try:
                return question(*args)
            finally:
                # Kept, it would be one connection more for each thread, or a broken one.
                connection.close()

        return await self._loop.run_in_executor(self._database, ask)

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
            await self._polled(now)

    async def _follow_the_clock(self) -> None:
        """Boosts begin and end by the time of day, whether the database answers or not."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            snapshot = self.snapshot.at(time.time())
            if snapshot is not self.snapshot:
                self._adopt(snapshot, time.monotonic())

    def _database_is(self, *, away: bool, error: Exception | None = None) -> None:
        if away != self.database_away:
            self.database_away = away
            if away:
                logger.error("The database is away, running on what is known: %s", error)
            else:
                logger.info("The database is back")

    def _adopt(self, snapshot: Snapshot, now: float) -> None:
        """A new configuration is in force from now on."""
        self.snapshot = snapshot

    def _observe(self, telemetry: list[BackendTelemetry], now: float) -> None:
        """Polls have learned this."""
        self._telemetry = {known.backend_id: known.telemetry for known in telemetry}

    @abstractmethod
    async def _polled(self, now: float) -> None:
        """After each look at the database."""

    # ---- keys

    def key_used(self, key_id: int) -> None:
        """Stored within ``USES_SECONDS``."""
        self._keys_used[key_id] = time.time()

    async def _store_uses(self) -> None:
        while True:
            await asyncio.sleep(USES_SECONDS)
            await self._store_uses_once()

    async def _store_uses_once(self) -> None:
        used, self._keys_used = self._keys_used, {}
        if not used:
            return
        try:
            await self._ask_database(note_uses, used)
        except DatabaseError as error:
            self._keys_used = used | self._keys_used
            logger.warning("Cannot store when keys were used: %s", error)

    # ---- records

    async def _announce_records(self) -> None:
        while True:
            due = self._loop.time() + ANNOUNCE_SECONDS
            await asyncio.sleep(ANNOUNCE_SECONDS)
            self._loop_lag = max(self._loop_lag, self._loop.time() - due)
            self.spool.announce()

    async def _sync_records(self) -> None:
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            await asyncio.to_thread(self.spool.sync)
            if self.captures.waiting:
                await asyncio.to_thread(self.captures.write)

    # ---- what it tells of itself

    async def _beat_the_pulse(self) -> None:
        while True:
            await asyncio.to_thread(pulse.write, self._pulse())
            await asyncio.sleep(pulse.PULSE_SECONDS)

    def _pulse(self) -> pulse.Pulse:
        lag, self._loop_lag = self._loop_lag, 0.0
        return pulse.Pulse(
            kind=self.kind,
            pid=os.getpid(),
            at=time.time(),
            started_at=self._started_at,
            loop_lag=lag,
            serving=len(self.serving),
            unwritten=self.spool.unwritten,
            lines_lost=self.spool.lines_lost,
            write_errors=self.spool.write_errors,
            database_away=self.database_away,
            in_touch=self.in_touch,
        )


# ---- in the database's thread


def _load_changes(known_version: int) -> tuple[Snapshot | None, list[BackendTelemetry]]:
    changed = configuration_version() != known_version
    return load_snapshot() if changed else None, load_telemetry()
