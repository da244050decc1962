"""R13: the weight of a user's share."""

from __future__ import annotations

from collections.abc import Mapping

MAXIMUM_WEIGHT = 1e9

#: What the deprecated environment variables say when they are not set.
DEFAULT_FALLBACKS: Mapping[str, float] = {
    "student": 1.0,
    "staff": 2.0,
    "faculty": 3.0,
    "admin": 10.0,
}


def checked_weight(weight: float) -> float:
    """``weight`` itself, if it may be used. Raises: ValueError for NaN, negative or too large."""
    if not 0 <= weight <= MAXIMUM_WEIGHT:  # NaN compares false, so it is refused as well
        raise ValueError(f"A weight must lie between 0 and {MAXIMUM_WEIGHT:g}, not {weight!r}.")
    return float(weight)


def effective_weight(
    *,
    override: float | None,
    group_weight: float | None,
    group_name: str | None,
    is_superuser: bool,
    is_staff: bool,
    fallbacks: Mapping[str, float] = DEFAULT_FALLBACKS,
) -> float:
    """The user's own weight, else the group's, else the environment's fallback.

    ``fallbacks`` is keyed by student, staff, faculty and admin. A group of any other name weighs
    1; a user without a group is taken for admin, staff or student by the account's flags.
    A weight of 0 means background. Raises: ValueError. Source: rule R13.
    """
    if override is not None:
        return checked_weight(override)
    if group_weight is not None:
        return checked_weight(group_weight)
    if group_name is not None:
        return checked_weight(_fallback(group_name.lower(), fallbacks))
    if is_superuser:
        return checked_weight(_fallback("admin", fallbacks))
    return checked_weight(_fallback("staff" if is_staff else "student", fallbacks))


def _fallback(name: str, fallbacks: Mapping[str, float]) -> float:
    return fallbacks.get(name, DEFAULT_FALLBACKS.get(name, 1.0))
