"""What has been used, from the exact hourly totals, and what it costs by the models' prices."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

from django.conf import settings
from django.db.models import F, QuerySet, Sum
from django.db.models.functions import TruncDay

from accounts.models import ApiKey, User
from scheduler.models import Decision, ModelPrice, UsageHour

By = Literal["user", "group", "model", "key", "hour", "day"]
BYS: tuple[By, ...] = ("user", "group", "model", "key", "hour", "day")
COUNTS = (
    "requests",
    "completed",
    "refused",
    "cancelled",
    "failed",
    "aborted",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "estimated_tokens",
    "charged_tokens",
    "estimated_energy_wh",
)
_MILLION = Decimal(1_000_000)
_COLUMN = {"user": "user_id", "group": "group", "model": "model", "key": "key_id", "hour": "hour"}


def totals(
    by: By, since: datetime, until: datetime, *, user_id: int | None = None
) -> list[dict[str, Any]]:
    """One row for each user, group, model, key, hour or day, in their order.

    Rows: {by: its name, **COUNTS, "cost", "estimated_energy_cost"}. Costs are in
    ``settings.CURRENCY``; ``cost`` is None where one of the models that were used has no price, the
    energy's where energy has none. Of whole hours (UTC); days are the site's.
    """
    rows = UsageHour.objects.filter(hour__gte=since, hour__lt=until)
    if user_id is not None:
        rows = rows.filter(user_id=user_id)
    found: dict[Any, dict[str, Any]] = {}
    costs: dict[Any, Decimal | None] = defaultdict(Decimal)
    prices = {price.model_name: price for price in ModelPrice.objects.all()}
    for row in _summed(rows, by):
        key = row["key"]
        total = found.setdefault(key, {by: key, **dict.fromkeys(COUNTS, 0)})
        for name in COUNTS:
            total[name] += row[name]
        before, cost = costs[key], _cost(row, prices.get(row["model"]))
        costs[key] = None if before is None or cost is None else before + cost
    names = _names(by, found)
    for key, total in found.items():
        total[by] = names.get(key, key)
        cost = costs[key]
        total["cost"] = None if cost is None or not prices else float(round(cost, 6))
        total["estimated_energy_cost"] = energy_cost(total["estimated_energy_wh"])
    return sorted(found.values(), key=lambda total: str(total[by]))


def _summed(rows: QuerySet[UsageHour], by: By) -> Any:
    """By what is asked for, and by model, which has the price."""
    key: Any = TruncDay("hour") if by == "day" else F(_COLUMN[by])
    keyed = rows.annotate(key=key).order_by().values("key", "model")
    return keyed.annotate(**{name: Sum(name) for name in COUNTS})


def _cost(row: dict[str, Any], price: ModelPrice | None) -> Decimal | None:
    if not row["prompt_tokens"] and not row["completion_tokens"]:
        return Decimal()
    if price is None:
        return None
    cached = min(row["cached_tokens"], row["prompt_tokens"])
    of_cached = price.prompt if price.cached is None else price.cached
    cost: Decimal = (
        price.prompt * (row["prompt_tokens"] - cached)
        + of_cached * cached
        + price.completion * row["completion_tokens"]
    )
    return cost / _MILLION


def energy_cost(watt_hours: float) -> float | None:
    """In ``settings.CURRENCY``; None: energy has no price."""
    price = settings.ENERGY_PRICE
    return None if price is None else round(watt_hours / 1000.0 * float(price), 6)


def cost_of(request: Decision) -> Decimal | None:
    """What one request's tokens cost; None: its model has no price."""
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
    tokens = {name: getattr(request, name) or 0 for name in names}
    price = ModelPrice.objects.filter(model_name=request.model_served).first()
    return None if price is None else _cost(tokens, price)


def _names(by: By, found: dict[Any, Any]) -> dict[Any, str]:
    """What numbers are called today; who is gone keeps the number."""
    if by == "user":
        return dict(User.objects.values_list("pk", "username"))
    if by == "key":
        keys = ApiKey.objects.select_related("user")
        return {key.pk: f"{key.user}: {key.name}" for key in keys}
    if by in ("hour", "day"):
        return {key: key.isoformat() for key in found}
    return {}


def currency() -> str:
    return str(settings.CURRENCY)
