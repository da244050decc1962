"""The tables on one decision: its timeline, the backends' constraints and points, the priority.

PURE, like ``explain``: values in, texts and figures out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.explain import Case, number

#: Names of constraints that do not speak for themselves.
_CONSTRAINTS = {"enabled": "in service", "memory_fit": "memory"}


# ---- the timeline


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the timeline. ``left`` and ``width`` are per cent of the whole."""

    name: str
    kind: str  # of the moment it starts with
    seconds: float
    left: float
    width: float


@dataclass(frozen=True, slots=True)
class Moment:
    name: str
    at: float  # epoch seconds
    after: float  # seconds since arrival


_MOMENTS = {
    "arrived": ("arrived", "before the queue"),
    "queued": ("queued", "in the queue"),
    "dispatched": ("sent to the backend", "until the first byte"),
    "first_byte": ("first byte", "until the first token"),
    "first_token": ("first token", "answer"),
    "ended": ("ended", ""),
}


def moments(case: Case) -> list[Moment]:
    """The known moments in order; a clock that was set back shows as no time passed."""
    found: list[Moment] = []
    latest = start = case.arrived_at
    for kind, (name, _) in _MOMENTS.items():
        at = getattr(case, f"{kind}_at")
        if at is None or latest is None or start is None:
            continue
        latest = max(at, latest)
        found.append(Moment(name, latest, latest - start))
    return found


def timeline(case: Case) -> list[Part]:
    """What lies between the moments, to scale."""
    points = moments(case)
    total = points[-1].after if points else 0.0
    kinds = {name: (kind, between) for kind, (name, between) in _MOMENTS.items()}
    parts = []
    for start, end in itertools.pairwise(points):
        kind, between = kinds[start.name]
        seconds = end.after - start.after
        scale = 100 / total if total > 0 else 0.0
        parts.append(Part(between, kind, seconds, start.after * scale, seconds * scale))
    return parts


# ---- tables


@dataclass(frozen=True, slots=True)
class Checked:
    """A backend and the hard constraints that it failed (P1); none: it was a candidate."""

    name: str
    selected: bool
    failures: list[str]


def constraints(case: Case) -> list[Checked]:
    """Every backend that was looked at: the chosen one, the other candidates, then the rest."""
    ids = [str(key) for key in case.candidate_backends]
    ids += [key for key in case.constraints if key not in ids]
    chosen = str(case.selected_backend_id)
    rows = [
        Checked(case.name_of(key), key == chosen, _failures(case.constraints.get(key) or {}))
        for key in ids
    ]
    return sorted(rows, key=lambda row: (not row.selected, bool(row.failures), row.name))


def _failures(failed: Mapping[str, Any]) -> list[str]:
    texts = []
    for name, detail in failed.items():
        text = _CONSTRAINTS.get(name, name.replace("_", " "))
        texts.append(f"{text}: {shown}" if (shown := _detail(detail)) else text)
    return texts


def _detail(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return ""
    return number(value) if isinstance(value, int | float) else str(value)


@dataclass(frozen=True, slots=True)
class Scores:
    """Points by part (rows) and backend (columns), the chosen backend first (P2)."""

    backends: list[str]
    rows: list[tuple[str, list[str]]]
    totals: list[str]


def scores(case: Case) -> Scores | None:
    """The score table, or None where nothing was scored."""
    if not case.scores:
        return None
    chosen = str(case.selected_backend_id)
    ids = sorted(case.scores, key=lambda key: (key != chosen, -case.scores[key]))
    names = list(dict.fromkeys(name for key in ids for name in case.score_parts.get(key, {})))
    return Scores(
        [case.name_of(key) for key in ids],
        [
            (
                name.replace("_", " "),
                [number(case.score_parts.get(key, {}).get(name)) for key in ids],
            )
            for name in names
        ],
        [number(case.scores[key]) for key in ids],
    )


@dataclass(frozen=True, slots=True)
class Term:
    """One part of the priority, under the name that the rules use."""

    name: str
    value: str
    unit: str


def priority_terms(case: Case) -> list[Term]:
    """The parts of the priority as they were at the choice; empty where there was none."""
    if case.priority is None:
        return []
    return [
        Term("deficit", number(case.user_deficit), "tokens"),
        Term("burst_credits", number(case.burst_credits), "tokens"),
        Term("weight", number(case.user_weight, 6), ""),
        Term("deprioritization_factor", number(case.deprioritization_factor, 3), ""),
        Term("wait_bonus", number(case.wait_bonus), "tokens"),
        Term("priority", number(case.priority), "tokens per unit of weight"),
    ]


def priority_formula(case: Case) -> str:
    """The sum with its numbers; a negative base is divided by the factor (R9)."""
    if case.priority is None or case.user_deficit is None:
        return ""
    base = case.user_deficit + (case.burst_credits or 0)
    sign = "×" if base >= 0 else "÷"
    weight = case.user_weight or 1  # weight 0 divides by 1 (R13)
    factor = 1.0 if case.deprioritization_factor is None else case.deprioritization_factor
    return (
        f"({number(case.user_deficit)} + {number(case.burst_credits or 0)}) ÷ {number(weight, 6)}"
        f" {sign} {number(factor, 3)} + {number(case.wait_bonus or 0)} = {number(case.priority)}"
    )
