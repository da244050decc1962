"""From a waiting ticket to a lease and back: one decision, one slot, one hold (R3, R12, P4)."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.core.cluster import Cluster, Offer
from scheduler.core.decisions import Decision, Served
from scheduler.core.fairshare import FairShare
from scheduler.core.order import Choice, choose, only_choice
from scheduler.core.placement import Scoring, failures_now, place
from scheduler.core.queue import Flow, JobClass, Pool
from scheduler.core.tickets import Lease, Ticket
from scheduler.core.units import Roster
from scheduler.core.waiting import WaitingRoom

_NOBODY: Served = {}


class Dispatcher:
    """Grants slots and takes them back. The only place that changes the counts of running jobs."""

    def __init__(
        self,
        roster: Roster,
        share: FairShare,
        cluster: Cluster,
        waiting: WaitingRoom,
        scoring: Scoring,
    ) -> None:
        self._roster = roster
        self._share = share
        self._cluster = cluster
        self._waiting = waiting
        self.scoring = scoring
        self.running = 0

    def one(self, classes: Iterable[JobClass], now: float) -> Ticket | None:
        """Serve the best of the classes' jobs for which there is a slot (R12)."""
        cluster = self._cluster
        if not cluster.free and not cluster.open:
            return None
        choice = choose(self._share, [cls for cls in classes if cluster.usable(cls)], now)
        if choice is None:
            return None
        flow = choice.flow
        if choice.wait_bonus > flow.lane.largest_bonus:
            flow.lane.largest_bonus = choice.wait_bonus
        flow.head()  # drops those before it that have left
        ticket = flow.tickets.popleft()
        self._grant(ticket, choice, cluster.usable(flow.cls), now)
        self._waiting.leave(ticket, now)
        return ticket

    def at_once(self, ticket: Ticket, usable: int, now: float) -> None:
        """Serve a job that finds nobody waiting and a free slot, without queueing it first.
        ``usable`` as of ``Cluster``, likewise below."""
        flow = ticket.flow
        unit = flow.unit
        if not unit.running:
            self._roster.activated(unit)
        self._share.join(flow)
        flow.standing.own_tag = unit.tag  # it waits nowhere, so that it has no offset
        self._grant(ticket, only_choice(self._share, flow, ticket, now), usable, now)

    def _grant(self, ticket: Ticket, choice: Choice, usable: int, now: float) -> None:
        share = self._share
        flow, job = choice.flow, ticket.job
        cls, unit = flow.cls, flow.unit
        offer, reason, points = place(cls, job.cache_key, usable, self.scoring)
        if not usable & self._cluster.alive:
            reason = "fail_open"
        failures = ticket.ruled_out
        if usable != cls.everything:
            failures += failures_now(cls.offers, usable, now)
        weight = unit.fixed_weight
        if weight is None:
            weight = self._roster.weight(unit)
        hold = share.hold_for(unit, job)
        group = unit.account.spec.group_name
        beta = share.burst.beta
        ahead = _NOBODY
        if ticket.dispatches_before != cls.pool.dispatches:
            ahead = _served_since(ticket, cls.pool)
        decision = Decision(
            offer.backend.spec.backend_id,
            points,
            failures,
            reason,
            weight * choice.base,
            0.0 if unit.background else weight,
            group,
            unit.recent,
            weight * beta,
            choice.factor,
            choice.wait_bonus,
            choice.priority(beta),
            ticket.position_at_arrival,
            ticket.wait_reason,
            ahead,
            self._cluster.names,
        )
        lease = Lease(ticket, flow, offer, decision, hold, weight, now)
        ticket.state = "leased"
        ticket.lease = lease
        ticket.attempts += 1
        flow.last_dispatch = now
        share.hold(lease)
        self._count_running(lease, 1)
        if unit.running > unit.peak_running:
            unit.peak_running = unit.running
        self._cluster.take(offer.backend, lease, now)
        flow.standing.pool.note_dispatch(group or "", hold, now)

    def adopt(self, ticket: Ticket, offer: Offer, dispatched_at: float, now: float) -> None:
        """Count a job that runs already: it has its slot, whether or not there was one left."""
        flow = ticket.flow
        unit = flow.unit
        if not unit.running and not unit.queued:
            self._roster.activated(unit)
        if not flow.standing.waiting:
            self._share.join(flow)
        flow.lane = flow.cls.lanes[unit.background]
        weight = self._roster.weight(unit)
        hold = self._share.hold_for(unit, ticket.job)
        choice = only_choice(self._share, flow, ticket, now)
        beta = self._share.burst.beta
        decision = Decision(
            offer.backend_id,
            (),
            ticket.ruled_out,
            "only_candidate",
            weight * choice.base,
            0.0 if unit.background else weight,
            unit.account.spec.group_name,
            unit.recent,
            weight * beta,
            choice.factor,
            choice.wait_bonus,
            choice.priority(beta),
            ticket.position_at_arrival,
            ticket.wait_reason,
            {},
            self._cluster.names,
        )
        lease = Lease(ticket, flow, offer, decision, hold, weight, dispatched_at)
        ticket.state = "leased"
        ticket.lease = lease
        ticket.attempts += 1
        self._share.reserve(lease)
        self._count_running(lease, 1)
        unit.peak_running = max(unit.peak_running, unit.running)
        self._cluster.take(offer.backend, lease, now)

    def _count_running(self, lease: Lease, change: int) -> None:
        flow = lease.flow
        unit, cls = flow.unit, flow.cls
        self.running += change
        unit.running += change
        unit.account.running += change
        cls.running += change
        self._share.count_jobs(cls.pool, lease.background, change)

    def end(self, lease: Lease, cost: float, now: float) -> None:
        """Free the slot and charge ``cost`` tokens instead of the hold. The lease must be open."""
        lease.open = False
        unit = lease.flow.unit
        if self._share.saving is not None:
            self._share.saving.keep(unit)
        self._count_running(lease, -1)
        self._share.settle(lease, cost)
        unit.charged_total += cost
        self._share.window.add(unit, cost, now)
        if not unit.running and not unit.queued:
            self._roster.rested(unit)
        self._cluster.give_back(lease.backend, lease, now)


def _served_since(ticket: Ticket, pool: Pool) -> Served:
    """{group: (jobs, tokens held)} of the pool served while the ticket waited. O(groups)."""
    before = ticket.served_before
    ahead: dict[str, tuple[int, float]] = {}
    for group, (jobs, tokens) in pool.served.items():
        jobs_before, tokens_before = before.get(group, (0, 0.0))
        if jobs > jobs_before:
            ahead[group] = (jobs - jobs_before, tokens - tokens_before)
    return ahead


def put_back_in_order(flow: Flow, lease: Lease) -> None:
    """A failed attempt does not count as the unit's latest dispatch (P6, R11)."""
    if flow.last_dispatch == lease.dispatched_at:
        flow.last_dispatch = lease.previous_dispatch
