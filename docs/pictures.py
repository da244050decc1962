"""Draw docs/images/fair-share.svg and docs/images/order.svg with the real scheduling core.

    python docs/pictures.py

Time is counted, not waited for: the same pictures come out each time.
"""

from __future__ import annotations

import heapq
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scheduler.core.jobs import BackendSpec, Job, ModelSpec, Usage, UserSpec  # noqa: E402
from scheduler.core.scheduler import Scheduler  # noqa: E402
from scheduler.core.tunables import Tunables  # noqa: E402

NAMES = ("faculty", "staff", "student")
COLOURS = {"faculty": "#2563eb", "staff": "#d97706", "student": "#059669"}
BEFORE = {"faculty": 3.0, "staff": 2.0, "student": 1.0}
AFTER = {"faculty": 3.0, "staff": 2.0, "student": 3.0}
TOKENS, SECONDS, SLOTS = 400, 2.0, 8
#: staff has nothing to do in between; then an admin changes a weight.
AWAY, CHANGED, END = (200.0, 320.0), 440.0, 600.0
WINDOW = 30.0


class Cluster:
    """One backend, and users who always have something to ask unless they are away."""

    def __init__(self, slots: int, weights: Mapping[str, float]) -> None:
        self.scheduler = Scheduler(Tunables())
        self.slots = slots
        self.served: list[tuple[float, str]] = []
        self._ends: list[tuple[float, int, object]] = []
        self._count = 0
        self._waiting: dict[str, int] = defaultdict(int)
        self.weigh(weights, 0.0)

    def weigh(self, weights: Mapping[str, float], now: float) -> None:
        users = {
            number: UserSpec(
                user_id=number, username=name, group_id=number, group_name=name,
                weight=weights[name], group_weight=weights[name],
            )
            for number, name in enumerate(NAMES, start=1)
        }  # fmt: skip
        backend = BackendSpec(
            backend_id=1, name="gpu-1", address="", max_concurrent=self.slots, max_queue=1000,
            models={"m": ModelSpec(name="m")},
        )  # fmt: skip
        self.scheduler.configure(
            tunables=Tunables(), users=users, backends=[backend], strategies={}, now=now
        )

    def ask(self, name: str, now: float) -> None:
        self._count += 1
        self._waiting[name] += 1
        self.scheduler.submit(
            Job(
                request_id=str(self._count), user_id=NAMES.index(name) + 1,
                unit=NAMES.index(name) + 1, model_name="m", prompt_tokens=100, max_tokens=300,
            ),
            now,
        )  # fmt: skip

    def step(self, now: float) -> None:
        """Start what may start."""
        for ticket in self.scheduler.pump(now):
            name = NAMES[ticket.job.user_id - 1]
            self._waiting[name] -= 1
            self.served.append((now, name))
            seconds = SECONDS * (0.8 + 0.4 * (len(self.served) * 7 % 10) / 10)
            heapq.heappush(self._ends, (now + seconds, len(self.served), ticket.lease))

    def until(self, now: float) -> None:
        """End what ends before ``now``; who waits is served in its place."""
        while self._ends and self._ends[0][0] <= now:
            at, _, lease = heapq.heappop(self._ends)
            self.scheduler.settle(lease, Usage(prompt_tokens=100, completion_tokens=300), at)
            self.step(at)

    def keep_busy(self, names: Iterable[str], now: float) -> None:
        for name in names:
            while self._waiting[name] < 20:
                self.ask(name, now)


def shares() -> list[tuple[float, dict[str, float]]]:
    """(second, {group: part of the tokens started in the 30 s before})."""
    cluster = Cluster(SLOTS, BEFORE)
    now = 0.0
    while now < END:
        if now == CHANGED:
            cluster.weigh(AFTER, now)
        away = {"staff"} if AWAY[0] <= now < AWAY[1] else set()
        cluster.keep_busy([name for name in NAMES if name not in away], now)
        cluster.step(now)
        now += 1.0
        cluster.until(now)
    found = []
    for second in range(int(WINDOW), int(END) + 1, 5):
        names = [name for at, name in cluster.served if second - WINDOW < at <= second]
        found.append((float(second), {one: names.count(one) / len(names) for one in NAMES}))
    return found


