"""What would have been: recorded decisions → arrivals → two replays, and what to save of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import tee
from typing import Any

from django.db import transaction
from django.db.models import Max, Q, QuerySet
from django.utils import timezone

from accounts.models import Group, Quota, User
from scheduler.core.jobs import BACKGROUND, BackendSpec, Unit, UserSpec
from scheduler.core.weights import effective_weight
from scheduler.models import Decision, SiteSettings, WhatIf, WhatIfState
from scheduler.simulation import Arrival, Recorded, Replay, Scenario, difference, recording
from scheduler.snapshot import Snapshot, fallback_weights, load_snapshot

logger = logging.getLogger(__name__)

#: Refused before they were queued, for want of room: with another configuration they may be served.
ROOM_REASONS = ("queue_full", "concurrency_limit_exceeded")
POINTS = (
    "score_model_loaded",
    "score_low_utilization",
    "score_latency",
    "score_short_queue",
    "score_high_throughput",
    "score_cache_affinity",
)
#: Without a sign of life for so long, nobody works at it any more; 2,000 requests replayed are one.
LOST_AFTER = timedelta(minutes=2)
WORKER_GONE = "Its worker was stopped or died before it was done."
NOT_TAKEN = "No worker took it: do a worker and, with REDIS_URL, Redis run?"
_MOST_USERS = 200  # kept in a result, those with the most tokens
_CHUNK_ROWS = 2_000
_MOST_MODELS = 10_000  # names remembered while reading; clients may have asked for anything
_REASON_LENGTH = 100  # of the history's column


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a scenario changes; JSON has no other keys than texts, so all are texts.

    Weights are decimals as text; None is an unset weight (R13) or no override.
    """

    groups: Mapping[str, str | None] = field(default_factory=dict)  # {group id: weight}
    users: Mapping[str, str | None] = field(default_factory=dict)  # {username: override}
    share_mode: str | None = None
    points: Mapping[str, float] = field(default_factory=dict)  # {one of POINTS: points}
    slots: Mapping[str, int] = field(default_factory=dict)  # {backend id: slots; 0: without it}
    added: Mapping[str, str] = field(default_factory=dict)  # {a new backend's name: like which}

    @property
    def any(self) -> bool:
        return any(asdict(self).values())

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def traffic(since: datetime, until: datetime) -> QuerySet[Decision]:
    """The decisions of the period that competed for slots, in the order of arrival."""
    competed = Q(queued_at__isnull=False) | Q(reason__in=ROOM_REASONS)
    return Decision.objects.filter(
        competed, arrived_at__gte=since, arrived_at__lt=until, user_id__isnull=False
    ).order_by("arrived_at", "id")


class GivenUpError(Exception):
    """Somebody has ended this replay, for want of a sign of life, or has started it again."""


def replay(row: WhatIf) -> None:
    """Replay the scenario's traffic as it was and as changed; keeps progress and result in the row.

    Raises: whatever goes wrong, having noted it in the row.
    """
    row.total = 2 * traffic(row.since, row.until).count()
    try:
        _note(row, total=row.total)
        result = _both(row)
    except GivenUpError:
        logger.warning("%s was given up meanwhile", row)
        return
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        _note(row, state=WhatIfState.FAILED, error=why, ended_at=timezone.now())
        raise
    _note(row, state=WhatIfState.DONE, result=result, ended_at=timezone.now())


def take(pk: int) -> WhatIf | None:
    """Take a scenario that waits, to be replayed. None: another worker has it, or it is over."""
    now = timezone.now()
    waits = WhatIf.objects.filter(pk=pk, state=WhatIfState.QUEUED)
    taken = waits.update(state=WhatIfState.RUNNING, started_at=now, alive_at=now)
    return WhatIf.objects.get(pk=pk) if taken else None


def fail_lost(now: datetime) -> None:
    """End what nobody works at any more: its worker died, or its message was lost."""
    long_ago = now - LOST_AFTER
    unended = (WhatIfState.RUNNING, WhatIfState.QUEUED)
    silent = WhatIf.objects.filter(state__in=unended, alive_at__lt=long_ago)
    if not silent.exists():
        return
    running = silent.filter(state=WhatIfState.RUNNING)
    running.update(state=WhatIfState.FAILED, error=WORKER_GONE, ended_at=now)
    busy = Q(state=WhatIfState.RUNNING) | Q(ended_at__gt=long_ago)
    if not WhatIf.objects.filter(busy).exists():  # else it waits for its turn
        silent.update(state=WhatIfState.FAILED, error=NOT_TAKEN, ended_at=now)


def fail_unsent(pk: int, error: Exception) -> None:
    """No worker could be told of one that waits."""
    waits = WhatIf.objects.filter(pk=pk, state=WhatIfState.QUEUED)
    why = f"No worker could be told of it: {error}"
    waits.update(state=WhatIfState.FAILED, error=why, ended_at=timezone.now())


