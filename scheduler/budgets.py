"""Limits as they are configured, and what has been used of budgets so far, from the database."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, Q, QuerySet, Sum

from accounts.limits import Holder, Kind, LimitSet, Period
from accounts.models import ApiKey, Group, Limits, ModelLimits, Quota, User
from scheduler.core.jobs import ModelSpec
from scheduler.loading import Charge, charges_to_load
from scheduler.models import Decision, UsageHour
from scheduler.usage import HOUR_SECONDS

_LIMITED = (
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent",
    "token_budget",
    "budget_period",
)
#: What a record is counted under, by kind of holder.
_COLUMNS: Mapping[Kind, str] = {
    "key": "key_id",
    "user": "user_id",
    "group": "group",
    "model": "model_served",
}
_HOURLY = {**_COLUMNS, "model": "model"}
_Totals = dict[tuple[Kind, Any], float]  # {(kind, as stored): tokens charged}


# ---- what is configured


def load_limits(models: Mapping[str, ModelSpec]) -> dict[Holder, LimitSet]:
    """{holder: its limits} of all that have any. Of users: the quota's, else the group's."""
    found: dict[Holder, LimitSet] = {}
    by_group = {group.pk: group for group in Group.objects.all()}
    for group in by_group.values():
        _add(found, Holder("group", group.pk), _of_group(group))
    shared = {key: _limit_set(group) for key, group in by_group.items()}
    quotas = {quota.user_id: quota for quota in Quota.objects.all()}
    users = User.objects.filter(is_active=True).values_list("pk", "group_id")
    for user_id, group_id in users:
        quota = quotas.get(user_id)
        if quota is not None:
            _add(found, Holder("user", user_id), _of_quota(quota, by_group.get(group_id or 0)))
        elif group_id in shared:
            _add(found, Holder("user", user_id), shared[group_id])
    for key in ApiKey.objects.filter(enabled=True, user__is_active=True):
        _add(found, Holder("key", key.pk), _limit_set(key, queue=True))
    for row in ModelLimits.objects.all():
        _add(found, model_holder(row.model_name, models), _limit_set(row, queue=True))
    return found


def model_holder(name: str, models: Mapping[str, ModelSpec]) -> Holder:
    """A model under the name that its backends give it, whatever it was asked for as."""
    spec = models.get(name)
    return Holder("model", name if spec is None else spec.name)


def _add(found: dict[Holder, LimitSet], holder: Holder, limits: LimitSet) -> None:
    if not limits.is_empty:
        found[holder] = limits


def _limit_set(*holders: Limits | None, queue: bool = False) -> LimitSet:
    """The first holder's values, and the next one's where it has none; each is in shadow where the
    holder that has it is."""
    values = {name: first_given(name, holders) for name in _LIMITED}
    shadow = {name for name in _LIMITED if _is_in_shadow(name, holders)}
    if queue:
        values["max_queued"] = first_given("max_queued", holders)
        shadow |= {"max_queued"} if _is_in_shadow("max_queued", holders) else set()
    values["budget_period"] = values["budget_period"] or "day"
    return LimitSet(**values, shadow=frozenset(shadow))


def _of_quota(quota: Quota, group: Group | None) -> LimitSet:
    """The scheduler itself keeps the bound of a user's waiting requests, unless it is in shadow."""
    limits = _limit_set(quota, group)
    if not quota.limits_shadow:
        return limits
    return replace(limits, max_queued=quota.max_queued, shadow=limits.shadow | {"max_queued"})


def _of_group(group: Group) -> LimitSet:
    """Of all its members together. The bound of those that wait is here only in shadow."""
    values = {name: getattr(group, f"total_{name}") for name in _LIMITED}
    values["budget_period"] = values["budget_period"] or "day"
    if not group.limits_shadow:
        return LimitSet(**values)
    return LimitSet(
        **values, max_queued=group.max_queued, shadow=frozenset({*_LIMITED, "max_queued"})
    )


def first_given(name: str, holders: Iterable[Limits | None]) -> Any:
    """The value of the first holder that has one. 0 is a value."""
    return getattr(_first_with(name, holders), name, None)


def in_force(name: str, holders: Iterable[Limits | None]) -> Any:
    """The same; None where it is in shadow, as its holder is."""
    holder = _first_with(name, holders)
    return None if holder is None or holder.limits_shadow else getattr(holder, name)


def _is_in_shadow(name: str, holders: Iterable[Limits | None]) -> bool:
    holder = _first_with(name, holders)
    return holder is not None and holder.limits_shadow


