"""How much may wait (R16): per user, per group, per set of backends and in total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from scheduler.core.catalogue import Catalogue
from scheduler.core.jobs import Unit
from scheduler.core.queue import JobClass, Lane
from scheduler.core.tickets import Ticket
from scheduler.core.tunables import Tunables
from scheduler.core.units import Account, UnitState

_EVERYTHING = -1  # the mask of all backends


class Bounds:
    """Counts are of jobs that wait; a job that a free slot takes at once needs no place."""

    def __init__(self, catalogue: Catalogue, tunables: Tunables) -> None:
        self._catalogue = catalogue
        self.tune(tunables)

    def tune(self, tunables: Tunables) -> None:
        self._in_total = tunables.max_queued
        self._per_user = tunables.max_queued_per_user

    # ---- of the user and the group

    def own_bound(self, account: Account) -> str | None:
        """Says which of the user's and the group's own bounds is reached."""
        spec = account.spec
        per_user = self._per_user if spec.max_queued is None else spec.max_queued
        if per_user is not None and account.queued >= per_user:
            return f"You already have {account.queued} requests waiting; {per_user} are allowed."
        group = account.group
        per_group = spec.group_max_queued
        if group is not None and per_group is not None and group.queued >= per_group:
            return f"Your group already has {group.queued} requests waiting."
        return None

    # ---- shared

    def is_full(self, cls: JobClass, total: int) -> bool:
        """Whether one more waiting job of the class would exceed a shared bound.

        The jobs that only the class's own backends can take must find room in their queues, and
        so must those of every larger set of backends that includes them. ``total`` = all waiting.
        """
        if self._in_total is not None and total >= self._in_total:
            return True
        if total < cls.least_bound:
            return False
        return any(self._waiting(k) >= k.queue_bound for k in self._catalogue.supersets[cls])

    def _waiting(self, cls: JobClass) -> int:
        return sum(k.queued for k in self._catalogue.subsets[cls])

    def _full(self, cls: JobClass, total: int) -> Iterator[tuple[int, int]]:
        """(mask, bound) of each set of backends whose queue is full."""
        if self._in_total is not None and total >= self._in_total:
            yield _EVERYTHING, self._in_total
        for k in self._catalogue.supersets[cls]:
            if self._waiting(k) >= k.queue_bound:
                yield k.everything, k.queue_bound

    def to_make_room(
        self, cls: JobClass, newcomer: Unit, known: UnitState | None, total: int
    ) -> Ticket | None:
        """The newest job of the unit that waits most above its fair part of the full queue.

        None: nobody is above it, or the newcomer would be. The fair part is the bound divided by
        the units that wait, and at least one job. O(waiting units), only when the queue is full
        and the newcomer waits with less than that: whoever floods it is refused in O(1).
        """
        mask, bound = _EVERYTHING, None
        for full_mask, full_bound in self._full(cls, total):
            mask &= full_mask
            bound = full_bound if bound is None else min(bound, full_bound)
        if bound is None:
            return None
        lanes = list(self._lanes_within(mask))
        if known is not None and lanes:
            own = sum(flow.live for flow in known.flows.values() if flow.lane in lanes)
            units = max(len(lane.flows) for lane in lanes)  # at least: each has one flow in a lane
            if own + 1 > max(1.0, bound / units):
                return None
        flows = [flow for lane in lanes for flow in lane.flows]
        jobs: Counter[Unit] = Counter({newcomer: 1})
        for flow in flows:
            jobs[flow.unit.key] += flow.live
        fair = max(1.0, bound / len(jobs))
        most = max(jobs.values())
        if most <= fair or jobs[newcomer] > fair:
            return None
        tickets = (flow.newest() for flow in flows if jobs[flow.unit.key] == most)
        return max(tickets, key=lambda ticket: (ticket.enqueued_at, ticket.number))

    def _lanes_within(self, mask: int) -> Iterator[Lane]:
        """Those of the classes whose backends all are in ``mask``."""
        for cls in self._catalogue.classes.values():
            if cls.queued and cls.everything & ~mask == 0:
                yield from cls.lanes