def start_again(pk: int) -> bool:
    """Let a failed one wait for a worker as on its first day. False: it has not failed."""
    return bool(
        WhatIf.objects.filter(pk=pk, state=WhatIfState.FAILED).update(
            state=WhatIfState.QUEUED,
            alive_at=timezone.now(),
            replayed=0,
            total=0,
            error="",
            started_at=None,
            ended_at=None,
        )
    )


def _both(row: WhatIf) -> dict[str, Any]:
    snapshot = load_snapshot()
    as_it_is = scenario(snapshot, row.since, row.until)
    changed = with_changes(as_it_is, Changes(**row.changes))
    recorded, before, after = Recorded(as_it_is), Replay(as_it_is), Replay(changed)
    # Side by side, so that the records are read once; they report after as many requests, so no
    # more than those of one report are kept for the other.
    ones, others = tee(recording(_arrivals(row, snapshot), recorded))
    for count, _ in zip(before.run(ones), after.run(others), strict=True):
        _note(row, replayed=2 * count)
    results = {
        "recorded": recorded.result(),
        "before": before.result(),
        "after": after.result(),
    }
    apart = difference(results["recorded"], results["before"])
    kept = _busiest(results["before"])
    for result in results.values():
        result["users"] = {name: one for name, one in result["users"].items() if name in kept}
    return {**results, "error": apart, "requests": row.total // 2}


def _note(row: WhatIf, **values: Any) -> None:
    """Keep this with a sign of life. Raises: GivenUpError."""
    ours = WhatIf.objects.filter(pk=row.pk, state=WhatIfState.RUNNING, started_at=row.started_at)
    if not ours.update(alive_at=timezone.now(), **values):
        raise GivenUpError


def _busiest(result: Mapping[str, Any]) -> set[str]:
    users = result["users"]
    return set(sorted(users, key=lambda name: -users[name]["tokens"])[:_MOST_USERS])


# ---- records


_COLUMNS = (
    "user_id", "end_user", "task", "model_requested", "model_served", "prompt_tokens",
    "completion_tokens", "outcome", "reason", "selected_backend_id", "arrived_at", "queued_at",
    "dispatched_at", "ended_at",
)  # fmt: skip


def _arrivals(row: WhatIf, snapshot: Snapshot) -> Iterator[Arrival]:
    # Plain tuples: as rows of the model they take three times as long.
    rows = traffic(row.since, row.until).values_list(*_COLUMNS)
    models: dict[tuple[str, str], str] = {}
    for values in rows.iterator(chunk_size=_CHUNK_ROWS):
        asked, served = values[3:5]
        if len(models) > _MOST_MODELS:
            models.clear()
        if (asked, served) not in models:
            models[asked, served] = _model(asked, served, snapshot)
        yield _arrival(snapshot, models[asked, served], *values)


def _arrival(
    snapshot: Snapshot,
    model_name: str,
    user_id: int,
    end_user: str,
    task: str,
    _asked: str,
    _served: str,
    prompt_tokens: int | None,
    completion_tokens: int | None,
    outcome: str,
    reason: str,
    backend_id: int | None,
    arrived: datetime,
    queued: datetime | None,
    sent: datetime | None,
    ended: datetime | None,
) -> Arrival:
    served = sent is not None and ended is not None
    gone = outcome in ("cancelled", "aborted") and sent is None
    return Arrival(
        at=arrived.timestamp(),
        user_id=user_id,
        unit=_unit(user_id, end_user, task, snapshot),
        model_name=model_name,
        prompt_tokens=prompt_tokens or 0,
        completion_tokens=(completion_tokens or 0) if served else None,
        service_seconds=_seconds(sent, ended) if served else None,
        patience_seconds=_seconds(queued, ended) if gone else None,
        waited_seconds=_seconds(queued, sent) if served else None,
        refused="" if served or gone else reason,
        backend_id=backend_id,
    )


def _unit(user_id: int, end_user: str, task: str, snapshot: Snapshot) -> Unit:
    """As the gateway has it, under the weight that background calls have now."""
    if task and snapshot.tunables.background_weight < 1.0:
        return user_id, end_user, BACKGROUND
    return (user_id, end_user) if end_user else user_id


def _seconds(start: datetime | None, end: datetime | None) -> float | None:
    return None if start is None or end is None else max(0.0, (end - start).total_seconds())


def _model(asked: str, served: str, snapshot: Snapshot) -> str:
    """The name that the scheduler looks up: what an alias stood for."""
    if asked in snapshot.aliases:
        targets = snapshot.aliases[asked]
        return served if served in snapshot.models else next(iter(targets), asked)
    return asked if asked in snapshot.models else served or asked


# ---- configurations


def scenario(snapshot: Snapshot, since: datetime, until: datetime) -> Scenario:
    """Today's configuration without boosts, with the users of the period who have gone since."""
    users = dict(snapshot.unboosted)
    seen = (
        traffic(since, until)
        .order_by()
        .values_list("user_id", "user", "user_group")
        .annotate(weight=Max("user_weight"))
    )
    for user_id, username, group, weight in seen:
        if user_id not in users:
            value = 1.0 if weight is None else weight
            users[user_id] = UserSpec(
                user_id=user_id,
                username=username,
                group_id=None,
                group_name=group,
                weight=value,
                group_weight=value,
            )
    return Scenario(
        users=users,
        backends=snapshot.backends,
        tunables=snapshot.tunables,
        strategies=snapshot.strategies,
    )


def with_changes(one: Scenario, changes: Changes) -> Scenario:
    """The configuration as the scenario changes it."""
    overrides: dict[str, float | None] = {
        name: float(weight)
        for name, weight in Quota.objects.exclude(weight_override=None).values_list(
            "user__username", "weight_override"
        )
    }
    overrides |= {name: _number(weight) for name, weight in changes.users.items()}
    named = {name: value for name, value in (("share_mode", changes.share_mode),) if value}
    return Scenario(
        users={
            user_id: _with_weights(spec, changes, overrides.get(spec.username))
            for user_id, spec in one.users.items()
        },
        backends=_with_added([_with_slots(spec, changes.slots) for spec in one.backends], changes),
        tunables=replace(one.tunables, **named, **changes.points),  # type: ignore[arg-type]
        strategies=one.strategies,
    )


def _number(weight: str | None) -> float | None:
    return None if weight is None else float(weight)


def _with_weights(spec: UserSpec, changes: Changes, override: float | None) -> UserSpec:
    key = str(spec.group_id)
    group_weight = spec.group_weight
    if key in changes.groups:
        group_weight = effective_weight(
            override=None,
            group_weight=_number(changes.groups[key]),
            group_name=spec.group_name,
            is_superuser=False,
            is_staff=False,
            fallbacks=fallback_weights(),
        )
    weight = group_weight if override is None else override
    return replace(spec, group_weight=group_weight, weight=weight)


def _with_slots(spec: BackendSpec, slots: Mapping[str, int]) -> BackendSpec:
    wanted = slots.get(str(spec.backend_id))
    if wanted is None:
        return spec
    if wanted == 0:
        return replace(spec, enabled=False)
    return replace(spec, max_concurrent=wanted, enabled=True, draining=False, paused=False)


def _with_added(backends: list[BackendSpec], changes: Changes) -> list[BackendSpec]:
    """And copies under other names, with the models and slots of what they are like."""
    named = {spec.name: spec for spec in backends}
    free = max((spec.backend_id for spec in backends), default=0) + 1
    added = [(name, named[like]) for name, like in changes.added.items() if like in named]
    return backends + [
        replace(spec, backend_id=number, name=name, address=name)
        for number, (name, spec) in enumerate(added, free)
    ]


# ---- putting it in force


@transaction.atomic
def save_changes(row: WhatIf) -> list[str]:
    """Save the scenario's weights, overrides, share mode and points, each with its history; says
    what changed. Slots and backends are what there is and are not saved."""
    changes = Changes(**row.changes)
    reason = str(row)[:_REASON_LENGTH]
    said = [
        *_save_groups(changes.groups, reason),
        *_save_overrides(changes.users, reason),
        *_save_settings(changes, reason),
    ]
    row.saved_at = timezone.now()
    row.save(update_fields=["saved_at"])
    return said


def _save_groups(weights: Mapping[str, str | None], reason: str) -> Iterator[str]:
    for group in Group.objects.filter(pk__in=weights).order_by("name"):
        text = weights[str(group.pk)]
        weight = None if text is None else Decimal(text)
        if group.scheduler_weight != weight:
            group.scheduler_weight = weight
            group._change_reason = reason  # type: ignore[attr-defined]
            group.save()
            yield f"{group.name} → {text or 'unset'}"


def _save_overrides(weights: Mapping[str, str | None], reason: str) -> Iterator[str]:
    for user in User.objects.filter(username__in=weights).order_by("username"):
        text = weights[user.username]
        quota = Quota.objects.filter(user=user).first() or Quota(user=user)
        weight = None if text is None else Decimal(text)
        if quota.weight_override != weight:
            quota.weight_override = weight
            quota._change_reason = reason  # type: ignore[attr-defined]
            quota.save()
            yield f"{user.username} → {text or 'no override'}"


def _save_settings(changes: Changes, reason: str) -> Iterator[str]:
    values: dict[str, Any] = dict(changes.points)
    if changes.share_mode:
        values["share_mode"] = changes.share_mode
    if not values:
        return
    site = SiteSettings.objects.filter(pk=1).first() or SiteSettings(pk=1)
    for name, value in values.items():
        if getattr(site, name) != value:
            setattr(site, name, value)
            yield f"{name} → {value}"
    site._change_reason = reason  # type: ignore[attr-defined]
    site.save()