def _first_with(name: str, holders: Iterable[Limits | None]) -> Limits | None:
    given = (one for one in holders if one is not None and getattr(one, name) is not None)
    return next(given, None)


# ---- what is used


def site_zone() -> ZoneInfo:
    """Whose calendar budgets follow."""
    return ZoneInfo(settings.TIME_ZONE)


def used_since(start: float, holders: Iterable[Holder]) -> dict[Holder, float]:
    """{holder: tokens charged} to the stored requests that came since ``start``, epoch seconds.

    Raises: DatabaseError.
    """
    wanted = list(holders)
    names = _group_names(wanted)
    totals = _totals({holder.kind for holder in wanted}, start)
    return {holder: totals.get((holder.kind, _stored(holder, names)), 0.0) for holder in wanted}


def load_used(
    wanted: Mapping[tuple[Holder, Period], float],
    before: float,
    under_way: Collection[str],
    directory: Path,
) -> dict[tuple[Holder, Period], tuple[float, float]]:
    """{(holder, period): (its start, tokens charged in it)}, for ``wanted`` starts.

    Of the requests that came ``before`` then and are not ``under_way``, stored or still in the
    spool. A request counts in the period in which it came. Raises: DatabaseError.
    """
    names = _group_names(holder for holder, _ in wanted)
    totals: dict[float, _Totals] = {}
    waiting: dict[float, _Totals] = {start: defaultdict(float) for start in wanted.values()}
    with transaction.atomic():
        if connection.vendor == "postgresql":  # one picture: what is loaded meanwhile counts once
            connection.cursor().execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        for charge in chain.from_iterable(charges_to_load(directory)):
            if charge.arrived_at < before and charge.request_id not in under_way:
                _count(waiting, charge)
        for start in waiting:
            kinds = {holder.kind for (holder, _), begun in wanted.items() if begun == start}
            totals[start] = _totals(kinds, start)
            _take_away(totals[start], kinds, start, before, under_way)
    found = {}
    for (holder, period), start in wanted.items():
        counted = holder.kind, _stored(holder, names)
        used = totals[start].get(counted, 0.0) + waiting[start].get(counted, 0.0)
        found[holder, period] = start, max(0.0, used)
    return found


def _group_names(holders: Iterable[Holder]) -> dict[int, str]:
    """{number: name}, as records and totals name groups."""
    if all(holder.kind != "group" for holder in holders):
        return {}
    return dict(Group.objects.values_list("pk", "name"))


def _stored(holder: Holder, names: Mapping[int, str]) -> Any:
    return names.get(int(holder.ident)) if holder.kind == "group" else holder.ident


def _totals(kinds: Iterable[Kind], start: float) -> _Totals:
    """From the hourly totals, which outlive the decisions; of a zone whose days do not begin with
    an hour of UTC, the first part of an hour is from the decisions."""
    full = datetime.fromtimestamp(math.ceil(start / HOUR_SECONDS) * HOUR_SECONDS, UTC)
    begun = datetime.fromtimestamp(start, UTC)
    totals: _Totals = defaultdict(float)
    for kind in kinds:
        _add_up(totals, kind, UsageHour.objects.filter(hour__gte=full), _HOURLY[kind])
        if begun < full:
            rows = Decision.objects.filter(arrived_at__gte=begun, arrived_at__lt=full)
            _add_up(totals, kind, rows, _COLUMNS[kind])
    return totals


def _add_up(
    totals: _Totals, kind: Kind, rows: QuerySet[Any], column: str, sign: float = 1.0
) -> None:
    charged = rows.exclude(charged_tokens=0).order_by()
    for row in charged.values(ident=F(column)).annotate(sum=Sum("charged_tokens")):
        totals[kind, row["ident"]] += sign * row["sum"]


def _take_away(
    totals: _Totals, kinds: Iterable[Kind], start: float, before: float, under_way: Collection[str]
) -> None:
    """What came later or was under way, and is counted by the one who asks."""
    begun, since = datetime.fromtimestamp(start, UTC), datetime.fromtimestamp(before, UTC)
    later = Q(arrived_at__gte=since) | Q(request_id__in=under_way, arrived_at__gte=begun)
    for kind in kinds:
        _add_up(totals, kind, Decision.objects.filter(later), _COLUMNS[kind], -1.0)


def _count(totals: Mapping[float, _Totals], charge: Charge) -> None:
    for start, used in totals.items():
        if charge.arrived_at >= start:
            for kind, column in _COLUMNS.items():
                used[kind, getattr(charge, column)] += charge.charged_tokens
