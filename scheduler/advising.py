"""Database → the picture of the site that ``advice`` looks at, and where each thing is mended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from django.db.models import Count, Q
from django.urls import reverse
from django.utils import timezone

from accounts.limits import Holder
from accounts.models import ApiKey, Boost, Group, Quota, User
from backends.models import Alias, Backend, ModelStrategy
from scheduler.advice import (
    Advice,
    SeenBackend,
    SeenBoost,
    SeenGroup,
    SeenKey,
    Site,
    advise,
)
from scheduler.snapshot import Snapshot, load_snapshot
from scheduler.standing import own_weight, setting


def advice() -> list[Advice]:
    """What is worth a look now. A fixed number of queries, whatever there is."""
    return advise(site())


def address(one: Advice) -> str:
    """The admin page on which it is mended."""
    name = one.kind.replace(".", "_")
    if one.row is None:
        return reverse(f"admin:{name}_changelist")
    return reverse(f"admin:{name}_change", args=[one.row])


def as_json(one: Advice) -> dict[str, Any]:
    """All that is known of it, with its page."""
    return {**asdict(one), "url": address(one)}


def site() -> Site:
    known = load_snapshot()
    now = timezone.now()
    names = dict(User.objects.filter(is_active=True).values_list("pk", "username"))
    groups = list(_groups())
    ungrouped = User.objects.filter(is_active=True, group=None, is_superuser=False)
    return Site(
        now=now.timestamp(),
        stale_after=float(setting("backend_stale_after")),
        groups=groups,
        backends=list(_backends(known)),
        aliases={one.name: (one.pk, tuple(one.targets)) for one in Alias.objects.all()},
        strategies=dict(ModelStrategy.objects.values_list("model_name", "pk")),
        keys=[
            SeenKey(key_id=pk, name=name, username=username, expires_at=at.timestamp())
            for pk, name, username, at in ApiKey.objects.filter(
                enabled=True, user__is_active=True, expires_at__isnull=False
            ).values_list("pk", "name", "user__username", "expires_at")
            if at is not None
        ],
        boosts=list(_boosts(known, {one.group_id: one.weight for one in groups})),
        ungrouped=sorted(ungrouped.values_list("username", flat=True)),
        limits=known.limits,
        limit_rows=_limit_rows(),
        open_to=setting("open_to"),
        usernames=frozenset(names.values()),
    )


def _groups() -> Iterator[SeenGroup]:
    active = Count("members", filter=Q(members__is_active=True))
    for group in Group.objects.annotate(member_count=active).order_by("name"):
        yield SeenGroup(
            group_id=group.pk,
            name=group.name,
            weight=own_weight(group),
            has_weight=group.scheduler_weight is not None,
            members=group.member_count,
            allowed_models=group.allowed_models,
        )


def _backends(known: Snapshot) -> Iterator[SeenBackend]:
    specs = {spec.backend_id: spec for spec in known.backends}
    for backend in Backend.objects.select_related("status").defer("api_key").order_by("name"):
        status = getattr(backend, "status", None)
        spec = specs.get(backend.pk)
        yield SeenBackend(
            backend_id=backend.pk,
            name=backend.name,
            is_open=backend.enabled and not backend.draining and not backend.paused,
            max_concurrent=backend.max_concurrent,
            models=frozenset(spec.models if spec is not None else ()),
            age_seconds=None if status is None else status.age_seconds,
            engine_slots=None if status is None else status.slots,
            engine_waiting=None if status is None else status.waiting,
        )


def _boosts(known: Snapshot, weights: dict[int, float]) -> Iterator[SeenBoost]:
    for boost in Boost.objects.filter(ends_at__gt=timezone.now()).order_by("name"):
        if boost.group_id is not None:
            weight = weights.get(boost.group_id, 0.0)
        else:
            spec = known.unboosted.get(boost.user_id or 0)
            weight = 0.0 if spec is None else spec.weight
        yield SeenBoost(boost_id=boost.pk, name=boost.name, weight=weight)


def _limit_rows() -> dict[Holder, tuple[str, str, int]]:
    """{holder: (name, model, row)} of limits that are set on a row of their own; a member's that
    come from the group are told of once, by the group's users' quota or not at all."""
    quotas = Quota.objects.values_list("user_id", "user__username", "pk")
    keys = ApiKey.objects.filter(enabled=True).values_list("pk", "name", "user__username")
    return {
        Holder("user", user): (f"user {name}", "accounts.quota", pk) for user, name, pk in quotas
    } | {
        Holder("group", pk): (f"group {name}", "accounts.group", pk)
        for pk, name in Group.objects.values_list("pk", "name")
    } | {
        Holder("key", pk): (f"key {name} of {user}", "accounts.apikey", pk)
        for pk, name, user in keys
    }  # fmt: skip
