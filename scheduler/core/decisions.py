"""Why a job went where it went and when it did, as it is kept with its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

#: Why a job had to wait, as it was when it was queued.
WaitReason = Literal[
    "none",  # it did not
    "backends_full",  # every eligible backend was at its limit
    "backends_failed",  # every eligible backend was in its fail window
    "paused",  # every eligible backend was disabled, draining or down
    "no_memory",  # the model fitted nowhere at that moment
    "own_backlog",  # earlier jobs of the same user were waiting
    "others_ahead",  # other users' jobs came first
]

#: Why this backend: the best score, a tie broken in turn, the cache key's home, the only one
#: left, or the least bad of the failed ones.
ChoiceReason = Literal["score", "round_robin", "affinity", "only_candidate", "fail_open"]

#: The soft scores of a placement, in the order of ``Decision.points`` (P2, P3).
SCORE_NAMES = (
    "model_loaded",
    "low_utilization",
    "latency",
    "short_queue",
    "high_throughput",
    "priority",
    "cache_affinity",
)


class SlotsTaken(NamedTuple):
    """Why a backend has no capacity; put into words only when somebody asks."""

    ours: int
    others: int
    slots: int

    def __str__(self) -> str:
        return f"{self.ours} + {self.others} of {self.slots} slots in use"


#: (backend id, constraint, why it failed)
Failure = tuple[int, str, str | SlotsTaken]

#: {group name: (jobs, tokens held)}: what a class has dispatched so far.
Served = Mapping[str, tuple[int, float]]


class Decision(NamedTuple):
    """One choice, with every value as it was at that moment.

    ``points`` holds ``(backend id, one figure per SCORE_NAMES)`` of each candidate, ``failures``
    ``(backend id, constraint, why)`` of each backend that could not be one, and ``names`` what all
    backends were called. A named tuple, since one is built for every request and a frozen
    dataclass takes three times as long. It is stored as it is, and what follows from it is worked
    out where the record is loaded: new fields go to the end and have a default, so that records
    of an older version can still be read.
    """

    selected_backend_id: int
    points: Sequence[tuple[int, tuple[float, ...]]]
    failures: tuple[Failure, ...]
    reason: ChoiceReason
    user_deficit: float
    user_weight: float
    user_group: str | None
    user_recent_usage: float
    burst_credits: float
    factor: float
    wait_bonus: float
    priority: float
    position_at_arrival: int
    wait_reason: WaitReason
    ahead: Served
    names: Mapping[int, str]

    @property
    def candidate_backends(self) -> tuple[int, ...]:
        return tuple(backend_id for backend_id, _ in self.points)

    @property
    def backend_names(self) -> dict[int, str]:
        """{backend id: name} of those that are mentioned."""
        mentioned = (*self.candidate_backends, *(failure[0] for failure in self.failures))
        return {one: self.names[one] for one in mentioned if one in self.names}

    @property
    def scores(self) -> dict[int, float]:
        """{backend id: total points}"""
        return {backend_id: sum(points) for backend_id, points in self.points}

    @property
    def score_parts(self) -> dict[int, dict[str, float]]:
        """{backend id: {score name: points}}"""
        return {
            backend_id: dict(zip(SCORE_NAMES, points, strict=True))
            for backend_id, points in self.points
        }

    @property
    def constraints(self) -> dict[int, dict[str, str]]:
        """{backend id: {constraint that failed: why}}"""
        failed: dict[int, dict[str, str]] = {}
        for backend_id, constraint, why in self.failures:
            failed.setdefault(backend_id, {})[constraint] = str(why)
        return failed
