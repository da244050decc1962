"""Warnings that a budget is nearly or wholly used, once for each period and mark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from accounts.limits import Holder, LimitSet, iso, period_bounds
from accounts.models import ApiKey, Group, User
from accounts.notices import managers, notify
from scheduler.budgets import load_limits, site_zone, used_since
from scheduler.models import BudgetWarning

#: Percent of a budget at which somebody is warned.
MARKS = (100, 80)


def warn_of_budgets(wall: float) -> int:
    """Warn of every budget that has newly reached a mark; returns how many there were.

    Told: a user, the owner of a key, and for a group or a model whoever manages people.
    """
    limits = load_limits({})
    by_start: dict[float, list[Holder]] = defaultdict(list)
    for holder, one in limits.items():
        if one.token_budget:
            by_start[period_bounds(wall, one.budget_period, site_zone())[0]].append(holder)
    count = 0
    for start, holders in by_start.items():
        for holder, used in used_since(start, holders).items():
            count += _warn(holder, limits[holder], start, used, wall)
    return count


def _warn(holder: Holder, limits: LimitSet, start: float, used: float, wall: float) -> bool:
    budget = limits.token_budget or 0
    mark = next((mark for mark in MARKS if used * 100 >= budget * mark), None)
    if mark is None:
        return False
    _, new = BudgetWarning.objects.get_or_create(
        kind=holder.kind, ident=str(holder.ident), start=start, percent=mark
    )
    if not new:
        return False
    whose, people = _whose(holder)
    end = period_bounds(wall, limits.budget_period, site_zone())[1]
    notify(
        "budget",
        f"{mark} % of the token budget of {whose} is used",
        f"Of the {budget} tokens per {limits.budget_period} of {whose}, {used:.15g} are used. "
        f"The budget begins anew at {iso(end, site_zone())}.",
        people,
    )
    return True


def _whose(holder: Holder) -> tuple[str, Iterable[User]]:
    match holder.kind:
        case "user":
            user = User.objects.get(pk=holder.ident)
            return f"user {user}", [user]
        case "key":
            key = ApiKey.objects.select_related("user").get(pk=holder.ident)
            return f"API key {key.name} of {key.user}", [key.user]
        case "group":
            return f"group {Group.objects.get(pk=holder.ident)}", managers()
    return f"model {holder.ident}", managers()
