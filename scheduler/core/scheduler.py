"""The scheduler as the rest of MindRouter sees it: one object that owns all mutable state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from scheduler.core import checkpoint, looking, picture
from scheduler.core.bounds import Bounds
from scheduler.core.catalogue import Catalogue
from scheduler.core.cluster import NEVER, TOKEN_RATE_UNKNOWN, Cluster, Offer
from scheduler.core.decisions import Decision
from scheduler.core.dispatch import Dispatcher, put_back_in_order
from scheduler.core.drain import retry_after
from scheduler.core.errors import Evicted, Rejected
from scheduler.core.fairshare import FairShare
from scheduler.core.gap import GapMeter
from scheduler.core.jobs import BackendSpec, Job, Strategy, Telemetry, Usage, UserSpec
from scheduler.core.parts import Parts, whole
from scheduler.core.picture import FlowPicture
from scheduler.core.placement import Scoring
from scheduler.core.queue import JobClass, flow_of
from scheduler.core.tickets import Lease, Settlement, Ticket, TicketState
from scheduler.core.tunables import Tunables
from scheduler.core.units import Account, Roster
from scheduler.core.views import BackendView, QueuedView, ShareView, Stats
from scheduler.core.waiting import WaitingRoom

__all__ = [
    "BackendView",
    "Decision",
    "Lease",
    "QueuedView",
    "Scheduler",
    "Settlement",
    "ShareView",
    "Stats",
    "Ticket",
]


class Scheduler:
    """Decides who is served next and where. Not thread-safe; no I/O, no clock, no asyncio.

    ``now`` is monotonic seconds. After any change call ``pump``, which dispatches and tells what
    has become of the tickets; without changes call it again at ``next_event``.
    """

    def __init__(self, tunables: Tunables) -> None:
        self._tunables = tunables
        self._backends: list[BackendSpec] = []
        self._strategies: Mapping[str, Strategy] = {}
        self._roster = Roster(tunables)
        self._share = FairShare(self._roster, tunables)
        self._cluster = Cluster(tunables.backend_fail_window, tunables.backend_stale_after)
        self._catalogue = Catalogue(self._cluster)
        self._bounds = Bounds(self._catalogue, tunables)
        self._waiting = WaitingRoom(self._roster, self._share, self._cluster, tunables)
        self._dispatcher = Dispatcher(
            self._roster, self._share, self._cluster, self._waiting, Scoring(tunables)
        )
        self._gap = GapMeter(self._roster)
        self._changed: list[Ticket] = []  # to be told by the next pump
        self._dirty = False  # something may be dispatched
        self._arrivals = 0
        self._now = 0.0

    # ---- configuration

    def configure(
        self,
        *,
        tunables: Tunables,
        users: Mapping[int, UserSpec],
        backends: Sequence[BackendSpec],
        strategies: Mapping[str, Strategy],
        now: float,
    ) -> None:
        """Take up a new configuration, also for jobs that wait or run (R13, R14).

        Weights act on the next dispatch and move nobody's tag. Leases on a removed backend settle
        as usual. Strategies are by model name; without one a model is placed by score.
        """
        self._now = max(self._now, now)
        self._waiting.let_in(now)
        self._tune(tunables)
        regrouped = self._roster.configure(users, tunables)
        specs = list(backends)
        if specs != self._backends or dict(strategies) != self._strategies:
            self._backends, self._strategies = specs, dict(strategies)
            self._cluster.configure(specs, now)
            self._catalogue.configure(self._strategies)
            regrouped = True
        else:
            self._cluster.refresh_all(now)
        if regrouped:
            self._classify_again(now)
        for unit in list(self._roster.units.values()):
            if (self._roster.base_weight(unit) <= 0.0) != unit.background:
                self._share.change_lane(unit, now)
        self._waiting.reset_deadlines()
        if self._share.burst.idle_since is None:
            self._rest_if_idle(now)
        self._dirty = True

    def _tune(self, tunables: Tunables) -> None:
        rate = self._tunables.wait_bonus_rate
        self._tunables = tunables
        self._share.tune(tunables)
        self._cluster.tune(tunables.backend_fail_window, tunables.backend_stale_after)
        self._bounds.tune(tunables)
        self._waiting.tune(tunables)
        self._dispatcher.scoring = Scoring(tunables)
        if tunables.wait_bonus_rate != rate:
            for cls in self._waiting.classes:
                for lane in cls.lanes:
                    lane.rebuild(tunables.wait_bonus_rate)

    def _classify_again(self, now: float) -> None:
        """Move waiting jobs to the classes that they belong to now; drop what nobody can serve."""
        for ticket in self._waiting.all_tickets():
            account = ticket.flow.unit.account
            try:
                cls, ticket.ruled_out = self._catalogue.classify(
                    ticket.job, account.spec.group_id, ticket.avoid
                )
            except Rejected as refusal:
                self._drop(ticket, Evicted(refusal.reason, refusal.message), now)
                continue
            if cls is not ticket.flow.cls:
                self._waiting.move(ticket, cls, now)
        self._catalogue.forget_idle()
        classes = set(self._catalogue.classes.values())
        self._roster.forget_flows(classes, {cls.pool for cls in classes})

    def observe(self, backend_id: int, telemetry: Telemetry) -> None:
        """Heed what a poll has learned, unless something younger is known (P1)."""
        backend = self._cluster.by_id.get(backend_id)
        if backend is not None and self._cluster.observe(backend, telemetry):
            self._now = max(self._now, telemetry.observed_at)
            self._refresh(self._now)

    def _refresh(self, now: float) -> None:
        """Something about the backends has changed, or a window has ended."""
        self._cluster.refresh_all(now)
        self._catalogue.look_at_telemetry()
        self._dirty = True

    # ---- a job's life

    def submit(self, job: Job, now: float, *, enqueued_at: float | None = None) -> Ticket:
        """Queue a job; ``pump`` serves it. Raises: Rejected."""
        waiting = self._waiting
        if waiting.newcomer is not None:
            waiting.let_in(now)
        account = self._roster.account(job.user_id)
        cls, ruled_out = self._catalogue.classify(job, account.spec.group_id)
        if account.spec.max_concurrent is not None:
            self._check_concurrency(account, cls, now)
        if waiting.queued or not self._cluster.usable(cls):
            self._check_bounds(job, account, cls, now)
        flow = flow_of(self._roster.unit(job.unit, account), cls)
        self._arrivals += 1
        ticket = Ticket(
            job, flow, self._arrivals, now if enqueued_at is None else enqueued_at, ruled_out
        )
        ticket.served_before = cls.pool.served_so_far()
        ticket.dispatches_before = cls.pool.dispatches
        if not waiting.queued and not self._dispatcher.running:
            self._share.burst.wake(now)
        waiting.arrive(ticket)
        self._dirty = True
        return ticket

    def resume(
        self,
        job: Job,
        now: float,
        *,
        enqueued_at: float,
        attempts: int,
        avoid: frozenset[int] = frozenset(),
        running: tuple[int, float] | None = None,
    ) -> Ticket:
        """Take up a job that another scheduler has had: one that waits, or that is ``running``
        as (backend id, dispatched at). No bounds apply, as it has been let in before, and a slot
        that is in use is counted even if there is none, or if its user or backend is gone.

        ``attempts`` are the leases it has had, the running one included. After a failover call it
        in the order of ``standing``. Raises: Rejected when no backend could serve one that waits.
        """
        self._waiting.let_in(now)
        offer: Offer | None = None
        if running is None:
            account = self._roster.account(job.user_id)
            cls, ruled_out = self._catalogue.classify(job, account.spec.group_id, avoid)
        else:
            account = self._roster.last_known(job.user_id)
            cls, offer, ruled_out = self._catalogue.running_at(
                job, account.spec.group_id, running[0]
            )
        self._arrivals += 1
        flow = flow_of(self._roster.unit(job.unit, account), cls)
        ticket = Ticket(job, flow, self._arrivals, enqueued_at, ruled_out)
        ticket.served_before = cls.pool.served_so_far()
        ticket.dispatches_before = cls.pool.dispatches
        ticket.avoid = avoid
        if not self._waiting.queued and not self._dispatcher.running:
            self._share.burst.wake(now)
        if running is None or offer is None:
            ticket.attempts = attempts
            self._waiting.enter(ticket, now)
        else:
            ticket.attempts = attempts - 1
            self._dispatcher.adopt(ticket, offer, running[1], now)
        self._dirty = True
        return ticket

    def standing(self, job: Job) -> float:
        """The tag of the job's unit. Whoever joins an empty pool sets its level (R7), so that
        those who have had least must come first."""
        unit = self._roster.units.get(job.unit)
        return float("-inf") if unit is None else unit.tag

    def _check_concurrency(self, account: Account, cls: JobClass, now: float) -> None:
        """Waiting and running jobs of a user count together (R16)."""
        limit = account.spec.max_concurrent
        if limit is not None and account.queued + account.running >= limit:
            raise Rejected(
                "concurrency_limit_exceeded",
                f"You may have {limit} requests at a time.",
                retry_after(cls.pool.drain.seconds_for(max(1, account.queued), now)),
            )

    def retry_after(self, job: Job, now: float) -> int:
        """Seconds, 1–60, until one more of the user's requests may have ended, at the measured
        rate. Raises: Rejected."""
        account = self._roster.account(job.user_id)
        cls, _ = self._catalogue.classify(job, account.spec.group_id)
        return retry_after(cls.pool.drain.seconds_for(max(1, account.queued), now))

    def _check_bounds(self, job: Job, account: Account, cls: JobClass, now: float) -> None:
        """R16. At a bound it counts who really has to wait, so what can be served is served."""
        total = self._waiting.queued
        if self._bounds.own_bound(account) is None and not self._bounds.is_full(cls, total):
            return
        if self._dirty:
            self._dispatch(now)
        if self._cluster.usable(cls):
            return
        wait = retry_after(cls.pool.drain.seconds_for(cls.queued + 1, now))
        own = self._bounds.own_bound(account)
        if own is not None:
            raise Rejected("queue_full", own, wait)
        if not self._bounds.is_full(cls, self._waiting.queued):
            return
        known = self._roster.units.get(job.unit)
        last = self._bounds.to_make_room(cls, job.unit, known, self._waiting.queued)
        if last is None:
            raise Rejected("queue_full", f"Too many requests wait for {job.model_name}.", wait)
        self._drop(last, Evicted("queue_full", "Dropped to make room for other users.", wait), now)

    def pump(self, now: float) -> list[Ticket]:
        """Dispatch all that can be (R12) and drop what has waited too long (R16).

        Returns every ticket that was leased or evicted since the last call. Cheap when there is
        nothing to do.
        """
        if now > self._now:
            self._now = now
        if self._changed:  # before this pump; some may have been cancelled meanwhile
            self._changed = [
                ticket
                for ticket in dict.fromkeys(self._changed)
                if ticket.state in ("leased", "evicted")
            ]
        if now >= self._cluster.changes_at:
            self._refresh(now)
        if self._dirty:
            self._dispatch(now)
        waiting = self._waiting
        if waiting.queued:
            self._drop_overdue(now)
        if waiting.queued or self._share.burst.contended:
            self._share.burst.after_pass(waiting.queued, now)
        changed = self._changed
        if changed:
            self._changed = []
        return changed

    def _dispatch(self, now: float) -> None:
        self._dirty = False
        waiting = self._waiting
        newcomer = waiting.newcomer
        if newcomer is not None:
            usable = 0 if waiting.queued else self._cluster.usable(newcomer.flow.cls)
            if usable:
                waiting.newcomer = None
                self._dispatcher.at_once(newcomer, usable, now)
                self._changed.append(newcomer)
            else:
                waiting.let_in(now)
        if now >= self._share.window.expires_at:
            self._share.window.expire(now)
        if not waiting.queued:
            return
        while ticket := self._dispatcher.one(waiting.classes, now):
            self._changed.append(ticket)
        waiting.settle_in(now)

    def _drop_overdue(self, now: float) -> None:
        for ticket in self._waiting.overdue(now):
            cls = ticket.flow.cls
            wait = retry_after(cls.pool.drain.seconds_for(cls.queued, now))
            self._drop(ticket, Evicted("queue_timeout", "No slot became free in time.", wait), now)

    def dispatch_one(self, now: float, model_names: Collection[str]) -> Ticket | None:
        """Serve only the best job of these models: for simulations that own the backends' slots.

        The ticket is returned here and not told by ``pump``.
        """
        self._waiting.let_in(now)
        self._share.window.expire(now)
        classes = [cls for cls in self._waiting.classes if cls.model_name in model_names]
        return self._dispatcher.one(classes, now)

    def note_pass(self, now: float) -> None:
        """R10 and the waiting times after a series of ``dispatch_one``; ``pump`` does it itself."""
        self._waiting.settle_in(now)
        self._share.burst.after_pass(self._waiting.queued, now)

    def cancel(self, ticket: Ticket, now: float) -> None:
        """The client has left: never charged while queued, refunded once leased. Idempotent."""
        self._waiting.let_in(now)
        if ticket.state == "queued":
            self._leave(ticket, "cancelled", now)
        elif ticket.state == "leased" and ticket.lease is not None:
            self._end(ticket.lease, 0.0, "cancelled", now)

    def evict(self, ticket: Ticket, error: Evicted, now: float) -> None:
        """Drop a waiting job; the next pump tells. Nothing happens to one that does not wait."""
        self._waiting.let_in(now)
        if ticket.state == "queued":
            self._drop(ticket, error, now)

    def _drop(self, ticket: Ticket, error: Evicted, now: float) -> None:
        ticket.error = error
        self._leave(ticket, "evicted", now)
        self._changed.append(ticket)

    def _leave(self, ticket: Ticket, state: TicketState, now: float) -> None:
        ticket.state = state
        self._waiting.leave(ticket, now)
        self._rest_if_idle(now)

    def progress(
        self, lease: Lease, prompt_tokens: int, completion_tokens: int, now: float
    ) -> None:
        """So much has been delivered; what exceeds the hold is charged at once (R4)."""
        if lease.open:
            delivered = self._share.cost(
                Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
            )
            self._share.charge_excess(lease, delivered)

    def first_byte(self, lease: Lease, now: float) -> None:
        """The backend has begun to answer (P2)."""
        if lease.open and lease.first_byte_at is None:
            lease.first_byte_at = now
            lease.measures.note_latency(max(0.0, now - lease.dispatched_at))

    def settle(self, lease: Lease, usage: Usage, now: float) -> Settlement:
        """Free the slot and charge what was used (R5). A second call changes nothing."""
        flow = lease.flow
        cost = self._share.cost(usage)
        if not lease.open:
            return Settlement(0.0, cost)
        model_name = lease.ticket.job.model_name
        self._share.learn_output(flow.unit, model_name, usage.completion_tokens)
        seconds = now - lease.dispatched_at
        if usage.completion_tokens > 0 and seconds > 0.0 and not usage.estimated:
            lease.measures.note_rate(usage.completion_tokens / seconds)
        self._end(lease, cost, "settled", now)
        return Settlement(cost, cost)

    def refund(self, lease: Lease, now: float) -> None:
        """Failed before any output, and not to be tried again: nothing is charged (R6)."""
        if lease.open:
            self._end(lease, 0.0, "settled", now)

    def _end(self, lease: Lease, cost: float, state: TicketState, now: float) -> None:
        lease.ticket.state = state
        self._dispatcher.end(lease, cost, now)
        if not self._dispatcher.running:
            self._rest_if_idle(now)
        self._dirty = True

    def _rest_if_idle(self, now: float) -> None:
        if not self._waiting.queued and not self._dispatcher.running:
            self._share.burst.rest(now)

    def retry(self, lease: Lease, now: float, *, exclude: frozenset[int] = frozenset()) -> None:
        """The attempt failed before any output: refund it and queue the job at its old place (P6).

        Backends in ``exclude`` are avoided while another eligible one is in service. Bounds do
        not apply. ``ticket.attempts`` counts the attempts made so far.
        """
        if not lease.open:
            return
        ticket, flow = lease.ticket, lease.flow
        self._end(lease, 0.0, "queued", now)
        put_back_in_order(flow, lease)
        ticket.lease = None
        ticket.avoid = exclude
        cls = flow.cls
        try:
            group_id = flow.unit.account.spec.group_id
            cls, ticket.ruled_out = self._catalogue.classify(ticket.job, group_id, exclude)
        except Rejected as refusal:
            self._fail(ticket, refusal)
            return
        if not self._waiting.queued and not self._dispatcher.running:
            self._share.burst.wake(now)
        ticket.flow = flow_of(flow.unit, cls)
        self._waiting.enter(ticket, now)

    def _fail(self, ticket: Ticket, refusal: Rejected) -> None:
        ticket.state = "evicted"
        ticket.error = Evicted(refusal.reason, refusal.message, refusal.retry_after)
        self._changed.append(ticket)

    # ---- backends' behaviour (P5)

    def mark_failed(self, backend_id: int, now: float) -> None:
        """A connection failed, or broke before the first byte: leave it alone for a while."""
        backend = self._cluster.by_id.get(backend_id)
        if backend is not None:
            self._cluster.mark_failed(backend, now)
            self._dirty = True

    def mark_busy(self, backend_id: int, now: float, seconds: float = 1.0) -> None:
        """It said that it is full: offer it nothing for a moment, without holding it against it."""
        backend = self._cluster.by_id.get(backend_id)
        if backend is not None:
            self._cluster.mark_busy(backend, now, seconds)

    def mark_ok(self, backend_id: int, now: float) -> bool:
        """A request succeeded there: it is trusted again. False: it was all the time."""
        backend = self._cluster.by_id.get(backend_id)
        if backend is None or not (backend.suspect or (backend.fresh and backend.is_down())):
            return False
        self._cluster.mark_ok(backend, now)
        self._dirty = True
        return True

    @property
    def waits(self) -> bool:
        """Whether there is anything that ``pump`` may have to be called for at some time."""
        return self._dirty or bool(self._changed) or self._waiting.queued > 0

    def next_event(self, now: float) -> float | None:
        """When to call ``pump`` although nothing else happens. None: never."""
        if self._changed or self._dirty:
            return now
        if not self._waiting.queued:
            return None
        soonest = min(
            self._cluster.changes_at,
            self._waiting.next_deadline(),
            self._share.burst.next_halving(),
        )
        return soonest if soonest < NEVER else None

    # ---- looking

    def burst_level(self, now: float) -> float:
        """Everybody's credits, in tokens per unit of weight (R10)."""
        return self._share.burst.value(now)

    def token_rate(self, backend_id: int) -> float:
        """Output tokens per second of one request there, as measured; a guess if never (R4)."""
        backend = self._cluster.by_id.get(backend_id)
        if backend is None:
            return TOKEN_RATE_UNKNOWN
        return backend.token_rate()

    def position(self, ticket: Ticket, now: float) -> tuple[int, float | None]:
        """How many dispatches on its backends until the job is served, itself included, and the
        seconds that they take at the measured rate.
        (0, None): it does not wait."""
        self._waiting.let_in(now)
        if ticket.state != "queued":
            return 0, None
        position = self._waiting.position(ticket)
        return position, ticket.flow.standing.pool.drain.seconds_for(position, now)

    def queue(self, now: float) -> list[QueuedView]:
        """Every waiting job, in the order of service on each set of backends."""
        self._waiting.let_in(now)
        return looking.queue(self._waiting, self._share, self._roster, now)

    def queue_parts(self, now: float) -> Iterator[list[FlowPicture]]:
        """The whole queue in parts of about 1 ms each, between which others may be served."""
        self._waiting.let_in(now)
        return picture.parts(self._waiting, self._share, self._roster, now)

    def stats(self, now: float) -> Stats:
        return whole(self.stats_in_parts(now))

    def stats_in_parts(self, now: float) -> Parts[Stats]:
        self._waiting.let_in(now)
        return looking.stats(self._waiting, self._share, self._roster, now)

    def backend_states(self, now: float) -> list[BackendView]:
        self._waiting.let_in(now)
        return looking.backends(self._cluster, self._waiting, now)

    def shares(self, now: float) -> list[ShareView]:
        """Of every unit with jobs or with recent tokens."""
        return self.stats(now).users

    def service_gap(self, now: float) -> tuple[float, float]:
        """The largest gap in service between two users who have both been waiting, and the bound
        that it must not exceed (T1). Tokens per unit of weight."""
        return whole(self.service_gap_in_parts(now))

    def service_gap_in_parts(self, now: float) -> Parts[tuple[float, float]]:
        """Each look must end before the next begins."""
        self._waiting.let_in(now)
        return self._gap.measure(self._catalogue.classes.values(), self._tunables, now)

    # ---- surviving a restart

    def checkpoint(self, now: float) -> dict[str, Any]:
        """Everything that shares depend on, as JSON values."""
        state: dict[str, Any] = msgspec.json.decode(
            msgspec.json.encode(whole(self.checkpoint_in_parts(now)))
        )
        return state

    def checkpoint_in_parts(self, now: float) -> Parts[dict[str, Any]]:
        """The same, all of it as it is at the first part, for msgspec to encode; who is charged
        between two parts is charged after it. One at a time."""
        return checkpoint.save(self._roster, self._share, self._cluster, now)

    def restore(self, state: Any, now: float) -> None:
        """Take up a checkpoint, after ``configure`` and before the first job.

        Raises: BrokenCheckpointError.
        """
        whole(self.restore_in_parts(state, now))

    def restore_in_parts(self, state: Any, now: float) -> Parts[None]:
        return checkpoint.load(state, self._roster, self._share, self._cluster, now)
