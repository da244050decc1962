"""The last hour of a node's GPUs and of a backend, as small curves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from backends.admin.showing import DASH, known, table
from backends.models import Backend, BackendSample, GpuSample, Node

HOUR_SECONDS = 3600.0
WIDTH, HEIGHT = 180, 28
#: So many sampling intervals without a value interrupt the curve.
_GAP_INTERVALS = 3.5

#: (seconds since the hour began, value)
Point = tuple[float, float | None]


def gpus_last_hour(node: Node) -> SafeString | str:
    """Memory and utilization of each GPU; one query."""
    now = timezone.now()
    rows = GpuSample.objects.filter(node_id=node.pk, at__gte=_start(now)).order_by("at")
    memory: dict[str, list[Point]] = defaultdict(list)
    use: dict[str, list[Point]] = defaultdict(list)
    totals: dict[str, float] = {}
    for gpu, at, used, total, part in rows.values_list(
        "gpu", "at", "memory_used_mib", "memory_total_mib", "utilization"
    ):
        memory[gpu].append((_moment(at, now), used))
        use[gpu].append((_moment(at, now), None if part is None else part * 100))
        totals[gpu] = max(total or 0.0, totals.get(gpu, 0.0))
    lines = [
        (
            gpu,
            curve(memory[gpu], totals[gpu], f"memory of GPU {gpu}", "MiB"),
            curve(use[gpu], 100.0, f"use of GPU {gpu}", "%"),
        )
        for gpu in memory
    ]
    return table("Last hour", ("GPU", "memory used", "use"), lines) if lines else DASH


#: What is drawn of a backend: column, name, unit, factor, fixed top of the scale.
_OF_A_BACKEND: Sequence[tuple[str, str, str, float, float]] = (
    ("running", "running", "", 1.0, 0.0),
    ("waiting", "waiting", "", 1.0, 0.0),
    ("kv_use", "KV cache", "%", 100.0, 100.0),
    ("gpu_use", "GPU use", "%", 100.0, 100.0),
    ("vram_free_mib", "VRAM free", "MiB", 1.0, 0.0),
)


def backend_last_hour(backend: Backend) -> SafeString | str:
    """What polls said of a backend, where they said anything; one query."""
    now = timezone.now()
    rows = BackendSample.objects.filter(backend_id=backend.pk, at__gte=_start(now)).order_by("at")
    samples = list(rows.values("at", *(column for column, *_ in _OF_A_BACKEND)))
    lines = []
    for column, name, unit, factor, top in _OF_A_BACKEND:
        points = list(_points(samples, column, factor, now))
        if any(value is not None for _, value in points):
            lines.append((name, curve(points, top, name, unit)))
    return table("Last hour", ("", "of the last hour"), lines) if lines else DASH


def _points(
    samples: Iterable[Mapping[str, Any]], column: str, factor: float, now: datetime
) -> Iterable[Point]:
    for sample in samples:
        value = sample[column]
        yield _moment(sample["at"], now), None if value is None else float(value) * factor


def _start(now: datetime) -> datetime:
    return now - timedelta(seconds=HOUR_SECONDS)


def _moment(at: datetime, now: datetime) -> float:
    return HOUR_SECONDS - (now - at).total_seconds()


def curve(points: Sequence[Point], top: float, name: str, unit: str) -> SafeString | str:
    """A picture of the hour, and in words its lowest, highest and last value. ``top`` 0: the
    scale ends at the highest value."""
    values = [value for _, value in points if value is not None]
    if not values:
        return DASH
    low, high, last = (known(value, unit) for value in (min(values), max(values), values[-1]))
    path = _path(points, max(top, *values, 1.0))
    return format_html(
        '<svg class="mr-curve" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img" '
        'aria-label="{name} in the last hour"><path d="{path}"/></svg>'
        '<span class="mr-small">{low} to {high}, last {last}</span>',
        w=WIDTH,
        h=HEIGHT,
        name=name,
        path=path,
        low=low,
        high=high,
        last=last,
    )


def _path(points: Sequence[Point], top: float) -> str:
    """The curve as SVG wants it, interrupted where nothing is known."""
    gap = _GAP_INTERVALS * float(settings.TELEMETRY_INTERVAL)
    parts: list[str] = []
    before: float | None = None
    for moment, value in points:
        if value is None:
            before = None
            continue
        x = moment / HOUR_SECONDS * WIDTH
        y = HEIGHT - 1 - value / top * (HEIGHT - 2)
        goes_on = before is not None and moment - before <= gap
        # A single point is drawn as a short stroke.
        parts.append(f"L{x:.1f} {y:.1f}" if goes_on else f"M{x:.1f} {y:.1f}h0.5")
        before = moment
    return "".join(parts)
