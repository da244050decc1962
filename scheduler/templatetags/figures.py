"""Figures with their units, and a dash where there is none."""

from __future__ import annotations

from django import template

register = template.Library()
NOTHING = "–"
NO_BREAK = "\N{NO-BREAK SPACE}"  # the unit stays with its figure


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
