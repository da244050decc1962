"""Finished views of the running scheduler. Reads everything, changes nothing."""

from __future__ import annotations

from collections import Counter

from scheduler.core.cluster import BackendState, Cluster
from scheduler.core.fairshare import FairShare
from scheduler.core.order import choice_for_display
from scheduler.core.parts import Parts, split
from scheduler.core.placement import is_in_service
from scheduler.core.tickets import Ticket
from scheduler.core.units import Roster, UnitState
from scheduler.core.views import BackendCondition, BackendView, QueuedView, ShareView, Stats
from scheduler.core.waiting import WaitingRoom


def queue(waiting: WaitingRoom, share: FairShare, roster: Roster, now: float) -> list[QueuedView]:
    views: list[QueuedView] = []
    for pool in waiting.pools():
        for position, ticket in enumerate(waiting.in_order(pool), start=1):
            views.append(_queued_view(ticket, position, share, roster, now))
    return views


def _queued_view(
    ticket: Ticket, position: int, share: FairShare, roster: Roster, now: float
) -> QueuedView:
    flow, job = ticket.flow, ticket.job
    unit = flow.unit
    weight = roster.weight(unit)
    choice = choice_for_display(share, flow, now)
    return QueuedView(
        request_id=job.request_id,
        user_id=job.user_id,
        unit=job.unit,
        model_name=job.model_name,
        enqueued_at=ticket.enqueued_at,
        position=position,
        deficit=weight * choice.base,
        burst_credits=weight * share.burst.beta,
        weight=roster.shown_weight(unit),
        factor=choice.factor,
        wait_bonus=choice.wait_bonus,
        priority=choice.priority(share.burst.beta),
    )


def stats(waiting: WaitingRoom, share: FairShare, roster: Roster, now: float) -> Parts[Stats]:
    share.window.expire(now)
    beta = share.burst.value(now)
    total, average_wait = waiting.queued, waiting.average_wait(now)
    by_model: Counter[str] = Counter()
    for cls in waiting.classes:
        by_model[cls.model_name] += cls.queued
    users: list[ShareView] = []
    queued: Counter[int] = Counter()
    for part in split(roster.units.values()):
        views = [
            _share_view(unit, share, roster, beta)
            for unit in part
            if unit.queued or unit.running or unit.recent
        ]
        for view in views:
            if view.queued:
                queued[view.user_id] += view.queued
        users += views
        yield
    return Stats(
        queue_total=total,
        queue_by_user=dict(queued),
        queue_by_model=dict(by_model),
        average_wait_seconds=average_wait,
        total_users=len({view.user_id for view in users}),
        global_recent_tokens=share.window.total,
        users=users,
    )


def _share_view(unit: UnitState, share: FairShare, roster: Roster, beta: float) -> ShareView:
    return ShareView(
        user_id=unit.account.spec.user_id,
        unit=unit.key,
        group=unit.account.spec.group_name,
        weight=roster.shown_weight(unit),
        deficit=share.shown_deficit(unit),
        burst_credits=roster.weight(unit) * beta,
        factor=share.factor(unit),
        recent_tokens=unit.recent,
        queued=unit.queued,
        running=unit.running,
        charged_tokens=unit.charged_total,
    )


def backends(cluster: Cluster, waiting: WaitingRoom, now: float) -> list[BackendView]:
    cluster.refresh_all(now)
    return [_backend_view(backend, waiting, now) for backend in cluster.configured()]


def _backend_view(backend: BackendState, waiting: WaitingRoom, now: float) -> BackendView:
    telemetry = backend.telemetry
    failed_for = backend.failed_until - now
    return BackendView(
        id=backend.spec.backend_id,
        name=backend.spec.name,
        in_flight=backend.in_flight,
        queued=waiting.queued_for(backend),
        max_concurrent=backend.spec.max_concurrent,
        state=_condition(backend, now),
        observed_age_seconds=None if telemetry is None else max(0.0, now - telemetry.observed_at),
        failed_for_seconds=failed_for if failed_for > 0.0 else None,
        foreign=backend.others,
    )


def _condition(backend: BackendState, now: float) -> BackendCondition:
    if not backend.spec.enabled:
        return "disabled"
    if backend.spec.draining:
        return "draining"
    if backend.spec.paused:  # as one that is disabled, once it has finished what it had
        return "draining" if backend.in_flight else "disabled"
    if now < backend.failed_until:
        return "failed"
    if is_in_service(backend) is not None or backend.is_down():
        return "down"
    return "ready" if backend.fresh else "unknown"
