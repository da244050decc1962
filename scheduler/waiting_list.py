"""The queue as a list: in order of service, sorted, filtered, and only the rows that are shown.

PURE: a picture of the queue in, rows out; no Django, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.core.jobs import end_user_of, is_background_call
from scheduler.core.picture import FlowPicture

#: A page holds no more rows than this, however many wait.
WINDOW_ROWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """What is to be seen. An empty text lets everything pass."""

    user: str = ""  # a part of the name
    group: str = ""  # the whole name
    model: str = ""

    def passes(self, flow: FlowPicture) -> bool:
        return (
            self.user.lower() in flow.username.lower()
            and (not self.group or self.group == (flow.group or NO_GROUP))
            and (not self.model or self.model == flow.model_name)
        )


NO_GROUP = "(no group)"


@dataclass(frozen=True, slots=True)
class Row:
    """One waiting job. Seconds; tokens as in ``FlowPicture``."""

    request_id: str
    position: int  # among those that compete for the same backends
    waited_seconds: float
    estimate_seconds: float | None
    flow: FlowPicture

    @property
    def end_user(self) -> str | None:
        """Who is behind a trusted key (R15)."""
        return end_user_of(self.flow.unit)

    @property
    def is_background_call(self) -> bool:
        return is_background_call(self.flow.unit)


@dataclass(frozen=True, slots=True)
class Window:
    """The rows from ``start`` on, and how many there are."""

    rows: Sequence[Row]
    start: int
    matching: int
    total: int
    groups: Mapping[str, int]  # {name: waiting jobs}
    models: Mapping[str, int]

    @property
    def end(self) -> int:
        """The number of the last row shown, from 1."""
        return self.start + len(self.rows)


#: (pool, request id, position, enqueued at, flow)
_Place = tuple[int, str, int, float, FlowPicture]

#: What rows may be sorted by. All but texts and ``position`` begin with the highest.
SORTS: Mapping[str, Callable[[_Place], Any]] = {
    "position": lambda place: (place[2], place[3]),
    "waited": lambda place: place[3],
    "user": lambda place: (place[4].username, place[2]),
    "group": lambda place: (place[4].group or NO_GROUP, place[2]),
    "model": lambda place: (place[4].model_name, place[2]),
    "priority": lambda place: (-place[4].priority, place[2]),
    "deficit": lambda place: (-place[4].deficit, place[2]),
    "weight": lambda place: (-place[4].weight, place[2]),
}


def window(
    flows: Sequence[FlowPicture],
    now: float,
    *,
    wanted: Filter | None = None,
    sort: str = "position",
    descending: bool = False,
    start: int = 0,
) -> Window:
    """At most ``WINDOW_ROWS`` of the jobs, by one of ``SORTS``; ``now`` as in the flows.

    ``descending`` turns the order around. O(jobs · log jobs).
    """
    wanted = wanted or Filter()
    kept = [place for place in _in_order(flows) if wanted.passes(place[4])]
    kept.sort(key=SORTS[sort], reverse=descending)
    start = max(0, min(start, (len(kept) - 1) // WINDOW_ROWS * WINDOW_ROWS))
    return Window(
        rows=[_row(place, now) for place in kept[start : start + WINDOW_ROWS]],
        start=start,
        matching=len(kept),
        total=sum(len(flow.jobs) for flow in flows),
        groups=_count((flow.group or NO_GROUP, len(flow.jobs)) for flow in flows),
        models=_count((flow.model_name, len(flow.jobs)) for flow in flows),
    )


def own_rows(
    flows: Sequence[FlowPicture], now: float, user_id: int
) -> list[tuple[Row, dict[str, int]]]:
    """A user's jobs in order and, for each, {group: jobs that are served before it}."""
    found: list[tuple[Row, dict[str, int]]] = []
    ahead: Counter[str] = Counter()
    for place in _in_order(flows):
        flow = place[4]
        if place[2] == 1:  # another pool begins
            ahead.clear()
        if flow.user_id == user_id and len(found) < WINDOW_ROWS:
            found.append((_row(place, now), dict(ahead)))
        ahead[flow.group or NO_GROUP] += 1
    return found


def _in_order(flows: Iterable[FlowPicture]) -> list[_Place]:
    """Every job with its place among those of its pool, background last (R13)."""
    keyed = [
        (flow.pool, flow.weight == 0.0, flow.first + i * flow.step, number, at, request_id, flow)
        for flow in flows
        for i, (number, at, request_id) in enumerate(flow.jobs)
    ]
    keyed.sort(key=lambda entry: entry[:4])
    places: list[_Place] = []
    pool, position = -1, 0
    for entry in keyed:
        position = position + 1 if entry[0] == pool else 1
        pool = entry[0]
        places.append((pool, entry[5], position, entry[4], entry[6]))
    return places


def _row(place: _Place, now: float) -> Row:
    _, request_id, position, enqueued_at, flow = place
    rate = flow.per_second
    return Row(
        request_id=request_id,
        position=position,
        waited_seconds=max(0.0, now - enqueued_at),
        estimate_seconds=position / rate if rate else None,
        flow=flow,
    )


def _count(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, jobs in pairs:
        counts[name] += jobs
    return dict(sorted(counts.items()))
