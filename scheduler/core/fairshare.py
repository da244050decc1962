"""The books: costs, tags, levels, holds and clamps (R1–R8), heavy users (R9) and credits (R10).

A unit's *tag* is its charged cost divided by its weight. It is compared, never shown. A pool's
*level* is the tag at which its latest dispatch started. Both are tokens per unit of weight. Where
the rules say *class* they mean what is called ``Pool`` here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.core.burst import BurstCredits
from scheduler.core.jobs import Job, Usage
from scheduler.core.queue import Flow, Pool, Standing
from scheduler.core.tickets import Clips, Lease
from scheduler.core.tunables import Tunables
from scheduler.core.units import UNSET, Roster, UnitState
from scheduler.core.window import UsageWindow

if TYPE_CHECKING:
    from scheduler.core.checkpoint import Saving

FIRST_GUESS_TOKENS = 256.0  # the output of a model that nobody has used yet (R3)
_KEPT = 0.9  # of an average, when a new value comes in


class FairShare:
    """What everybody has been charged, and what that means for who comes and goes."""

    def __init__(self, roster: Roster, tunables: Tunables) -> None:
        self.roster = roster
        self.burst = BurstCredits(tunables)
        self.window = UsageWindow(tunables.fairness_window, self._forget)
        self.outputs: dict[str, float] = {}  # {model name: average output tokens}
        self.latest_level = [0.0, 0.0]  # of any pool: positive weights, background
        self.active: tuple[set[Pool], set[Pool]] = (set(), set())  # with jobs, likewise
        self.saving: Saving | None = None  # a checkpoint that is being written
        self.tune(tunables)

    def tune(self, tunables: Tunables) -> None:
        self.quantum = tunables.quantum
        self.debt_cap = tunables.debt_cap
        self.wait_bonus_rate = tunables.wait_bonus_rate
        self.threshold = tunables.deprioritize_threshold
        self._input = tunables.cost_input_token
        self._output = tunables.cost_output_token
        self._cost = tunables.cost
        self.burst.tune(tunables)
        self.window.resize(tunables.fairness_window)

    def _forget(self, unit: UnitState) -> None:
        if not unit.queued and not unit.running:
            self.roster.forget(unit)

    # ---- R1, R3: what a job costs

    def cost(self, usage: Usage) -> float:
        """R1, in tokens."""
        return self._cost(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)

    def expected_output(self, unit: UnitState, job: Job) -> float:
        """R3's ê, in tokens."""
        expected = unit.outputs.get(job.model_name)
        if expected is None:
            expected = self.outputs.get(job.model_name, FIRST_GUESS_TOKENS)
        if job.max_tokens is not None and job.max_tokens < expected:
            return float(job.max_tokens)
        return expected

    def hold_for(self, unit: UnitState, job: Job) -> float:
        """R3's e, in tokens."""
        return self._input * job.prompt_tokens + self._output * self.expected_output(unit, job)

    def learn_output(self, unit: UnitState, model_name: str, tokens: int) -> None:
        for averages in (unit.outputs, self.outputs):
            known = averages.get(model_name, tokens)
            averages[model_name] = _KEPT * known + (1.0 - _KEPT) * tokens

    # ---- R7: coming and going

    def join(self, flow: Flow) -> None:
        """A user comes to a pool: nothing banked, and no boundless debt (R7)."""
        unit, pool = flow.unit, flow.standing.pool
        background = unit.background
        flow.lane = flow.cls.lanes[background]
        level = self._level_for(pool, background)
        if level is not None:
            self._clamp(unit, flow.standing, level)
            return
        if unit.tag == UNSET:
            unit.tag = self.latest_level[background]
        pool.levels[background] = flow.tag  # the pool begins anew here

    def _level_for(self, pool: Pool, background: bool) -> float | None:
        """L of R7: the pool's level, else the least of its active neighbours', else None."""
        if pool.jobs[background]:
            return pool.levels[background]
        level: float | None = None
        for other in self.active[background]:
            if other.mask & pool.mask:
                theirs = other.levels[background]
                if level is None or theirs < level:
                    level = theirs
        if level is not None:
            pool.levels[background] = level
        return level

    def _clamp(self, unit: UnitState, standing: Standing, level: float) -> None:
        if unit.tag == UNSET:
            unit.tag = level
            return
        tag = unit.tag + standing.offset
        if tag < level:
            self._lift(unit, standing, level - tag)
            return
        if tag <= standing.own_tag:
            return
        highest = level + (self.debt_cap + unit.held) / self.roster.weight(unit)
        if tag <= highest:
            return
        excess = tag - max(highest, standing.own_tag)
        if unit.waiting_pools:
            standing.offset -= excess
            unit.has_offsets = True
        else:
            unit.tag -= excess

    def _lift(self, unit: UnitState, standing: Standing, amount: float) -> None:
        """Raise the tag for this pool; where else the unit waits, nothing changes (R8)."""
        unit.tag += amount
        if unit.waiting_pools:
            for other in unit.standings.values():
                if other is not standing and other.waiting:
                    other.offset -= amount
                    unit.has_offsets = True

    def activate(self, flow: Flow, now: float) -> None:
        """The flow's queue becomes non-empty."""
        unit, standing = flow.unit, flow.standing
        if not standing.waiting:
            self.join(flow)
            unit.waiting_pools += 1
        standing.waiting += 1
        flow.lane = flow.cls.lanes[unit.background]
        flow.lane.flows.add(flow)
        flow.waiting_since = now
        flow.weight_share = self.roster.weight(unit)
        standing.pool.waiting_weight[unit.background] += flow.weight_share

    def deactivate(self, flow: Flow) -> None:
        """The flow's queue is empty again."""
        unit, standing, lane = flow.unit, flow.standing, flow.lane
        lane.flows.discard(flow)
        flow.entry = None
        if lane.aside and flow in lane.aside:
            lane.aside.remove(flow)
        standing.pool.waiting_weight[unit.background] -= flow.weight_share
        standing.waiting -= 1
        if standing.waiting:
            return
        standing.own_tag = unit.tag + standing.offset
        unit.waiting_pools -= 1
        if unit.has_offsets and not unit.waiting_pools:
            self._fold_offsets(unit, standing)

    def _fold_offsets(self, unit: UnitState, last: Standing) -> None:
        """The unit waits nowhere any more: its tag is what its last pool saw (R8)."""
        unit.tag += last.offset
        for standing in unit.standings.values():
            standing.offset = 0.0
        unit.has_offsets = False
        unit.epoch += 1

    def change_lane(self, unit: UnitState, now: float) -> None:
        """The weight became 0 or positive: from now on the tags of the other space count (R13)."""
        waiting = [flow for flow in unit.flows.values() if flow.live]
        for flow in waiting:
            self.deactivate(flow)
            self.count_queued(flow, -flow.live)
        self.roster.change_kind(unit)
        unit.tag, unit.other_tag = unit.other_tag, unit.tag
        unit.epoch += 1
        for standing in unit.standings.values():
            standing.offset = 0.0
            standing.own_tag = UNSET
        for flow in waiting:
            self.activate(flow, now)
            self.count_queued(flow, flow.live)
            flow.lane.push(flow, self.wait_bonus_rate)

    def count_queued(self, flow: Flow, change: int) -> None:
        flow.lane.queued += change
        flow.lane.moves += 1
        self.count_jobs(flow.standing.pool, flow.unit.background, change)

    def count_jobs(self, pool: Pool, background: bool, change: int) -> None:
        """Queued and running ones together: with one of either the pool is active (R7)."""
        pool.jobs[background] = jobs = pool.jobs[background] + change
        if not jobs:
            self.active[background].discard(pool)
            pool.waiting_weight[background] = 0.0  # sheds what rounding has left
        elif jobs == change:
            self.active[background].add(pool)

    # ---- R3–R6, R8: charges

    def hold(self, lease: Lease) -> None:
        """Charge the reservation of a dispatch."""
        flow, hold = lease.flow, lease.hold
        unit = flow.unit
        tag = unit.tag + flow.standing.offset
        flow.standing.pool.levels[unit.background] = self.latest_level[unit.background] = tag
        unit.last_flow = flow
        unit.held += hold
        if hold > unit.largest_hold:
            unit.largest_hold = hold
        if unit.waiting_pools:
            lease.clips = self._charge(flow, hold / lease.weight, lease.background)
        else:  # it waits nowhere, so that nothing can be clipped
            self._move(flow, hold / lease.weight, lease.background)

    def reserve(self, lease: Lease) -> None:
        """The same for a job that runs already: it says nothing of who is being served now."""
        unit = lease.flow.unit
        unit.held += lease.hold
        unit.largest_hold = max(unit.largest_hold, lease.hold)
        lease.clips = self._charge(lease.flow, lease.hold / lease.weight, lease.background)

    def charge_excess(self, lease: Lease, delivered: float) -> None:
        """R4: what has been delivered beyond the hold, at once."""
        excess = delivered - lease.charged
        if excess <= 0.0:
            return
        lease.flow.unit.held += excess
        lease.charged = delivered
        clips = self._charge(lease.flow, excess / lease.weight, lease.background)
        lease.clips = _joined(lease.clips, clips)

    def settle(self, lease: Lease, cost: float) -> None:
        """R5, R6: release the hold and charge the true cost; 0 is a refund."""
        flow = lease.flow
        unit = flow.unit
        if cost > unit.largest_cost:
            unit.largest_cost = cost
        unit.held -= lease.charged
        if not unit.running:
            unit.held = 0.0  # sheds what rounding has left
        waits = unit.waiting_pools and self._waits_elsewhere(flow, lease.background)
        if lease.clips is None and not waits:
            self._move(flow, (cost - lease.charged) / lease.weight, lease.background)
        else:
            self._release(lease)
            self._charge(flow, cost / lease.weight, lease.background)
        if unit.waiting_pools and cost < lease.charged:
            self._moved_back(unit)

    def _waits_elsewhere(self, flow: Flow, background: bool) -> bool:
        """Whether a charge on the flow's pool may be clipped in another."""
        pools = flow.unit.waiting_pools
        if not pools:
            return False
        return pools > (1 if flow.standing.waiting else 0) and background == flow.unit.background

    def _charge(self, flow: Flow, amount: float, background: bool) -> Clips | None:
        """Raise the tag; in the unit's other pools only up to their level + D (R8)."""
        self._move(flow, amount, background)
        if not self._waits_elsewhere(flow, background):
            return None
        unit = flow.unit
        clips: dict[Standing, float] = {}
        room = (self.debt_cap + unit.held) / self.roster.weight(unit)
        for other in unit.standings.values():
            if other is flow.standing or not other.waiting:
                continue
            tag = unit.tag + other.offset
            clipped = tag - max(other.pool.levels[background] + room, tag - amount)
            if clipped > 0.0:
                other.offset -= clipped
                clips[other] = clipped
        if not clips:
            return None
        unit.has_offsets = True
        return Clips(unit.epoch, clips)

    def _release(self, lease: Lease) -> None:
        """Take a lease's charges back, where they moved something."""
        flow = lease.flow
        self._move(flow, -lease.charged / lease.weight, lease.background)
        clips = lease.clips
        if clips is not None and clips.epoch == flow.unit.epoch:
            for other, clipped in clips.amounts.items():
                if other.waiting:
                    other.offset += clipped
        lease.clips = None

    def _move(self, flow: Flow, amount: float, background: bool) -> None:
        unit = flow.unit
        unit.service += amount
        if background != unit.background:
            unit.other_tag += amount
            return
        unit.tag += amount
        if not flow.standing.waiting:
            flow.standing.own_tag += amount

    def _moved_back(self, unit: UnitState) -> None:
        """The tag may have fallen: the heaps must know at once."""
        for flow in unit.flows.values():
            if flow.live and flow.entry is not None:
                flow.lane.push(flow, self.wait_bonus_rate)

    # ---- R2, R9: how a unit stands

    def factor(self, unit: UnitState) -> float:
        """R9: below 1 for a unit that has used more than its part of the window."""
        total = self.window.total
        if unit.recent <= self.threshold * total:
            return 1.0
        return max(0.1, 1.0 - 2.0 * (unit.recent / total - self.threshold))

    def shown_deficit(self, unit: UnitState) -> float:
        """R2 outside a decision: against the level of the pool that the unit used last."""
        flow = unit.last_flow
        if flow is None or unit.tag == UNSET:
            return self.roster.weight(unit) * self.quantum
        level = flow.standing.pool.levels[unit.background]
        tag = flow.tag
        if not unit.waiting_pools and not unit.running:
            tag = max(tag, level)  # what coming back would make of it (R7)
        return self.roster.weight(unit) * (level + self.quantum - tag)


def _joined(one: Clips | None, other: Clips | None) -> Clips | None:
    """Both clips together; those from before offsets were folded away count no more."""
    if one is None or other is None:
        return other if one is None else one
    if one.epoch != other.epoch:
        return other
    amounts = dict(one.amounts)
    for flow, amount in other.amounts.items():
        amounts[flow] = amounts.get(flow, 0.0) + amount
    return Clips(one.epoch, amounts)
