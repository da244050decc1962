"""Curves over time, worked out for templates that draw them as SVG. PURE."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 600, 120
#: So many steps without a value interrupt a curve.
_GAP_STEPS = 2.5
_MARGIN = 2  # keeps strokes at the edges whole

#: (epoch seconds, value)
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: its name, the CSS class that colours it, SVG's path, and what it says in words."""

    name: str
    kind: str
    path: str
    words: str


@dataclass(frozen=True, slots=True)
class Marker:
    """Something that happened: ``left`` is where, of ``WIDTH``."""

    left: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    top: str  # the value at the upper edge; the lower edge is 0
    lines: Sequence[Line]
    markers: Sequence[Marker]
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def words(self) -> str:
        """What somebody who does not see it is told."""
        return f"{self.title}: " + "; ".join(f"{one.name} {one.words}" for one in self.lines)


@dataclass(frozen=True, slots=True)
class Span:
    """The time that charts show, in steps. Epoch seconds."""

    since: float
    until: float
    step: float

    def x(self, at: float) -> float:
        return (at - self.since) / (self.until - self.since) * WIDTH

    def means(self, points: Iterable[Point]) -> list[Point]:
        """One point for each step that has any: the middle of the step, the mean of its values."""
        sums: dict[int, list[float]] = defaultdict(list)
        for at, value in points:
            if self.since <= at < self.until:
                sums[int((at - self.since) // self.step)].append(value)
        return [
            (self.since + (number + 0.5) * self.step, sum(values) / len(values))
            for number, values in sorted(sums.items())
        ]


def chart(
    title: str,
    curves: Mapping[str, tuple[str, Sequence[Point]]],
    span: Span,
    shown: Callable[[float], str],
    *,
    top: float = 0.0,
    markers: Iterable[tuple[float, str]] = (),
) -> Chart | None:
    """``curves``: {name: (CSS class, points in order)}. ``top`` 0: the highest value. None where
    there is no point at all."""
    means = {name: (kind, span.means(points)) for name, (kind, points) in curves.items()}
    values = [value for _, points in means.values() for _, value in points]
    if not values:
        return None
    top = max(top, *values) or 1.0
    return Chart(
        title,
        shown(top),
        [Line(name, kind, _path(points, span, top), _words(points, shown))
         for name, (kind, points) in means.items()],
        [Marker(round(span.x(at), 1), text) for at, text in markers
         if span.since <= at < span.until],
    )  # fmt: skip


def _path(points: Sequence[Point], span: Span, top: float) -> str:
    parts: list[str] = []
    before: float | None = None
    for at, value in points:
        x = span.x(at)
        y = HEIGHT - _MARGIN - value / top * (HEIGHT - 2 * _MARGIN)
        goes_on = before is not None and at - before <= _GAP_STEPS * span.step
        # A point alone is drawn as a short stroke.
        parts.append(f"L{x:.1f} {y:.1f}" if goes_on else f"M{x:.1f} {y:.1f}h1")
        before = at
    return "".join(parts)


def _words(points: Sequence[Point], shown: Callable[[float], str]) -> str:
    if not points:
        return "is not known"
    values = [value for _, value in points]
    return f"{shown(min(values))} to {shown(max(values))}, last {shown(values[-1])}"
