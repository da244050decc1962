"""From what happened to a request to its record."""

from __future__ import annotations

from scheduler.core.jobs import Usage
from scheduler.serving import Claim
from scheduler.spool import Record


def describe_usage(record: Record, usage: Usage) -> None:
    record.prompt_tokens = usage.prompt_tokens
    record.completion_tokens = usage.completion_tokens
    record.cached_tokens = usage.cached_tokens
    record.usage_estimated = usage.estimated


def describe_claim(record: Record, claim: Claim, to_wall: float) -> None:
    """Where it went, why, what else could have been, and what it cost.

    ``to_wall`` turns this process's monotonic seconds into epoch seconds.
    """
    ticket = claim.ticket
    record.queued_at = ticket.enqueued_at + to_wall
    record.position_at_arrival = ticket.position_at_arrival
    record.wait_reason = ticket.wait_reason
    if claim.settlement is not None:
        record.charged_tokens = claim.settlement.charged_tokens
    lease = ticket.lease
    if lease is None:
        return
    record.decision = lease.decision
    record.dispatched_at = lease.dispatched_at + to_wall
    record.model_served = lease.model_name
    record.selected_backend_id = lease.backend_id
    record.selected_backend = lease.backend_name
