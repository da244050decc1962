"""From what happened to a request to its record."""

from __future__ import annotations

from scheduler.core.jobs import Usage
from scheduler.serving import Claim
from scheduler.spool import Record


class Clock:
    """Turns monotonic moments into wall-clock ones: the wall clock is read once per request, so a
    jump of it never shows as a wait."""

    __slots__ = ("_offset",)

    def __init__(self, wall: float, monotonic: float) -> None:
        self._offset = wall - monotonic

    def wall(self, monotonic: float) -> float:
        """Epoch seconds of a monotonic moment."""
        return monotonic + self._offset


def describe_usage(record: Record, usage: Usage) -> None:
    record.prompt_tokens = usage.prompt_tokens
    record.completion_tokens = usage.completion_tokens
    record.cached_tokens = usage.cached_tokens
    record.usage_estimated = usage.estimated


def describe_claim(record: Record, claim: Claim, clock: Clock) -> None:
    """Where it went, why, what else could have been, and what it cost."""
    ticket = claim.ticket
    record.queued_at = clock.wall(ticket.enqueued_at)
    record.position_at_arrival = ticket.position_at_arrival
    record.wait_reason = ticket.wait_reason
    if claim.settlement is not None:
        record.charged_tokens = claim.settlement.charged_tokens
    lease = ticket.lease
    if lease is None:
        return
    decision = record.decision = lease.decision
    record.dispatched_at = clock.wall(lease.dispatched_at)
    record.model_served = lease.model_name
    record.selected_backend_id = decision.selected_backend_id
    record.selected_backend = lease.backend_name
