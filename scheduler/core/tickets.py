"""What the scheduler hands out: tickets, leases and settlements.

A *ticket* is the handle of a job from submission to its end, a *lease* one held slot. Only the
scheduler changes them. A ticket keeps its identity over retries; each attempt has its own lease.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from scheduler.core.decisions import Decision, Failure, Served, WaitReason
from scheduler.core.errors import Evicted
from scheduler.core.jobs import Job

if TYPE_CHECKING:
    from scheduler.core.cluster import Offer
    from scheduler.core.queue import Flow, Standing

#: "moving" is never seen outside: between two classes while the configuration changes.
TicketState = Literal["queued", "moving", "leased", "evicted", "cancelled", "settled"]


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


class Settlement(NamedTuple):
    """What ending a lease has cost."""

    charged_tokens: float
    cost: float
