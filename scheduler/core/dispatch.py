"""From a waiting ticket to a lease and back: one decision, one slot, one hold (R3, R12, P4)."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.core.cluster import Cluster
from scheduler.core.fairshare import Choice, FairShare
from scheduler.core.placement import Scoring, failures_now, place
from scheduler.core.queue import Flow, JobClass
from scheduler.core.tickets import Decision, Lease, Ticket
from scheduler.core.units import Roster
from scheduler.core.waiting import WaitingRoom

#: What the average hold of a class keeps when a new one comes in.
_KEPT = 0.9


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
        usable = self._cluster.usable
        choice = self._share.choose([cls for cls in classes if usable(cls)], now)
        return self._grant(choice, now) if choice is not None else None

    def _grant(self, choice: Choice, now: float) -> Ticket:
        flow = choice.flow
        cls, unit = flow.cls, flow.unit
        ticket = flow.head()
        job = ticket.job
        weight = self._roster.weight(unit)
        usable = self._cluster.usable(cls)
        offer, reason, candidates, points = place(cls, job.cache_key, usable, self.scoring)
        failures = ticket.ruled_out
        if len(candidates) < len(cls.offers):
            failures += failures_now(cls.offers, candidates, now)
        beta = self._share.burst.beta
        decision = Decision(
            offer.backend.spec.backend_id,
            tuple((c.backend.spec.backend_id, p) for c, p in zip(candidates, points, strict=True)),
            failures,
            reason if usable & self._cluster.alive else "fail_open",
            weight * (choice.reference - flow.tag),
            0.0 if unit.background else weight,
            unit.account.spec.group_name,
            unit.recent,
            weight * beta,
            choice.factor,
            choice.wait_bonus,
            choice.priority(beta),
            ticket.position_at_arrival,
            ticket.wait_reason,
            _served_since(ticket, cls),
        )
        hold = self._share.hold_for(unit, job)
        lease = Lease(ticket, flow, offer.backend, decision, hold, weight, now)
        self._start(ticket, lease, now)
        _count_served(cls, unit.account.spec.group_name or "", hold, now)
        return ticket

    def _start(self, ticket: Ticket, lease: Lease, now: float) -> None:
        flow = lease.flow
        unit = flow.unit
        self.running += 1
        unit.running += 1
        unit.account.running += 1
        flow.cls.running += 1
        flow.lane.running += 1
        flow.lane.longest_wait = max(flow.lane.longest_wait, now - flow.waits_from())
        ticket.state = "leased"
        ticket.lease = lease
        ticket.attempts += 1
        flow.tickets.popleft()
        flow.last_dispatch = now
        self._share.hold(lease)
        self._waiting.leave(ticket, now)
        self._cluster.take(lease.backend, lease, now)

    def end(self, lease: Lease, cost: float, now: float) -> None:
        """Free the slot and charge ``cost`` tokens instead of the hold. The lease must be open."""
        lease.open = False
        flow = lease.flow
        unit = flow.unit
        self.running -= 1
        unit.running -= 1
        unit.account.running -= 1
        flow.cls.running -= 1
        flow.cls.lanes[lease.background].running -= 1
        self._share.note_activity(flow.cls, lease.background)
        self._share.settle(lease, cost)
        unit.charged_total += cost
        self._share.window.add(unit, cost, now)
        if not unit.running and not unit.queued:
            self._roster.rested(unit)
        self._cluster.give_back(lease.backend, lease, now)


def _served_since(ticket: Ticket, cls: JobClass) -> dict[str, tuple[int, float]]:
    """{group: (jobs, tokens held)} of the class served while the ticket waited. O(groups)."""
    if ticket.dispatches_before == cls.dispatches:
        return {}
    before = ticket.served_before
    ahead: dict[str, tuple[int, float]] = {}
    for group, (jobs, tokens) in cls.served.items():
        jobs_before, tokens_before = before.get(group, (0, 0.0))
        if jobs > jobs_before:
            ahead[group] = (jobs - jobs_before, tokens - tokens_before)
    return ahead


def _count_served(cls: JobClass, group: str, hold: float, now: float) -> None:
    jobs, tokens = cls.served.get(group, (0, 0.0))
    cls.served[group] = (jobs + 1, tokens + hold)
    cls.dispatches += 1
    average = cls.hold_average
    cls.hold_average = _KEPT * average + (1.0 - _KEPT) * hold if average else hold
    cls.drain.note(now)


def put_back_in_order(flow: Flow, lease: Lease) -> None:
    """A failed attempt does not count as the unit's latest dispatch (P6, R11)."""
    if flow.last_dispatch == lease.dispatched_at:
        flow.last_dispatch = lease.previous_dispatch
