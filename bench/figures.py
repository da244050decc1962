"""What was measured, as a table, as JSON and as a chart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from typing import Any

Row = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A figure, and what the routers' are compared with: "ratio" to nginx's, or what is "added"
    to that of a backend asked directly."""

    title: str
    beside: str = ""
    digits: int = 1


class Figures:
    """Values by kind, in the order given, and router, one for each pass."""

    def __init__(self, kinds: Iterable[Kind]) -> None:
        self.values: dict[Kind, dict[str, list[float]]] = {kind: {} for kind in kinds}
        self.wrong: dict[str, list[str]] = {}

    def add(self, kind: Kind, router: str, value: float) -> None:
        self.values[kind].setdefault(router, []).append(value)

    def complain(self, router: str, what: list[str]) -> None:
        """Of answers and streams that were not what they should be."""
        self.wrong.setdefault(router, []).extend(what)

    def rows(self) -> dict[str, Row]:
        """{title: {router: its median, range, and how it stands to what it is compared with}}."""
        return {kind.title: row for kind, row in self._rows()}

    def _rows(self) -> list[tuple[Kind, Row]]:
        return [(kind, _row(kind, each)) for kind, each in self.values.items() if each]

    def table(self) -> str:
        names = list(dict.fromkeys(name for _, row in self._rows() for name in row))
        lines = [["", *names]]
        for kind, row in self._rows():
            lines.append([kind.title, *(_cell(kind, row.get(name)) for name in names)])
        lines.append(["wrong or unfinished", *(str(len(self.wrong.get(n, ()))) for n in names)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if at == 0 else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def chart(self) -> str:
        """An SVG with a group of bars for each figure that several routers have."""
        panels = [
            Panel(kind, row) for kind, row in self._rows() if len(row.keys() - {"direct"}) > 1
        ]
        height = 16
        parts = []
        for panel in panels:
            parts.append(panel.svg(height))
            height += panel.height
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'font-family="sans-serif" font-size="13">\n'
            f'<rect width="100%" height="100%" fill="#fff"/>\n{"".join(parts)}</svg>\n'
        )


def _row(kind: Kind, values: dict[str, list[float]]) -> Row:
    medians = {name: statistics.median(each) for name, each in values.items()}
    floor = "nginx" if kind.beside == "ratio" else "direct"
    row: Row = {}
    for name, each in values.items():
        row[name] = {"median": medians[name], "least": min(each), "most": max(each)}
        if kind.beside == "ratio" and medians.get(floor):
            # Of one pass, as what else the machine did was the same for both.
            pairs = zip(each, values[floor], strict=False)
            row[name]["ratio"] = statistics.median(mine / its for mine, its in pairs if its)
        elif kind.beside == "added" and floor in medians:
            row[name]["added"] = medians[name] - medians[floor]
    return row


def _cell(kind: Kind, found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    digits = kind.digits
    text = f"{found['median']:.{digits}f} ({found['least']:.{digits}f}-{found['most']:.{digits}f})"
    if "ratio" in found:
        return f"{text} {found['ratio']:5.2f}×"
    return f"{text} {found['added']:+.{digits}f}" if "added" in found else text


# ---- the chart

_WIDTH, _LEFT, _RIGHT, _BAR = 720, 130, 120, 18
_COLOURS = {"MindRouter": "#1f6feb", "nginx": "#8b949e", "direct": "#c9d1d9"}


@dataclass(frozen=True, slots=True)
class Panel:
    """The bars of one figure."""

    kind: Kind
    row: Row
    height: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "height", 44 + (_BAR + 6) * len(self.row))

    def svg(self, top: int) -> str:
        most = max(found["most"] for found in self.row.values()) or 1.0
        lines = [f'<text x="12" y="{top + 14}" font-weight="bold">{escape(self.kind.title)}</text>']
        for at, (name, found) in enumerate(self.row.items()):
            y = top + 26 + at * (_BAR + 6)
            scale = (_WIDTH - _LEFT - _RIGHT) / most
            width = max(1.0, found["median"] * scale)
            middle = y + _BAR / 2
            ends = _LEFT + found["least"] * scale, _LEFT + found["most"] * scale
            said = f"{found['median']:.{self.kind.digits}f}"
            if "ratio" in found and name != "nginx":
                said += f"  ({found['ratio']:.1f} ×)"
            lines += [
                f'<text x="{_LEFT - 8}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>',
                f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" '
                f'fill="{_COLOURS.get(name, "#d29922")}"/>',
                f'<path d="M{ends[0]:.1f} {middle}H{ends[1]:.1f}" stroke="#24292f"/>',
                f'<text x="{max(_LEFT + width, ends[1]) + 6:.1f}" y="{middle + 4}">{said}</text>',
            ]
        return "\n".join(lines) + "\n"
