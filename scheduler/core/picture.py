"""The whole queue in small parts, for pages that show, sort and filter it elsewhere.

One look at 10,000 waiting jobs takes a tenth of a second; nobody can be served meanwhile. So the
scheduler's own thread only copies what changes, a part at a time, and whoever asked does the rest.
Between two parts jobs come and go: a picture is as true as the moment it takes to make it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.core.fairshare import FairShare
from scheduler.core.jobs import Unit
from scheduler.core.order import choice_for_display
from scheduler.core.queue import Flow
from scheduler.core.units import Roster
from scheduler.core.waiting import WaitingRoom

PART_JOBS = 200  # about 1 ms, whoever they belong to


@dataclass(frozen=True, slots=True)
class FlowPicture:
    """One unit's waiting jobs of one model, and the parts of its priority as it is now.

    Tokens, tokens per unit of weight (``priority``, ``first``, ``step``) and seconds.
    """

    user_id: int
    unit: Unit
    username: str
    group: str | None
    model_name: str
    weight: float  # 0 is background
    deficit: float
    burst_credits: float
    factor: float
    wait_bonus: float
    priority: float
    pool: int  # jobs of one pool compete for the same backends
    first: float  # the key at which the first job is served; lower is sooner
    step: float  # what each job adds to it
    per_second: float | None  # dispatches of the whole pool
    jobs: tuple[tuple[int, float, str], ...]  # (number, enqueued at, request id), in order


def parts(
    waiting: WaitingRoom, share: FairShare, roster: Roster, now: float
) -> Iterator[list[FlowPicture]]:
    """Every flow with waiting jobs, in parts of about ``PART_JOBS`` jobs."""
    flows = [flow for cls in waiting.classes for lane in cls.lanes for flow in lane.flows]
    part: list[FlowPicture] = []
    size = 0
    for flow in flows:
        if flow.live:  # it may have been served since the part before
            part.append(_picture(flow, waiting, share, roster, now))
            size += flow.live + 1
        if size >= PART_JOBS:
            yield part
            part, size = [], 0
    yield part


def _picture(
    flow: Flow, waiting: WaitingRoom, share: FairShare, roster: Roster, now: float
) -> FlowPicture:
    unit, pool = flow.unit, flow.standing.pool
    spec = unit.account.spec
    weight, beta = roster.weight(unit), share.burst.beta
    choice = choice_for_display(share, flow, now)
    first, step = waiting.starts(flow)
    return FlowPicture(
        user_id=spec.user_id,
        unit=unit.key,
        username=spec.username,
        group=spec.group_name,
        model_name=flow.cls.model_name,
        weight=roster.shown_weight(unit),
        deficit=weight * choice.base,
        burst_credits=weight * beta,
        factor=choice.factor,
        wait_bonus=choice.wait_bonus,
        priority=choice.priority(beta),
        pool=pool.mask,
        first=first,
        step=step,
        per_second=pool.drain.per_second(now),
        jobs=tuple((t.number, t.enqueued_at, t.job.request_id) for t in flow.waiting()),
    )
