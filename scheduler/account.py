"""What a user may know of the own standing: the share and why, limits, waits and their causes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet, Sum
from django.utils import timezone

from accounts.models import ApiKey, Quota, User
from scheduler import services, serving
from scheduler.causes import CAUSES
from scheduler.core.boosts import TimedFactor
from scheduler.core.views import ShareView
from scheduler.explain import wait_in_words
from scheduler.models import Decision, UsageHour
from scheduler.serving import LiveView
from scheduler.snapshot import Snapshot, load_snapshot

DAYS = 7
MOST_WAITS = 1_000  # of the latest requests, whose waits are looked at


def snapshot() -> Snapshot:
    """The configuration in force here; read from the database where nothing is served."""
    running = serving.current()
    return load_snapshot() if running is None else running.snapshot


def models_of(user: User, known: Snapshot) -> list[str]:
    """The models that the user may ask for now, by name."""
    allowed = known.allowed_models.get(user.pk)
    return sorted(name for name in known.listed_models if allowed is None or name in allowed)


# ---- the share


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A user's share and what it comes from. Shares are fractions 0..1; None: not known."""

    weight: float  # in force
    own_weight: float  # without boosts
    source: str  # of the weight, in words
    group: str | None
    boosts: tuple[TimedFactor, ...]
    by_group: bool  # the share mode (R14)
    is_live: bool  # the scheduler was asked
    queued: int = 0
    running: int = 0
    busy_users: int = 0  # others with waiting or running requests
    share: float | None = None  # now, or as if the user came now
    deficit: float | None = None  # tokens
    burst_credits: float = 0.0  # tokens
    factor: float = 1.0  # of a heavy user (R9)
    recent_tokens: float = 0.0
    recent_share: float | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self.queued or self.running)


def standing_of(user: User, view: LiveView | None, known: Snapshot) -> Standing | None:
    """None for a user that is not in force yet."""
    spec, plain = known.users.get(user.pk), known.unboosted.get(user.pk)
    if spec is None or plain is None:
        return None
    boosts = tuple(
        one
        for one in known.boosts_in_force
        if one.user_id == user.pk or (one.group_id and one.group_id == spec.group_id)
    )
    base: dict[str, Any] = {
        "weight": spec.weight,
        "own_weight": plain.weight,
        "source": _source(user),
        "group": spec.group_name,
        "boosts": boosts,
        "by_group": known.tunables.share_mode == "group" and spec.group_id is not None,
    }
    if view is None:
        return Standing(**base, is_live=False)
    mine = [one for one in view.shares if one.user_id == user.pk]
    active = [one for one in view.shares if one.queued or one.running]
    own = next((one for one in mine if one.unit == user.pk), None)
    total = view.stats.global_recent_tokens
    recent = sum(one.recent_tokens for one in mine)
    group_weight = spec.group_weight if base["by_group"] else None
    return Standing(
        **base,
        is_live=True,
        queued=sum(one.queued for one in mine),
        running=sum(one.running for one in mine),
        busy_users=len({one.user_id for one in active} - {user.pk}),
        share=share_among(active, user.pk, spec.weight, spec.group_name, group_weight),
        deficit=own.deficit if own else None,
        burst_credits=own.burst_credits if own else 0.0,
        factor=own.factor if own else 1.0,
        recent_tokens=recent,
        recent_share=recent / total if total > 0 else None,
    )


def share_among(
    active: Sequence[ShareView],
    user_id: int,
    weight: float,
    group: str | None,
    group_weight: float | None,
) -> float:
    """The user's fraction of what those with waiting or running requests get; without any, as if
    the user came now. ``group_weight`` in group mode: the newcomer then gets as much of it as each
    of the group's busy members."""
    mine = [one.weight for one in active if one.user_id == user_id]
    others = [one for one in active if one.user_id != user_id]
    together = sum(one.weight for one in others)
    if mine:
        weight = sum(mine)
    elif group_weight is not None:
        members = [one for one in others if one.group == group]
        weight = group_weight / (len(members) + 1)
        together += group_weight - sum(one.weight for one in members) - weight
    if weight + together > 0:
        return weight / (weight + together)
    return 1.0 / (len({one.user_id for one in others}) + 1)  # background only (R13)


def _source(user: User) -> str:
    quota = Quota.objects.filter(user=user).only("weight_override").first()
    if quota is not None and quota.weight_override is not None:
        return "a weight of your own"
    if user.group is None:
        return "you have no group, so the site's default counts"
    if user.group.scheduler_weight is None:
        return f"the site's default, as your group {user.group} has no weight"
    return f"the weight of your group {user.group}"


# ---- limits


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitLeft:
    """One limit. ``used`` (with what is reserved) and ``left`` are None where nothing counts."""

    name: str
    limit: float
    whose: str
    used: float | None = None
    left: float | None = None
    resets_at: str | None = None  # ISO 8601
    refuses: bool = True  # not where it is only tried out


_LIMIT_NAMES = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "max_concurrent": "requests at once, waiting or running",
    "max_queued": "requests waiting at once",
}


