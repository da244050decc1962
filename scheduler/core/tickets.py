"""What the scheduler hands out: tickets, leases, settlements and the reasons of each choice.

A *ticket* is the handle of a job from submission to its end, a *lease* one held slot. Only the
scheduler changes them. A ticket keeps its identity over retries; each attempt has its own lease.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from scheduler.core.errors import Evicted
from scheduler.core.jobs import Job

if TYPE_CHECKING:
    from scheduler.core.cluster import Offer
    from scheduler.core.queue import Flow, Standing

#: "moving" is never seen outside: between two classes while the configuration changes.
TicketState = Literal["queued", "moving", "leased", "evicted", "cancelled", "settled"]

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


class Ticket:
    """A submitted job. ``attempts`` counts the leases it has had; ``owner`` is the caller's."""

    __slots__ = (
        "attempts",
        "avoid",
        "deadline",
        "dispatches_before",
        "enqueued_at",
        "error",
        "flow",
        "job",
        "lease",
        "number",
        "owner",
        "position_at_arrival",
        "queued_since",
        "ruled_out",
        "served_before",
        "state",
        "wait_reason",
        "waited_seconds",
    )

    def __init__(
        self,
        job: Job,
        flow: Flow,
        number: int,
        enqueued_at: float,
        ruled_out: tuple[Failure, ...],
    ) -> None:
        self.job = job
        self.flow = flow  # where it waits or waited
        self.number = number  # order of arrival, which breaks ties
        self.state: TicketState = "queued"
        self.lease: Lease | None = None
        self.error: Evicted | None = None
        self.enqueued_at = enqueued_at
        self.attempts = 0
        self.position_at_arrival = 1
        self.wait_reason: WaitReason = "none"
        self.owner: Any = None
        self.avoid: frozenset[int] = frozenset()  # backends that failed it (P6)
        self.queued_since = enqueued_at
        self.deadline: float | None = None  # when it will be dropped; None: never waited yet
        self.waited_seconds = 0.0  # in the queue, over all attempts so far
        self.ruled_out = ruled_out  # backends that can never serve it
        self.served_before: Served = {}
        self.dispatches_before = 0

    @property
    def decision(self) -> Decision | None:
        """Of the latest attempt."""
        return self.lease.decision if self.lease is not None else None


class Lease:
    """One slot of one backend, held by a ticket. Tokens, tokens per unit of weight, seconds."""

    __slots__ = (
        "backend",
        "backend_id",
        "backend_name",
        "background",
        "charged",
        "clips",
        "decision",
        "dispatched_at",
        "first_byte_at",
        "flow",
        "hold",
        "measures",
        "model_name",
        "open",
        "previous_dispatch",
        "ticket",
        "weight",
    )

    def __init__(
        self,
        ticket: Ticket,
        flow: Flow,
        offer: Offer,
        decision: Decision,
        hold: float,
        weight: float,
        now: float,
    ) -> None:
        self.ticket = ticket
        self.flow = flow
        self.backend = backend = offer.backend
        self.backend_id = backend.spec.backend_id
        self.backend_name = backend.spec.name
        self.model_name = offer.model.name
        self.measures = offer.measures
        self.dispatched_at = now
        self.first_byte_at: float | None = None
        self.hold = hold  # tokens reserved at dispatch (R3)
        self.charged = hold  # tokens charged so far (R4)
        self.weight = weight  # the divisor in force at dispatch (R5)
        self.background = flow.unit.background
        self.clips: Clips | None = None
        self.previous_dispatch = flow.last_dispatch
        self.decision = decision
        self.open = True


@dataclass(slots=True)
class Clips:
    """What a charge did not move in the user's other pools (R8), to be undone with it."""

    epoch: int
    amounts: dict[Standing, float]


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


class Settlement(NamedTuple):
    """What ending a lease has cost."""

    charged_tokens: float
    cost: float
