"""The queue as a whole: who enters and leaves, the longest waits, and estimated positions."""

from __future__ import annotations

import heapq
import math

from scheduler.core.cluster import NEVER, BackendState, Cluster
from scheduler.core.decisions import WaitReason
from scheduler.core.fairshare import FairShare
from scheduler.core.queue import Flow, JobClass, Pool, flow_of
from scheduler.core.tickets import Ticket
from scheduler.core.tunables import Tunables
from scheduler.core.units import Roster

_COMPACT_FROM = 1000  # outdated deadlines that are not worth a rebuild
_COUNTED_UNITS = 4  # with more of them waiting, positions come from a sample
_LEAST_STEP = 1e-9  # tokens per unit of weight; a job without cost still counts as one

#: (when, serial number, ticket); outdated ones are skipped
Deadline = tuple[float, int, Ticket]


class WaitingRoom:
    """All waiting jobs, by class. The only place that changes the counts of waiting jobs."""

    def __init__(
        self, roster: Roster, share: FairShare, cluster: Cluster, tunables: Tunables
    ) -> None:
        self._roster = roster
        self._share = share
        self._cluster = cluster
        self.queued = 0
        self._enqueued = 0.0  # the sum of the waiting jobs' times of arrival
        self.classes: dict[JobClass, None] = {}  # with waiting jobs; ordered, unlike a set
        self.newcomer: Ticket | None = None  # submitted, but not queued yet
        self.fresh: list[Ticket] = []  # entered since the last dispatch pass
        self._deadlines: list[Deadline] = []
        self._serial = 0
        self.tune(tunables)

    def tune(self, tunables: Tunables) -> None:
        self._max_wait = tunables.max_wait

    # ---- entering and leaving

    def arrive(self, ticket: Ticket) -> None:
        """Keep one newcomer at the door, where ``pump`` can serve it without queueing it first.

        The one before must have been let in.
        """
        self.newcomer = ticket

    def let_in(self, now: float) -> None:
        """Queue the newcomer, if there is one."""
        ticket = self.newcomer
        if ticket is not None:
            self.newcomer = None
            self.enter(ticket, now)

    def enter(self, ticket: Ticket, now: float) -> None:
        """Queue the ticket in its flow."""
        flow = ticket.flow
        unit = flow.unit
        ticket.queued_since = now
        if not unit.queued and not unit.running:
            self._roster.activated(unit)
        starts = not flow.live
        if starts:
            self._share.activate(flow, now)
        flow.insert(ticket)
        self._enqueued += ticket.enqueued_at
        self._count(flow, 1)
        self.fresh.append(ticket)
        if starts or (flow.entry is not None and flow.tickets[0] is ticket):  # else set aside
            flow.lane.push(flow, self._share.wait_bonus_rate)

    def leave(self, ticket: Ticket, now: float) -> None:
        """The ticket waits no more, for whatever reason. Its state must have changed before."""
        flow = ticket.flow
        ticket.waited_seconds += max(0.0, now - ticket.queued_since)
        flow.live -= 1
        if not flow.live:
            self._share.deactivate(flow)
            flow.tickets.clear()
        else:
            flow.compact()
        self._enqueued -= ticket.enqueued_at
        self._count(flow, -1)
        if not self.queued:
            self._enqueued = 0.0  # sheds what rounding has left
        unit = flow.unit
        if not unit.queued and not unit.running:
            self._roster.rested(unit)
            self._share.window.add(unit, 0.0, now)

    def average_wait(self, now: float) -> float:
        """Of those waiting now, in seconds."""
        return max(0.0, now - self._enqueued / self.queued) if self.queued else 0.0

    def all_tickets(self) -> list[Ticket]:
        """In the order of their age."""
        tickets = [
            ticket
            for cls in self.classes
            for lane in cls.lanes
            for flow in lane.flows
            for ticket in flow.waiting()
        ]
        return sorted(tickets, key=lambda ticket: (ticket.enqueued_at, ticket.number))

    def move(self, ticket: Ticket, cls: JobClass, now: float) -> None:
        """To another class, as after a change of the configuration."""
        ticket.state = "moving"
        self.leave(ticket, now)
        ticket.state = "queued"
        ticket.flow = flow_of(ticket.flow.unit, cls)
        self.enter(ticket, now)

    def _count(self, flow: Flow, change: int) -> None:
        cls, unit = flow.cls, flow.unit
        account = unit.account
        self.queued += change
        self._share.count_queued(flow, change)
        unit.queued += change
        account.queued += change
        if account.group is not None:
            account.group.queued += change
        cls.queued += change
        if cls.queued:
            self.classes[cls] = None
        else:
            self.classes.pop(cls, None)

    # ---- the longest wait

    def settle_in(self, now: float) -> None:
        """After a dispatch pass: what has just come and was not served has to wait."""
        for ticket in self.fresh:
            if ticket.state == "queued":
                if ticket.deadline is None:
                    ticket.wait_reason = self._why(ticket, now)
                    ticket.position_at_arrival = self.position(ticket)
                self._set_deadline(ticket)
        self.fresh.clear()

    def _set_deadline(self, ticket: Ticket) -> None:
        """Only time in the queue counts, not that of attempts that failed."""
        own = ticket.flow.unit.account.spec.max_wait_seconds
        longest = self._max_wait if own is None else own
        if ticket.job.max_wait_seconds is not None:
            longest = min(longest, ticket.job.max_wait_seconds)
        left = longest - ticket.waited_seconds
        deadline = left + (ticket.queued_since if ticket.attempts else ticket.enqueued_at)
        if deadline == ticket.deadline:
            return
        ticket.deadline = deadline
        self._serial += 1
        heapq.heappush(self._deadlines, (deadline, self._serial, ticket))
        if len(self._deadlines) > 2 * self.queued + _COMPACT_FROM:
            self._deadlines = [entry for entry in self._deadlines if _is_due(entry)]
            heapq.heapify(self._deadlines)

    def reset_deadlines(self) -> None:
        """The limits may have changed."""
        for ticket in [entry[2] for entry in self._deadlines if _is_due(entry)]:
            self._set_deadline(ticket)

    def next_deadline(self) -> float:
        """When the first job will have waited too long; never: infinity."""
        deadlines = self._deadlines
        while deadlines and not _is_due(deadlines[0]):
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else NEVER

    def overdue(self, now: float) -> list[Ticket]:
        """Tickets that have waited as long as they may."""
        late: list[Ticket] = []
        if not self._deadlines or self._deadlines[0][0] > now:
            return late
        while self.next_deadline() <= now:
            late.append(heapq.heappop(self._deadlines)[2])
        return late

    # ---- why, and how long

    def _why(self, ticket: Ticket, now: float) -> WaitReason:
        flow = ticket.flow
        cls = flow.cls
        if not cls.everything & self._cluster.alive:
            failed = any(now < offer.backend.failed_until for offer in cls.offers)
            return "backends_failed" if failed else "paused"
        if not cls.mask & self._cluster.alive & ~cls.unfit:
            return "no_memory"
        if flow.head() is not ticket:
            return "own_backlog"
        others = cls.queued > flow.live
        return "others_ahead" if others else "backends_full"

    def position(self, ticket: Ticket) -> int:
        """1-based: how many of its pool are served up to this job, if all goes as estimated.

        With few users waiting each one's jobs are counted; else, in O(1), it comes from a sample
        of those who wait and from how far the level has to move to reach a later job of the same
        user.
        """
        flow = ticket.flow
        ahead = flow.ahead_of(ticket)
        if len(flow.lane.flows) <= _COUNTED_UNITS:
            return self._counted_position(ticket, ahead)
        pool, background = flow.standing.pool, flow.unit.background
        first, step = self.starts(flow)
        before = ahead * step * pool.waiting_weight[background] / max(1.0, pool.hold_average)
        before -= 1.0  # the sample includes its own user
        queued = 0
        for cls in pool.classes:
            before += cls.lanes[background].rank(first)
            queued += cls.lanes[background].queued
        position = max(ahead + 1, min(queued, 1 + math.floor(before)))
        return position + self._before_background(pool) if background else position

    def _counted_position(self, ticket: Ticket, ahead: int) -> int:
        flow = ticket.flow
        pool, background = flow.standing.pool, flow.unit.background
        first, step = self.starts(flow)
        target = first + ahead * step
        position = ahead + 1
        for cls in pool.classes:
            for other in cls.lanes[background].flows:
                if other is not flow:
                    position += self._jobs_before(other, target, ticket.number)
        return position + self._before_background(pool) if background else position

    def _before_background(self, pool: Pool) -> int:
        return sum(cls.lanes[False].queued for cls in pool.classes)

    def _jobs_before(self, flow: Flow, target: float, number: int) -> int:
        first, step = self.starts(flow)
        if target < first:
            return 0
        jobs = min(flow.live, math.ceil((target - first) / step))
        tied = jobs < flow.live and first + jobs * step == target
        if tied and flow.waiting()[jobs].number < number:
            jobs += 1
        return jobs

    def starts(self, flow: Flow) -> tuple[float, float]:
        """The key at which the flow's first job starts, and what each job adds to it."""
        first = flow.key(self._share.wait_bonus_rate).key
        hold = self._share.hold_for(flow.unit, flow.head().job)
        return first, max(_LEAST_STEP, hold / self._roster.weight(flow.unit))

    def in_order(self, pool: Pool) -> list[Ticket]:
        """All of a pool's tickets in the estimated order of service, background last."""
        keyed: list[tuple[bool, float, int, Ticket]] = []
        for cls in pool.classes:
            for background in (False, True):
                for flow in cls.lanes[background].flows:
                    first, step = self.starts(flow)
                    keyed += [
                        (background, first + i * step, ticket.number, ticket)
                        for i, ticket in enumerate(flow.waiting())
                    ]
        return [entry[3] for entry in sorted(keyed, key=lambda entry: entry[:3])]

    def pools(self) -> list[Pool]:
        """Those with waiting jobs."""
        return list(dict.fromkeys(cls.pool for cls in self.classes))

    def queued_for(self, backend: BackendState) -> int:
        """Waiting jobs that the backend could serve; while it is out of service only those that
        wait for it, since no other is in service (as R16 counts)."""
        waiting = [cls for cls in self.classes if cls.everything & backend.bit]
        if not backend.spec.in_service:
            waiting = [
                cls for cls in waiting if not any(o.backend.spec.in_service for o in cls.offers)
            ]
        return sum(cls.queued for cls in waiting)


def _is_due(entry: Deadline) -> bool:
    """Whether the ticket still waits, and still until then."""
    deadline, _, ticket = entry
    return ticket.state == "queued" and ticket.deadline == deadline
