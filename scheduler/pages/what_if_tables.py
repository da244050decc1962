"""A scenario's result as tables: before beside after. PURE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.what_if import Changes


@dataclass(frozen=True, slots=True)
class Line:
    """One group's or user's figures. Shares are fractions; waits seconds."""

    name: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    @property
    def refused_before(self) -> int:
        return _refused(self.before)

    @property
    def refused_after(self) -> int:
        return _refused(self.after)


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    lines: list[Line]
    bars: bool  # the shares are drawn, too


_NONE: Mapping[str, Any] = {
    "requests": 0, "served": 0, "left": 0, "refused": {}, "tokens": 0,
    "share": 0.0, "contended_share": None, "p50": 0.0, "p95": 0.0, "p99": 0.0,
}  # fmt: skip


def comparison(result: Mapping[str, Any] | None) -> list[Table]:
    """Of groups and of users; nothing where there is no result."""
    if result is None:
        return []
    before, after = result["before"], result["after"]
    everybody = Line("everybody", before["total"], after["total"])
    groups = [*_lines(before["groups"], after["groups"]), everybody]
    users = sorted(_lines(before["users"], after["users"]), key=lambda one: -one.before["tokens"])
    return [Table("Groups", groups, True), Table("Users", users, False)]


def _lines(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Line]:
    for name in sorted({*before, *after}):
        yield Line(name, before.get(name, _NONE), after.get(name, _NONE))


def utilisation(result: Mapping[str, Any] | None) -> list[tuple[str, float | None, float | None]]:
    """(backend, before, after), fractions of its slots' time."""
    if result is None:
        return []
    before, after = result["before"]["utilisation"], result["after"]["utilisation"]
    return [(name, before.get(name), after.get(name)) for name in sorted({*before, *after})]


def _refused(figures: Mapping[str, Any]) -> int:
    return sum(figures["refused"].values())


def changed(
    changes: Changes, groups: Mapping[str, str], backends: Mapping[str, str]
) -> list[tuple[str, str]]:
    """What a scenario changes, in words: (what, to what)."""
    said = [
        (f"weight of {groups.get(key, f'group {key}')}", value or "unset")
        for key, value in changes.groups.items()
    ]
    said += [
        (f"weight of user {name}", value or "no override") for name, value in changes.users.items()
    ]
    if changes.share_mode:
        said.append(("share mode", changes.share_mode))
    said += [
        (f"slots of {backends.get(key, f'backend {key}')}", str(value) if value else "none")
        for key, value in changes.slots.items()
    ]
    said += [("backend added", f"{name}, like {like}") for name, like in changes.added.items()]
    said += [
        (f"points for {name.removeprefix('score_').replace('_', ' ')}", f"{value:g}")
        for name, value in changes.points.items()
    ]
    return said
