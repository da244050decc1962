"""Where jobs wait: one first-come queue per unit and class, one heap of units per class.

Among users whose factor is 1 the order of priority is that of ``tag + wait bonus rate · h``,
which depends neither on the time nor on the reference or the burst credits. So each class keeps a
heap by that key and corrects it late: an entry whose unit was charged meanwhile is too low and is
replaced when it comes to the top; a refund pushes a second entry, and the older one is skipped.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from scheduler.core.decisions import Served
from scheduler.core.drain import DrainRate
from scheduler.core.jobs import Strategy
from scheduler.core.tickets import Ticket
from scheduler.core.units import UNSET, UnitState

if TYPE_CHECKING:
    from scheduler.core.cluster import Offer

_KEPT = 0.9  # of an average, when a new value comes in
_SAMPLE = 64  # of the waiting users, to estimate positions by
_SAMPLE_LASTS = 16  # the part of them that may move before it is renewed
_COMPACT_FROM = 64  # dead entries or tickets that are not worth a rebuild


class Pool:
    """A set of backends, and all jobs that just these can serve: a *class* of the rules.

    Jobs of different models wait apart (``JobClass``), since not every model fits everywhere at
    every moment, but they compete for the same slots: they have one level, and a user one tag.
    """

    __slots__ = (
        "classes",
        "dispatches",
        "drain",
        "hold_average",
        "jobs",
        "levels",
        "mask",
        "served",
        "served_copy",
        "waiting_weight",
    )

    def __init__(self, mask: int) -> None:
        self.mask = mask
        self.classes: list[JobClass] = []
        # Each of these for positive weights and for background (R13):
        self.levels = [0.0, 0.0]  # the tag at which the latest dispatch started
        self.jobs = [0, 0]  # queued and running
        self.waiting_weight = [0.0, 0.0]
        self.hold_average = 0.0  # tokens
        self.drain = DrainRate()
        self.dispatches = 0
        self.served: dict[str, tuple[int, float]] = {}  # {group: (jobs, tokens held)}
        self.served_copy: tuple[int, Served] = (0, {})

    def served_so_far(self) -> Served:
        """A copy of ``served``, shared by all who ask between two dispatches."""
        count, copy = self.served_copy
        if count != self.dispatches:
            copy = dict(self.served)
            self.served_copy = (self.dispatches, copy)
        return copy

    def note_dispatch(self, group: str, hold: float, now: float) -> None:
        jobs, tokens = self.served.get(group, (0, 0.0))
        self.served[group] = (jobs + 1, tokens + hold)
        self.dispatches += 1
        average = self.hold_average
        self.hold_average = _KEPT * average + (1.0 - _KEPT) * hold if average else hold
        self.drain.note(now)


class Standing:
    """How one unit stands in one pool.

    ``offset`` is what sets its tag there apart from its own (R8). ``own_tag`` is the tag that its
    use of this very pool has led to, which no clamp forgives.
    """

    __slots__ = ("offset", "own_tag", "pool", "waiting")

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.offset = 0.0
        self.own_tag = UNSET
        self.waiting = 0  # flows


class Flow:
    """One unit's waiting jobs of one class."""

    __slots__ = (
        "cls",
        "entry",
        "lane",
        "last_dispatch",
        "live",
        "standing",
        "tickets",
        "unit",
        "waiting_since",
        "weight_share",
    )

    def __init__(self, unit: UnitState, cls: JobClass, standing: Standing) -> None:
        self.unit = unit
        self.cls = cls
        self.standing = standing
        self.lane = cls.lanes[unit.background]
        self.tickets: deque[Ticket] = deque()  # with those that have left since
        self.live = 0  # tickets that still wait
        self.last_dispatch = float("-inf")
        self.entry: Entry | None = None  # the valid one in the lane's heap
        self.waiting_since = 0.0
        self.weight_share = 0.0  # what it adds to the pool's ``waiting_weight``

    @property
    def tag(self) -> float:
        """The unit's tag as this class sees it."""
        return self.unit.tag + self.standing.offset

    def head(self) -> Ticket:
        """The next to be served. The flow must not be empty."""
        tickets = self.tickets
        while (ticket := tickets[0]).state != "queued" or ticket.flow is not self:
            tickets.popleft()
        return ticket

    def key(self, wait_bonus_rate: float) -> Entry:
        """Its place among the users who are not heavy. The flow must not be empty."""
        head = self.tickets[0]
        if head.state != "queued" or head.flow is not self:
            head = self.head()
        arrived, last = head.enqueued_at, self.last_dispatch
        bonus = wait_bonus_rate * (max(last, arrived))
        return Entry(self.unit.tag + self.standing.offset + bonus, head.number, self)

    def newest(self) -> Ticket:
        """The last to be served. The flow must not be empty."""
        tickets = self.tickets
        while (ticket := tickets[-1]).state != "queued" or ticket.flow is not self:
            tickets.pop()
        return ticket

    def waits_from(self) -> float:
        """h of R11: a deep queue earns no bonus for its later jobs."""
        arrived, last = self.head().enqueued_at, self.last_dispatch
        return max(last, arrived)

    def ahead_of(self, ticket: Ticket) -> int:
        """How many of its tickets come before a waiting one. Exact in a short line or where
        nobody has left; else estimated in O(log tickets)."""
        tickets, live = self.tickets, self.live
        if tickets[-1] is ticket:
            return live - 1
        if len(tickets) != live and live <= _COMPACT_FROM:
            return self.waiting().index(ticket)
        before = bisect_left(tickets, _age(ticket), key=_age)
        return before * live // len(tickets)

    def waiting(self) -> list[Ticket]:
        """Its tickets in the order of service."""
        return [t for t in self.tickets if t.state == "queued" and t.flow is self]

    def insert(self, ticket: Ticket) -> None:
        """Put a ticket at its place by age: the end, unless it has waited before (P6)."""
        tickets = self.tickets
        if not self.live:
            tickets.clear()
        if not tickets or _age(tickets[-1]) < _age(ticket):
            tickets.append(ticket)
        else:
            tickets.insert(bisect_left(tickets, _age(ticket), key=_age), ticket)
        self.live += 1

    def compact(self) -> None:
        """Drop the tickets that have left, once they are many."""
        if len(self.tickets) > 2 * self.live + _COMPACT_FROM:
            self.tickets = deque(self.waiting())


