"""Who is next: the priority of the seed, and the best of all that wait (R2, R9, R11, R12)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.core.fairshare import FairShare
from scheduler.core.queue import Entry, Flow, JobClass, Lane
from scheduler.core.tickets import Ticket


@dataclass(slots=True)
class Choice:
    """The best candidate and the parts of its priority (R2, R9–R12)."""

    flow: Flow
    base: float  # R − tag of R2: deficit per unit of weight
    factor: float
    wait_bonus: float  # tokens

    def priority(self, beta: float) -> float:
        """The seed's formula, with R9's rule that the factor never helps: a negative base is
        divided by it. Tokens per unit of weight."""
        base = self.base + beta
        scaled = base * self.factor if base >= 0.0 else base / self.factor
        return scaled + self.wait_bonus


def only_choice(share: FairShare, flow: Flow, ticket: Ticket, now: float) -> Choice:
    """When there is nobody else: the reference is the unit's own tag."""
    wait_bonus = share.wait_bonus_rate * (now - ticket.enqueued_at)
    return Choice(flow, share.quantum, share.factor(flow.unit), wait_bonus)


def choice_for_display(share: FairShare, flow: Flow, now: float) -> Choice:
    """The parts of a waiting flow's priority as they are now, against its pool's level."""
    level = flow.standing.pool.levels[flow.unit.background]
    return _choice(share, flow, level + share.quantum, now)


def choose(share: FairShare, ready: Iterable[JobClass], now: float) -> Choice | None:
    """R12: the best user of all ready classes; background only when there is no other."""
    positive: list[Lane] = []
    background: list[Lane] = []
    for cls in ready:
        if cls.lanes[0].flows:
            positive.append(cls.lanes[0])
        if cls.lanes[1].flows:
            background.append(cls.lanes[1])
    lanes = positive or background
    return _best(share, lanes, now) if lanes else None


def _best(share: FairShare, lanes: list[Lane], now: float) -> Choice:
    """The highest priority among the lanes' first users and the heavy ones."""
    if len(lanes) == 1 and not lanes[0].aside:
        entry, tag = _first(share, lanes[0])
        if entry is not None and not lanes[0].aside:  # one model, nobody heavy: no comparing
            return Choice(
                entry.flow,
                share.quantum,
                1.0,
                share.wait_bonus_rate * (now - entry.flow.waits_from()),
            )
    best: Entry | None = None
    least = float("inf")
    heavy: list[Flow] = []
    for lane in lanes:
        entry, tag = _first(share, lane)
        if tag < least:
            least = tag
        if entry is not None and (best is None or entry < best):
            best = entry
        if lane.aside:
            heavy += lane.aside
    reference = least + share.quantum
    choices = [_choice(share, flow, reference, now) for flow in heavy]
    if best is not None:
        wait_bonus = share.wait_bonus_rate * (now - best.flow.waits_from())
        choices.append(Choice(best.flow, reference - best.flow.tag, 1.0, wait_bonus))
    if len(choices) == 1:
        return choices[0]
    beta = share.burst.beta
    return max(choices, key=lambda c: (c.priority(beta), -c.flow.head().number))


def _choice(share: FairShare, flow: Flow, reference: float, now: float) -> Choice:
    wait_bonus = share.wait_bonus_rate * (now - flow.waits_from())
    return Choice(flow, reference - flow.tag, share.factor(flow.unit), wait_bonus)


def _first(share: FairShare, lane: Lane) -> tuple[Entry | None, float]:
    """The first user with factor 1, and the tag of the first of all. Heavy ones go aside."""
    rate = share.wait_bonus_rate
    if lane.aside:
        _readmit(share, lane)
    limit = share.threshold * share.window.total
    flow = lane.top(rate)
    while flow is not None and flow.unit.recent > limit:
        lane.set_aside(flow)
        flow = lane.top(rate)
    entry = flow.entry if flow is not None else None
    if not lane.aside:
        return entry, flow.tag if flow is not None else float("inf")
    keys = [flow.key(rate) for flow in lane.aside]
    if entry is not None:
        keys.append(entry)
    return entry, min(keys).flow.tag


def _readmit(share: FairShare, lane: Lane) -> None:
    """Back into the heap with those that are no longer heavy."""
    limit = share.threshold * share.window.total
    for flow in [f for f in lane.aside if f.unit.recent <= limit]:
        lane.aside.remove(flow)
        lane.push(flow, share.wait_bonus_rate)
