"""How values that may be unknown or old are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from django.conf import settings
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from backends.engines.gpu import Gpu
from backends.models import Backend, BackendStatus, Node, NodeStatus, State

DASH = "–"

#: The look of each state; the word itself is always shown too.
LABELS = {
    State.READY.value: "success",
    State.DOWN.value: "danger",
    State.UNANSWERED.value: "warning",
    State.UNKNOWN.value: "info",
    State.DRAINING.value: "warning",
    State.PAUSED.value: "warning",
    State.DISABLED.value: "default",
}


def known(value: Any, unit: str = "") -> str:
    """A value with its unit; unknown is a dash, never 0."""
    if value is None or value == "":
        return DASH
    text = f"{value:,.0f}" if isinstance(value, float) else str(value)
    return f"{text} {unit}".strip()


def percent(part: float | None) -> str:
    return known(None if part is None else part * 100, "%")


def age(moment: datetime | None) -> str:
    """ "4 s ago", "12 min ago" …, or "never"."""
    if moment is None:
        return "never"
    seconds = max(0.0, (timezone.now() - moment).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def is_stale(moment: datetime | None) -> bool:
    """Whether a poll of then no longer influences where requests go."""
    if moment is None:
        return True
    limit = float(settings.BACKEND_STALE_AFTER)
    return (timezone.now() - moment).total_seconds() >= limit


def short_age(moment: datetime | None) -> SafeString | str:
    """The same in a list's column, where there is little room."""
    if moment is None or not is_stale(moment):
        return age(moment)
    return format_html('{} <span class="mr-small">too old to count</span>', age(moment))


def age_and_use(moment: datetime | None) -> str:
    """The age of a poll, and whether it is too old to count."""
    if moment is None or not is_stale(moment):
        return age(moment)
    return f"{age(moment)}: too old to count, taken as unknown"


def status_of(backend: Backend) -> BackendStatus:
    """Its status; an empty one while it has none, as on the page that adds a backend."""
    return getattr(backend, "status", None) or BackendStatus()


def node_status_of(node: Node | None) -> NodeStatus:
    return getattr(node, "status", None) or NodeStatus()


def gpus_of(node: Node | None) -> Sequence[Gpu]:
    return [Gpu(**gpu) for gpu in node_status_of(node).gpus]


def table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, cell_class: str = ""
) -> SafeString:
    """A table as on the project's own pages; the first cell of a row names it."""
    body = format_html_join(
        "",
        '<tr><th scope="row">{}</th>{}</tr>',
        (
            (first, format_html_join("", '<td class="{}">{}</td>', ((cell_class, c) for c in rest)))
            for first, *rest in rows
        ),
    )
    classes = ["", *[cell_class] * (len(head) - 1)]
    cells = format_html_join(
        "", '<th scope="col" class="{}">{}</th>', zip(classes, head, strict=True)
    )
    return format_html(
        '<div class="mr-scroll" tabindex="0" role="region" aria-label="{}">'
        '<table class="mr-table"><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>',
        title,
        cells,
        body,
    )


GPU_HEAD = ("GPU", "memory used", "free", "of", "use", "heat", "power")


def gpu_table(gpus: Sequence[Gpu]) -> SafeString | str:
    if not gpus:
        return DASH
    return table("GPUs", GPU_HEAD, [gpu_cells(gpu) for gpu in gpus], cell_class="mr-number")


def gpu_cells(gpu: Gpu) -> tuple[str, ...]:
    return (
        f"{gpu.index} {gpu.name}".strip(),
        known(gpu.memory_used_mib, "MiB"),
        known(gpu.memory_free_mib, "MiB"),
        known(gpu.memory_total_mib, "MiB"),
        percent(gpu.utilization),
        known(gpu.temperature_celsius, "°C"),
        known(gpu.power_watts, "W"),
    )
