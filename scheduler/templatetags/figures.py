"""Figures with their units, and a dash where there is none."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal

from django import template
from django.utils import timezone

from accounts.forms import weight_text
from scheduler.explain import NO_BREAK, NOTHING, duration

register = template.Library()
register.filter("duration", duration)


@register.filter
def percent(fraction: float | None) -> str:
    """0.5 as "50 %", 0.333 as "33.3 %"."""
    if fraction is None:
        return NOTHING
    text = f"{fraction * 100:.1f}"
    return text.removesuffix(".0") + NO_BREAK + "%"


@register.filter
def figure(number: float | None) -> str:
    """12345.6 as "12,346"."""
    return NOTHING if number is None else f"{number:,.0f}"


@register.filter
def clock(moment: float | str | None) -> str:
    """Epoch seconds or ISO text as the time of day in the site's time zone."""
    if moment is None:
        return NOTHING
    if isinstance(moment, str):
        local = timezone.localtime(datetime.fromisoformat(moment))
    else:
        local = timezone.localtime(datetime.fromtimestamp(moment, UTC))
    return local.strftime("%H:%M:%S.") + f"{local.microsecond // 1000:03}"


@register.filter
def tokens(number: float | None) -> str:
    """-1234.5 as "−1,234"; tenths only below 10, and no sign before nothing."""
    if number is None:
        return NOTHING
    text = f"{abs(number):,.1f}" if abs(number) < 9.95 else f"{abs(number):,.0f}"
    text = text.removesuffix(".0")
    return f"−{text}" if number < 0 and text != "0" else text


@register.filter
def percent_value(fraction: float | None) -> str:
    """0.333 as "33.30", for widths; within 0 and 100, and 0 for nothing."""
    return f"{min(1.0, max(0.0, fraction or 0.0)) * 100:.2f}"


@register.filter
def gib(mib: float | None) -> str:
    """24576 MiB as "24 GiB"."""
    return NOTHING if mib is None else f"{mib / 1024:.1f}".removesuffix(".0") + NO_BREAK + "GiB"


@register.filter
def watt_hours(number: float | None) -> str:
    """1234.5 as "1.2 kWh", 0.0456 as "0.046 Wh"."""
    if number is None:
        return NOTHING
    if number >= 1000:
        return f"{number / 1000:,.1f}{NO_BREAK}kWh"
    return f"{_short(number)}{NO_BREAK}Wh"


@register.filter
def money(amount: Decimal | float | None) -> str:
    """1234.5 as "1,234.50", 0.000042 as "0.000042"."""
    if amount is None:
        return NOTHING
    return f"{amount:,.2f}" if amount >= 1 or not amount else _short(float(amount))


def _short(number: float) -> str:
    """Two digits that count, and never an exponent."""
    if number >= 10 or number == 0:
        return f"{number:,.0f}"
    digits = max(0, 1 - math.floor(math.log10(number)))
    return f"{number:.{min(digits, 9)}f}".rstrip("0").removesuffix(".")


@register.filter
def weight(value: Decimal | float | None) -> str:
    """3.500000 as "3.5"."""
    return weight_text(value) or NOTHING


@register.filter
def moment(at: float | datetime) -> str:
    """Epoch seconds as "Fri 4 Dec 18:00 UTC", in the viewer's zone."""
    at = datetime.fromtimestamp(at, UTC) if isinstance(at, int | float) else at
    local = timezone.localtime(at)
    return f"{local:%a} {local.day} {local:%b %H:%M %Z}"


@register.filter
def iso_moment(text: str | None) -> str:
    """ISO 8601 as ``moment``."""
    return moment(datetime.fromisoformat(text)) if text else NOTHING