def limits_of(user: User, known: Snapshot) -> list[LimitLeft]:
    """The limits that are set for the user, the group as a whole and the user's keys."""
    names = dict(ApiKey.objects.filter(user=user, enabled=True).values_list("pk", "name"))
    whose = {("user", user.pk): "yours", ("group", user.group_id): f"all of group {user.group}"}
    whose |= {("key", pk): f"key {name}" for pk, name in names.items()}
    if serving.current() is None:
        found = list(_stored(known, whose))
    else:
        found = [_limit(one, whose) for one in services.limits_of(user, names)]
    spec = known.users.get(user.pk)
    longest = known.tunables.max_wait
    if spec is not None and spec.max_wait_seconds is not None:
        longest = spec.max_wait_seconds
    return [*found, LimitLeft(name="seconds in the queue", limit=longest, whose="each request")]


def _limit(one: Mapping[str, Any], whose: Mapping[tuple[str, Any], str]) -> LimitLeft:
    return LimitLeft(
        name=_LIMIT_NAMES.get(one["limit"], f"tokens per {one['period']}"),
        limit=one["value"],
        whose=whose.get((one["holder"], one["id"]), one["holder"]),
        used=one["used"] + one["reserved"],
        left=one["remaining"],
        resets_at=one["resets_at"],
        refuses=not one["shadow"],
    )


def _stored(known: Snapshot, whose: Mapping[tuple[str, Any], str]) -> Iterator[LimitLeft]:
    """As configured, where no scheduler runs to count."""
    for holder, limits in known.limits.items():
        if (title := whose.get((holder.kind, holder.ident))) is None:
            continue
        budget = f"tokens per {limits.budget_period}"
        for name in (*_LIMIT_NAMES, "token_budget"):
            value = getattr(limits, name)
            if value is not None:
                yield LimitLeft(
                    name=_LIMIT_NAMES.get(name, budget),
                    limit=value,
                    whose=title,
                    refuses=name not in limits.shadow,
                )


# ---- waits


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitCause:
    """Why requests waited, in words; seconds."""

    why: str
    requests: int
    total_seconds: float
    longest_seconds: float
    longest_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """The waits of the latest requests of the last days."""

    requests: int
    median_seconds: float | None
    p95_seconds: float | None
    longest_seconds: float | None
    causes: list[WaitCause]


def requests_of(user: User) -> QuerySet[Decision]:
    """The user's own, also those that came through a trusted key for others; newest first."""
    return Decision.objects.filter(user=user.username, user_id=user.pk)


def waits_of(user: User) -> Waits:
    """One query over at most ``MOST_WAITS`` rows."""
    since = timezone.now() - timedelta(days=DAYS)
    rows = requests_of(user).filter(arrived_at__gte=since, queued_at__isnull=False)
    columns = ("request_id", "wait_reason", "queued_at", "dispatched_at", "ended_at")
    found: list[tuple[float, str, str]] = []
    for request_id, why, queued, sent, ended in rows.values_list(*columns)[:MOST_WAITS]:
        found.append((_seconds(queued, sent or ended), why, request_id))
    return summary(found)


def _seconds(start: datetime, end: datetime | None) -> float:
    return 0.0 if end is None else max(0.0, (end - start).total_seconds())


def summary(waits: Sequence[tuple[float, str, str]]) -> Waits:
    """Of (seconds, wait reason, request id)."""
    seconds = sorted(one[0] for one in waits)
    by_reason: dict[str, list[tuple[float, str]]] = {}
    for waited, why, request_id in waits:
        if why not in ("", "none"):
            by_reason.setdefault(why, []).append((waited, request_id))
    causes = []
    for why, ones in by_reason.items():
        longest, request_id = max(ones)
        causes.append(
            WaitCause(
                why=wait_in_words(why),
                requests=len(ones),
                total_seconds=sum(one[0] for one in ones),
                longest_seconds=longest,
                longest_id=request_id,
            )
        )
    return Waits(
        requests=len(seconds),
        median_seconds=_quantile(seconds, 0.5),
        p95_seconds=_quantile(seconds, 0.95),
        longest_seconds=seconds[-1] if seconds else None,
        causes=sorted(causes, key=lambda one: -one.total_seconds),
    )


def _quantile(ordered: Sequence[float], part: float) -> float | None:
    """The least value that ``part`` of them do not exceed."""
    if not ordered:
        return None
    return ordered[math.ceil(part * len(ordered)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What was used in the last days."""

    requests: int
    tokens: int
    charged_tokens: float
    slow: list[tuple[str, int]]  # (why, how many), most first


def totals_of(user: User) -> Totals:
    """One query over the hourly totals."""
    since = timezone.now() - timedelta(days=DAYS)
    names = ("requests", "prompt_tokens", "completion_tokens", "charged_tokens")
    slow = {f"slow_{one}": words for one, words in CAUSES.items()}
    sums = UsageHour.objects.filter(user_id=user.pk, hour__gte=since).aggregate(
        **{f"sum_{name}": Sum(name) for name in (*names, *slow)}
    )
    counted = [(words, int(sums[f"sum_{name}"] or 0)) for name, words in slow.items()]
    return Totals(
        requests=int(sums["sum_requests"] or 0),
        tokens=int((sums["sum_prompt_tokens"] or 0) + (sums["sum_completion_tokens"] or 0)),
        charged_tokens=float(sums["sum_charged_tokens"] or 0),
        slow=sorted(((w, n) for w, n in counted if n), key=lambda one: -one[1]),
    )