def order() -> tuple[list[str], list[str]]:
    """Twelve requests by one slot: first come first served, and as they are really served.

    student sends eight at once, then faculty and staff two each.
    """
    came = ["student"] * 8 + ["faculty", "staff"] * 2
    cluster = Cluster(1, BEFORE)
    for name in came:
        cluster.ask(name, 0.0)
    cluster.step(0.0)
    cluster.until(1000.0)
    return came, [name for _, name in cluster.served]


# ---- drawing

_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" role="img" '
    'font-family="system-ui, sans-serif" font-size="13"><title>{title}</title>'
    '<rect width="{w}" height="{h}" fill="#ffffff" rx="8"/>'
)


def shares_svg(points: list[tuple[float, dict[str, float]]]) -> str:
    left, top, width, height = 60, 40, 660, 240

    def x(second: float) -> float:
        return left + (second - WINDOW) / (END - WINDOW) * width

    def y(part: float) -> float:
        return top + (1 - part / 0.8) * height

    out = [_HEAD.format(w=760, h=340, title="Shares of three groups over ten minutes")]
    for percent in (0, 20, 40, 60, 80):
        at = y(percent / 100)
        out.append(
            f'<path d="M{left} {at:.1f}h{width}" stroke="#e2e8f0"/>'
            f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end" '
            f'fill="#475569">{percent} %</text>'
        )
    moments = ((AWAY[0], "staff has nothing to do"), (AWAY[1], "staff is back"),
               (CHANGED, "student: weight 1 → 3"))  # fmt: skip
    for number, (second, words) in enumerate(moments):
        out.append(
            f'<path d="M{x(second):.1f} {top}v{height}" stroke="#94a3b8" '
            f'stroke-dasharray="4 4"/>'
            f'<text x="{x(second) + 5:.1f}" y="{top + 12 + 16 * (number % 2)}" '
            f'fill="#334155">{words}</text>'
        )
    for name in NAMES:
        path = " ".join(f"{x(at):.1f},{y(parts[name]):.1f}" for at, parts in points)
        out.append(
            f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2.5"/>'
        )
    for number, name in enumerate(NAMES):
        at = left + number * 150
        out.append(
            f'<rect x="{at}" y="14" width="12" height="12" fill="{COLOURS[name]}"/>'
            f'<text x="{at + 18}" y="25" fill="#0f172a">{name}, weight {BEFORE[name]:g}</text>'
        )
    out += [
        f'<text x="{x(second):.1f}" y="{top + height + 20}" text-anchor="middle" '
        f'fill="#475569">{second // 60} min</text>'
        for second in range(60, int(END) + 1, 60)
    ]
    return "\n".join([*out, "</svg>\n"])


def order_svg(came: list[str], served: list[str]) -> str:
    out = [_HEAD.format(w=760, h=170, title="First come first served, and by weight")]
    for row, (words, names) in enumerate((("as they came", came), ("as served", served))):
        top = 20 + row * 56
        out.append(f'<text x="16" y="{top + 24}" fill="#0f172a">{words}</text>')
        for place, name in enumerate(names):
            at = 120 + place * 52
            out.append(
                f'<rect x="{at}" y="{top}" width="46" height="38" rx="5" fill="{COLOURS[name]}"/>'
                f'<text x="{at + 23}" y="{top + 24}" text-anchor="middle" fill="#ffffff" '
                f'font-weight="600">{name[:2].upper() if name != "staff" else "SF"}</text>'
            )
    out.append(
        '<text x="120" y="152" fill="#475569">ST student, weight 1 · SF staff, weight 2 · '
        "FA faculty, weight 3 · one slot, requests of equal size</text>"
    )
    return "\n".join([*out, "</svg>\n"])


if __name__ == "__main__":
    images = ROOT / "docs" / "images"
    (images / "fair-share.svg").write_text(shares_svg(shares()))
    (images / "order.svg").write_text(order_svg(*order()))
