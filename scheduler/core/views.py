"""What pages and statistics show of the running scheduler: finished values, nothing live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler.core.jobs import Unit

BackendCondition = Literal["ready", "failed", "down", "draining", "disabled", "unknown"]


@dataclass(frozen=True, slots=True)
class QueuedView:
    """A waiting job and the parts of its priority, as if its unit were next."""

    request_id: str
    user_id: int
    unit: Unit
    model_name: str
    enqueued_at: float
    position: int  # 1-based, in the order of service within its class, as estimated
    deficit: float
    burst_credits: float
    weight: float
    factor: float
    wait_bonus: float
    priority: float


@dataclass(frozen=True, slots=True)
class BackendView:
    """``queued`` counts every waiting job that it could serve, others perhaps as well; of one out
    of service only those that have no other. One that is paused is ``draining`` as long as it has
    requests in flight, then ``disabled``."""

    id: int
    name: str
    in_flight: int
    queued: int
    max_concurrent: int
    state: BackendCondition
    observed_age_seconds: float | None
    failed_for_seconds: float | None  # until the fail window ends
    foreign: int


@dataclass(frozen=True, slots=True)
class ShareView:
    """One unit's share. Tokens, except ``weight`` and ``factor``; weight 0 is background."""

    user_id: int
    unit: Unit
    group: str | None
    weight: float
    deficit: float
    burst_credits: float
    factor: float
    recent_tokens: float
    queued: int
    running: int
    charged_tokens: float  # settled since the scheduler has known the unit


@dataclass(frozen=True, slots=True)
class Stats:
    """The seed's queue statistics; ``users`` are those with jobs or recent tokens."""

    queue_total: int
    queue_by_user: dict[int, int]
    queue_by_model: dict[str, int]
    average_wait_seconds: float  # of those waiting now
    total_users: int
    global_recent_tokens: float
    users: list[ShareView]
