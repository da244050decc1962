"""R17: timed boosts, factors on a group's or one user's weight for a while."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from scheduler.core.jobs import UserSpec
from scheduler.core.weights import MAXIMUM_WEIGHT

MINIMUM_WEIGHT = 1e-6  # of those that are not 0: the smallest that can be stored


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFactor:
    """One boost. Its end does not belong to it. Times are epoch seconds.

    Either ``group_id`` or ``user_id`` is given: all members of the group, or the one user.
    """

    name: str
    factor: float
    starts_at: float
    ends_at: float
    group_id: int | None = None
    user_id: int | None = None

    def in_force(self, at: float) -> bool:
        return self.starts_at <= at < self.ends_at


def boosted(spec: UserSpec, in_force: Iterable[TimedFactor]) -> UserSpec:
    """``spec`` with the weights that the boosts give it: the group's boosts count for the group
    and for each member, also for one with a weight of the own; the user's for the user only."""
    group = [one.factor for one in in_force if one.group_id == spec.group_id and one.group_id]
    own = [one.factor for one in in_force if one.user_id == spec.user_id]
    if not group and not own:
        return spec
    return replace(
        spec,
        weight=multiplied(spec.weight, [*group, *own]),
        group_weight=multiplied(spec.group_weight, group),
    )


def multiplied(weight: float, factors: Iterable[float]) -> float:
    """All factors count, so each does what it says whatever else is in force. 0 stays 0; what is
    not 0 stays between the smallest and the largest weight that can be stored."""
    factor = math.prod(sorted(factors))  # the same in every order
    if weight <= 0.0 or factor <= 0.0:
        return 0.0
    return min(MAXIMUM_WEIGHT, max(MINIMUM_WEIGHT, weight * factor))
