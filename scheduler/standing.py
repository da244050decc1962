"""Where the groups and the cluster stand: the scheduler's view, joined with the database."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.db.models import Count, Q
from django.utils import timezone

from accounts.models import Group
from backends.models import Backend
from scheduler.core.boosts import TimedFactor, multiplied
from scheduler.core.views import ShareView
from scheduler.core.weights import effective_weight
from scheduler.models import SiteSettings
from scheduler.serving import LiveView
from scheduler.snapshot import fallback_weights, load_boosts, setting_name


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """One group's standing. Shares are fractions 0..1; None where there is nothing to divide."""

    group_id: int | None  # None: the users without a group
    name: str
    weight: float  # in force: the group's own, or R13's fallback, times its boosts (R17)
    own_weight: float  # without boosts
    boosts: tuple[TimedFactor, ...]  # in force
    weight_is_fallback: bool
    members: int
    active_members: int | None  # users with waiting or running requests; None: no live figures
    entitled_all: float | None  # if each group had one busy user
    entitled_now: float | None  # among the groups that have waiting or running requests
    received: float | None  # of the tokens settled in the last fairness window (R9)
    recent_tokens: float | None
    queued: int | None
    running: int | None

    @property
    def key(self) -> str:
        """What the cells of this group are called in the page."""
        return "none" if self.group_id is None else str(self.group_id)


@dataclass(slots=True)
class _Activity:
    """What the shares of one group's users add up to."""

    weight: float = 0.0
    users: set[int] = field(default_factory=set)
    recent_tokens: float = 0.0
    queued: int = 0
    running: int = 0


def setting(name: str) -> Any:
    """A field of ``SiteSettings`` as it is in force: the saved value, else the environment's."""
    saved = SiteSettings.objects.filter(pk=1).values_list(name, flat=True).first()
    return getattr(settings, setting_name(name)) if saved is None else saved


def share_mode() -> str:
    """``user`` or ``group`` (R14)."""
    return str(setting("share_mode"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The cluster in a few figures. None: no scheduler runs in this process."""

    groups: int
    backends: int  # configured
    backends_ready: int | None
    busy_users: int | None
    queued: int | None
    running: int | None
    average_wait_seconds: float | None
    tokens_per_second: float | None  # over the fairness window
    window_seconds: float


def overview(view: LiveView | None) -> Overview:
    """What the first page shows, in three queries."""
    window = float(setting("fairness_window"))
    counts = {"groups": Group.objects.count(), "backends": Backend.objects.count()}
    if view is None:
        return Overview(
            **counts,
            backends_ready=None,
            busy_users=None,
            queued=None,
            running=None,
            average_wait_seconds=None,
            tokens_per_second=None,
            window_seconds=window,
        )
    return Overview(
        **counts,
        backends_ready=sum(one.state == "ready" for one in view.backends),
        busy_users=len({one.user_id for one in view.shares if one.queued or one.running}),
        queued=view.stats.queue_total,
        running=sum(one.in_flight for one in view.backends),
        average_wait_seconds=view.stats.average_wait_seconds,
        tokens_per_second=view.stats.global_recent_tokens / window,
        window_seconds=window,
    )


def group_figures(view: LiveView | None) -> list[GroupFigures]:
    """Every group by name, then the users without one if any is active.

    Three queries, however many groups and users there are.
    """
    groups = Group.objects.annotate(
        member_count=Count("members", filter=Q(members__is_active=True))
    ).order_by("name")
    ids = {group.name: group.pk for group in groups}
    activity = {} if view is None else _activity_by_group(view.shares, ids)
    mode = share_mode()
    boosts = boosts_by_group()
    own = {group.pk: own_weight(group) for group in groups}
    weights = {
        key: multiplied(weight, [one.factor for one in boosts.get(key, ())])
        for key, weight in own.items()
    }
    entitled_all = _fractions(weights)
    entitled_now = _entitled_now(activity, weights, mode)
    tokens = _fractions({key: one.recent_tokens for key, one in activity.items()})
    rows: list[tuple[int | None, str, bool, int]] = [
        (group.pk, group.name, group.scheduler_weight is None, group.member_count)
        for group in groups
    ]
    if None in activity:
        rows.append((None, "(no group)", True, 0))
    return [
        GroupFigures(
            group_id=key,
            name=name,
            weight=weights.get(key, 0.0) if key is not None else activity[None].weight,
            own_weight=own.get(key, 0.0) if key is not None else activity[None].weight,
            boosts=boosts.get(key, ()) if key is not None else (),
            weight_is_fallback=is_fallback,
            members=members,
            entitled_all=entitled_all.get(key),
            entitled_now=entitled_now.get(key),
            received=tokens.get(key, 0.0 if tokens else None),
            **_live_columns(view, activity.get(key)),
        )
        for key, name, is_fallback, members in rows
    ]


def boosts_by_group() -> dict[int, tuple[TimedFactor, ...]]:
    """{group id: its boosts that are in force}"""
    now = timezone.now().timestamp()
    found: dict[int, tuple[TimedFactor, ...]] = {}
    for one in load_boosts():
        if one.group_id is not None and one.in_force(now):
            found[one.group_id] = (*found.get(one.group_id, ()), one)
    return found


def own_weight(group: Group) -> float:
    """Without boosts: the group's weight, or R13's fallback."""
    own = group.scheduler_weight
    return effective_weight(
        override=None,
        group_weight=None if own is None else float(own),
        group_name=group.name,
        is_superuser=False,
        is_staff=False,
        fallbacks=fallback_weights(),
    )


def _live_columns(view: LiveView | None, activity: _Activity | None) -> dict[str, Any]:
    if view is None:
        return {"active_members": None, "recent_tokens": None, "queued": None, "running": None}
    activity = activity or _Activity()
    return {
        "active_members": len(activity.users),
        "recent_tokens": activity.recent_tokens,
        "queued": activity.queued,
        "running": activity.running,
    }


def _activity_by_group(
    shares: Iterable[ShareView], ids: Mapping[str, int]
) -> dict[int | None, _Activity]:
    """{group id: the shares of all its units together}; None: those without a known group."""
    found: dict[int | None, _Activity] = defaultdict(_Activity)
    for share in shares:
        one = found[ids.get(share.group) if share.group is not None else None]
        one.recent_tokens += share.recent_tokens
        one.queued += share.queued
        one.running += share.running
        if share.queued or share.running:
            one.users.add(share.user_id)
            one.weight += share.weight
    return dict(found)


def _entitled_now(
    activity: Mapping[int | None, _Activity], weights: Mapping[int, float], mode: str
) -> dict[int | None, float]:
    """{group id: fraction} of the groups with waiting or running requests (R14).

    In user mode a group gets the sum of its active users' weights, in group mode its own weight
    however many are active. Users without a group count by their own weights in both.
    """
    busy = {key: one for key, one in activity.items() if one.users}
    if mode == "group":
        claims = {
            key: weights.get(key, one.weight) if key else one.weight for key, one in busy.items()
        }
    else:
        claims = {key: one.weight for key, one in busy.items()}
    if claims and not any(claims.values()):  # only background work (R13): equal among its users
        claims = {key: float(len(one.users)) for key, one in busy.items()}
    return _fractions(claims)


def _fractions(parts: Mapping[Any, float]) -> dict[Any, float]:
    """Each part ÷ their sum; nothing where the sum is 0."""
    total = sum(parts.values())
    return {key: part / total for key, part in parts.items()} if total > 0 else {}
