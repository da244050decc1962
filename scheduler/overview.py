"""What one look at the cluster shows beside the shares: backends, refusals, what needs care."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from django.core.cache import cache
from django.db.models import Count
from django.utils import timezone

from backends.models import Backend
from scheduler.core.views import BackendView
from scheduler.explain import duration, reason_in_words
from scheduler.models import Decision, Outcome
from scheduler.serving import LiveView
from scheduler.standing import setting

REFUSALS_SECONDS = 3600
WAITS_SECONDS = 900
_WAITS_OF = 1000
_COUNTED_EVERY = 5  # seconds between two looks at the records


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    """One backend: what runs there, and what its last poll said. Fractions 0..1; None: unknown."""

    backend_id: int
    name: str
    state: str
    running: int | None  # ours
    foreign: int | None
    slots: int
    waiting: int | None  # could be served there, and perhaps elsewhere too
    vram_used: float | None
    vram_total_mib: float | None
    kv_use: float | None
    age_seconds: float | None  # of what was polled
    is_stale: bool
    error: str
    failed_for_seconds: float | None

    @property
    def busy(self) -> float | None:
        if self.running is None or not self.slots:
            return None
        return (self.running + (self.foreign or 0)) / self.slots


def backend_rows(view: LiveView | None) -> list[BackendRow]:
    """Every backend by name, in two queries."""
    live = {} if view is None else {one.id: one for one in view.backends}
    stale_after = float(setting("backend_stale_after"))
    rows = Backend.objects.select_related("status").defer("api_key").order_by("name")
    return [_backend_row(backend, live.get(backend.pk), stale_after) for backend in rows]


def _backend_row(backend: Backend, live: BackendView | None, stale_after: float) -> BackendRow:
    status = getattr(backend, "status", None)
    age = None if status is None else status.age_seconds
    total = None if status is None else status.vram_total_mib
    free = None if status is None else status.vram_free_mib
    return BackendRow(
        backend_id=backend.pk,
        name=backend.name,
        state=_state(backend, live),
        running=live.in_flight if live else None,
        foreign=live.foreign if live else None,
        slots=backend.max_concurrent,
        waiting=live.queued if live else None,
        vram_used=None if total is None or free is None or total <= 0 else 1.0 - free / total,
        vram_total_mib=total,
        kv_use=None if status is None else status.kv_use,
        age_seconds=age,
        is_stale=age is None or age > stale_after,
        error=status.error if status else "",
        failed_for_seconds=live.failed_for_seconds if live else None,
    )


def _state(backend: Backend, live: BackendView | None) -> str:
    if backend.enabled and backend.paused and not backend.draining:
        return "paused"  # the scheduler calls it draining, then disabled
    if live is not None:
        return live.state
    if not backend.enabled:
        return "disabled"
    return "draining" if backend.draining else "unknown"


def attention(rows: Iterable[BackendRow]) -> list[tuple[BackendRow, str]]:
    """The backends that somebody should look at, and why."""
    return [(row, why) for row in rows for why in _complaints(row)]


def _complaints(row: BackendRow) -> Iterator[str]:
    if row.state == "disabled":
        return
    if row.state == "failed":
        yield f"has failed; tried again in {duration(row.failed_for_seconds)}"
    elif row.state == "down":
        yield f"is down{': ' + row.error if row.error else ''}"
    elif row.age_seconds is None:
        yield "has never answered a poll"
    elif row.is_stale:
        yield f"was last heard of {duration(row.age_seconds)} ago: its figures count as unknown"
    if row.foreign and row.running is not None and row.running + row.foreign >= row.slots:
        yield f"is full, with {row.foreign} requests that did not come through here"
    if row.state != "down" and row.kv_use is not None and not row.is_stale and row.kv_use > 0.95:
        yield "has nearly no room left in its KV cache"


@dataclass(frozen=True, slots=True)
class Waits:
    """How long requests have waited, in seconds; of those that got a slot lately."""

    requests: int
    p50: float
    p95: float


def waits() -> Waits | None:
    """Of the newest ``_WAITS_OF`` requests of the last ``WAITS_SECONDS``; a few seconds old."""
    found: Waits | None = cache.get_or_set("overview-waits", _waits, _COUNTED_EVERY)
    return found


def _waits() -> Waits | None:
    since = timezone.now() - timedelta(seconds=WAITS_SECONDS)
    rows = Decision.objects.filter(
        arrived_at__gte=since, queued_at__isnull=False, dispatched_at__isnull=False
    ).values_list("queued_at", "dispatched_at")
    found = sorted(
        max(0.0, (sent - queued).total_seconds())
        for queued, sent in rows.order_by("-arrived_at")[:_WAITS_OF]
        if queued and sent
    )
    if not found:
        return None
    return Waits(len(found), nearest(found, 0.5), nearest(found, 0.95))


def nearest(values: Sequence[float], part: float) -> float:
    """The value that ``part`` of the sorted ``values`` do not exceed (the nearest rank)."""
    return values[max(0, math.ceil(part * len(values)) - 1)]


def refusals() -> list[tuple[str, int]]:
    """(why in words, how many) of the last hour's refusals, most first; a few seconds old."""
    found = cache.get_or_set("overview-refusals", _refusals, _COUNTED_EVERY)
    return found or []


def _refusals() -> list[tuple[str, int]]:
    since = timezone.now() - timedelta(seconds=REFUSALS_SECONDS)
    counted = (
        Decision.objects.filter(outcome=Outcome.REFUSED, arrived_at__gte=since)
        .order_by()
        .values_list("reason")
        .annotate(number=Count("id"))
    )
    return sorted(
        ((reason_in_words(reason), number) for reason, number in counted),
        key=lambda one: (-one[1], one[0]),
    )
