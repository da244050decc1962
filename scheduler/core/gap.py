"""T1, measured live: how far apart users who all wait for the same class have been served."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.core.parts import Parts, split
from scheduler.core.queue import Flow, JobClass, Lane
from scheduler.core.tunables import Tunables
from scheduler.core.units import Roster, UnitState

_INTERVAL_SECONDS = 300.0


@dataclass(slots=True)
class Interval:
    """One stretch of observation of a lane."""

    started_at: float
    service: dict[Flow, tuple[float, float]]  # {flow: (waiting since, service at the start)}
    worst: float = 0.0


class GapMeter:
    """Compares, from one look to the next, the units that never stopped waiting."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._intervals: dict[JobClass, Interval] = {}

    def measure(
        self, classes: Iterable[JobClass], tunables: Tunables, now: float
    ) -> Parts[tuple[float, float]]:
        """The largest gap of any class and that class's bound, in tokens per unit of weight.

        What a user has had is read of all at one moment; only the bound is worked out in parts.
        """
        waiting = [cls for cls in classes if len(cls.lanes[0].flows) > 1]
        self._intervals = {k: v for k, v in self._intervals.items() if k in waiting}
        found = [(0.0, 0.0)]
        for cls in waiting:
            lane = cls.lanes[0]
            flows = self._steady(cls, lane, now)
            if len(flows) > 1:
                gap = self._gap(cls, flows)
                yield
                bound = yield from self._bound(flows, lane, tunables, now)
                found.append((gap, bound))
        return max(found)

    def _steady(self, cls: JobClass, lane: Lane, now: float) -> list[Flow]:
        interval = self._intervals.get(cls)
        if interval is not None and now - interval.started_at < _INTERVAL_SECONDS:
            seen = interval.service
            steady = [f for f in lane.flows if f in seen and seen[f][0] == f.waiting_since]
            if len(steady) > 1:
                return steady
        lane.largest_bonus = 0.0
        for flow in lane.flows:
            _start_anew(flow.unit)
        marks = {flow: (flow.waiting_since, flow.unit.service) for flow in lane.flows}
        self._intervals[cls] = Interval(now, marks)
        return list(lane.flows)

    def _gap(self, cls: JobClass, flows: list[Flow]) -> float:
        interval = self._intervals[cls]
        had = [flow.unit.service - interval.service[flow][1] for flow in flows]
        interval.worst = max(interval.worst, max(had) - min(had))
        return interval.worst

    def _bound(self, flows: list[Flow], lane: Lane, tunables: Tunables, now: float) -> Parts[float]:
        """(G+2H)/w of the two for whom it is largest, + 2ωT + 0.9(Q+C)."""
        largest: list[float] = []
        longest = 0.0
        for part in split(flows):
            spreads = [_spread(flow.unit) / self._roster.weight(flow.unit) for flow in part]
            largest = heapq.nlargest(2, largest + spreads)
            waited = [now - flow.waits_from() for flow in part if flow.live]
            longest = max([longest, *waited])
            yield
        bonus = max(lane.largest_bonus, tunables.wait_bonus_rate * longest)
        return sum(largest) + 2.0 * bonus + 0.9 * (tunables.quantum + tunables.burst_credit_cap)


def _start_anew(unit: UnitState) -> None:
    unit.largest_cost = 0.0
    unit.peak_running = unit.running


def _spread(unit: UnitState) -> float:
    """G + 2H. What all running jobs will cost is not known until they have ended, so that G is
    taken for the most that ran at once, each as dear as the dearest."""
    dearest = max(unit.largest_cost, unit.largest_hold)
    return unit.peak_running * dearest + 2.0 * unit.largest_hold