class Entry(NamedTuple):
    """A place in the order: the lowest is served first, the older one on a tie."""

    key: float
    number: int  # of the flow's first ticket
    flow: Flow


def _age(ticket: Ticket) -> tuple[float, int]:
    return ticket.enqueued_at, ticket.number


class Lane:
    """The heap of one class, for one kind of weight: positive, or 0 for background (R13)."""

    __slots__ = (
        "aside",
        "flows",
        "heap",
        "largest_bonus",
        "moves",
        "queued",
        "sample",
        "sampled_at",
    )

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self.aside: list[Flow] = []  # heavy users, compared one by one (R9)
        self.flows: set[Flow] = set()  # with waiting jobs
        self.queued = 0
        self.moves = 0  # jobs that have come or gone
        self.sample: list[float] = []  # some keys of the heap, sorted
        self.sampled_at = -1  # that many moves
        self.largest_bonus = 0.0  # tokens, of those dispatched since ``GapMeter`` began (T1)

    def push(self, flow: Flow, wait_bonus_rate: float) -> None:
        """Enter the flow anew if it has no entry or has moved forward."""
        entry = flow.key(wait_bonus_rate)
        if flow.entry is None or entry < flow.entry:
            flow.entry = entry
            heapq.heappush(self.heap, entry)
            if len(self.heap) > 2 * len(self.flows) + _COMPACT_FROM:
                self._compact()

    def top(self, wait_bonus_rate: float) -> Flow | None:
        """The flow with the least key, with its entry corrected; None if there is none."""
        heap = self.heap
        while heap:
            entry = heap[0]
            flow = entry.flow
            if flow.entry is not entry:
                heapq.heappop(heap)
                continue
            now = flow.key(wait_bonus_rate)
            if now == entry:
                return flow
            flow.entry = now
            heapq.heapreplace(heap, now)
        return None

    def set_aside(self, flow: Flow) -> None:
        """Take the top entry's flow out of the heap: its factor is below 1."""
        heapq.heappop(self.heap)
        flow.entry = None
        self.aside.append(flow)

    def rebuild(self, wait_bonus_rate: float) -> None:
        """Enter everybody anew, as after a change of the wait bonus rate."""
        self.heap = []
        self.aside = []
        for flow in self.flows:
            flow.entry = None
            self.push(flow, wait_bonus_rate)

    def rank(self, key: float) -> float:
        """About how many of the lane's users come no later than ``key``, in O(1).

        Counted in a sample of up to ``_SAMPLE`` to twice as many entries, which is renewed once a
        sixteenth of the users may have moved: taken for each job it was a tenth of the job's cost.
        """
        if self.moves - self.sampled_at > len(self.flows) // _SAMPLE_LASTS or self.sampled_at < 0:
            some = self.heap[:: len(self.heap) // _SAMPLE + 1]
            self.sample = sorted([entry.key for entry in some if entry.flow.entry is entry])
            self.sampled_at = self.moves
        if not self.sample:
            return 0.0
        return bisect_right(self.sample, key) * len(self.flows) / len(self.sample)

    def _compact(self) -> None:
        self.heap = [entry for entry in self.heap if entry.flow.entry is entry]
        heapq.heapify(self.heap)


class JobClass:
    """The jobs of one model with the same set of eligible backends.

    ``mask`` and ``avoid`` have one bit per backend; those in ``avoid`` have failed a job before
    and count only while none of ``mask`` is in service (P6).
    """

    __slots__ = (
        "avoid",
        "everything",
        "hopeless",
        "key",
        "lanes",
        "least_bound",
        "mask",
        "model_name",
        "offers",
        "pool",
        "queue_bound",
        "queued",
        "running",
        "strategy",
        "unfit",
    )

    def __init__(self, model_name: str, pool: Pool, avoid: int) -> None:
        self.model_name = model_name
        self.pool = pool
        self.mask = pool.mask
        self.avoid = avoid
        self.everything = pool.mask | avoid
        self.key = (model_name, pool.mask, avoid)
        self.lanes = (Lane(), Lane())  # for positive weights, and for background
        self.offers: list[Offer] = []
        self.strategy: Strategy = "score"
        self.unfit = 0  # backends whose free memory the model exceeds (P1)
        self.hopeless = False  # no backend has the memory at all
        self.queue_bound = 0  # the sum of its backends' max_queue (R16)
        self.least_bound = 0  # the least of all sets of backends that count (R16)
        self.queued = 0
        self.running = 0


def flow_of(unit: UnitState, cls: JobClass) -> Flow:
    """The unit's queue in the class, made when it first needs one."""
    flow = unit.flows.get(cls)
    if flow is None:
        standing = unit.standings.get(cls.pool)
        if standing is None:
            standing = unit.standings[cls.pool] = Standing(cls.pool)
        flow = unit.flows[cls] = Flow(unit, cls, standing)
    return flow
