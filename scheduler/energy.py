"""What energy requests have taken, as estimates from the power that GPUs report.

A GPU's energy in a minute belongs to those whose requests ran at its backends in that minute, by
the time that each held a slot. Minutes without a request are nobody's, and so is what was not
measured.
Requests that were still running when their hour was added up count only for the hours after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from django.db import transaction
from django.db.models import Avg, F
from django.db.models.functions import TruncHour

from backends.models import Backend, BackendSample, GpuSample
from scheduler.models import Decision, EnergyHour, UsageHour

HOUR = timedelta(hours=1)
#: An hour is added up so long after its end, when most that ran in it has been recorded.
SETTLE = timedelta(minutes=10)
#: Hours before that are not made up for.
OLDEST = timedelta(hours=48)
#: Requests that were under way for longer are left out.
LONGEST = timedelta(hours=1)
_MINUTES = 60
_MINUTE_SECONDS = 60.0
_JOULES_PER_WH = 3600.0
#: Power is looked up so much around a request, as it is sampled only now and then.
_AROUND = timedelta(seconds=30)

Gpu = tuple[int, str]  # node id, index


class Who(NamedTuple):
    """A row of ``UsageHour``."""

    hour: datetime
    user_id: int
    group: str
    key_id: int
    model: str


def add_up(now: datetime) -> int:
    """Add the energy of each hour that has ended to those who used it, once; returns how many hours
    that were."""
    last = (now - SETTLE).replace(minute=0, second=0, microsecond=0)
    sampled = GpuSample.objects.filter(
        at__gte=last - OLDEST, at__lt=last, power_watts__isnull=False
    )
    hours = set(
        sampled.order_by().annotate(hour=TruncHour("at", tzinfo=UTC)).values_list("hour", flat=True)
    )
    done = EnergyHour.objects.filter(hour__gte=last - OLDEST).values_list("hour", flat=True)
    return sum(_add_hour(hour) for hour in sorted(hours - set(done)))


@transaction.atomic
def _add_hour(hour: datetime) -> bool:
    joules = _joules(hour)
    taken = dict(_taken(hour, joules, _backends_of_gpus(joules)))
    _, new = EnergyHour.objects.get_or_create(
        hour=hour,
        defaults={
            "measured_wh": sum(map(sum, joules.values())) / _JOULES_PER_WH,
            "attributed_wh": sum(taken.values()) / _JOULES_PER_WH,
        },
    )
    if new:
        for who, energy in taken.items():
            UsageHour.objects.filter(**who._asdict()).update(
                estimated_energy_wh=F("estimated_energy_wh") + energy / _JOULES_PER_WH
            )
    return new


def _joules(hour: datetime) -> dict[Gpu, list[float]]:
    """{GPU: energy of each minute}, from the mean of the minute's samples; 0: there are none."""
    sums: dict[Gpu, list[tuple[float, int]]] = defaultdict(lambda: [(0.0, 0)] * _MINUTES)
    samples = GpuSample.objects.filter(
        at__gte=hour, at__lt=hour + HOUR, power_watts__isnull=False
    ).order_by()
    for node_id, gpu, at, watts in samples.values_list(
        "node_id", "gpu", "at", "power_watts"
    ).iterator():
        minutes = sums[node_id, gpu]
        total, count = minutes[at.minute]
        minutes[at.minute] = total + (watts or 0.0), count + 1
    return {
        gpu: [total / count * _MINUTE_SECONDS if count else 0.0 for total, count in minutes]
        for gpu, minutes in sums.items()
    }


def _backends_of_gpus(gpus: Iterable[Gpu]) -> dict[Gpu, list[int]]:
    """{GPU: the backends that use it}"""
    backends = list(Backend.objects.filter(node__isnull=False).values_list(
        "pk", "node_id", "gpu_indexes"
    ))  # fmt: skip
    return {
        (node_id, index): [
            pk
            for pk, of, indexes in backends
            if of == node_id and (indexes is None or index in map(str, indexes))
        ]
        for node_id, index in gpus
    }


def _taken(
    hour: datetime, joules: dict[Gpu, list[float]], users: dict[Gpu, list[int]]
) -> Iterator[tuple[Who, float]]:
    """What each has taken of it in that hour, in joules."""
    held: dict[tuple[int, int], dict[Who, float]] = defaultdict(lambda: defaultdict(float))
    for who, backend_id, start, end in _requests(hour, {b for ids in users.values() for b in ids}):
        for minute, seconds in _minutes(start, end):
            held[backend_id, minute][who] += seconds
    taken: dict[Who, float] = defaultdict(float)
    for gpu, minutes in joules.items():
        for minute, energy in enumerate(minutes):
            here = [held[pk, minute] for pk in users[gpu] if (pk, minute) in held]
            total = sum(sum(one.values()) for one in here)
            for one in here:
                for who, seconds in one.items():
                    taken[who] += energy * seconds / total if total else 0.0
    yield from taken.items()


def _requests(hour: datetime, backend_ids: set[int]) -> Iterator[tuple[Who, int, float, float]]:
    """(whose, backend id, from when, until when in seconds of the hour) of what ran in it."""
    rows = Decision.objects.filter(
        arrived_at__gte=hour - LONGEST,
        arrived_at__lt=hour + HOUR,
        ended_at__gt=hour,
        dispatched_at__lt=hour + HOUR,
        selected_backend_id__in=backend_ids,
    ).order_by()
    for arrived, user_id, group, key_id, model, backend_id, sent, ended in rows.values_list(
        "arrived_at",
        "user_id",
        "group",
        "key_id",
        "model_served",
        "selected_backend_id",
        "dispatched_at",
        "ended_at",
    ).iterator():
        if backend_id is None or sent is None or ended is None:
            continue
        of = arrived.replace(minute=0, second=0, microsecond=0)
        start = max(0.0, (sent - hour).total_seconds())
        end = min(HOUR.total_seconds(), (ended - hour).total_seconds())
        yield Who(of, user_id or 0, group, key_id or 0, model), backend_id, start, end


def _minutes(start: float, end: float) -> Iterator[tuple[int, float]]:
    """(minute, seconds of it) between two moments of an hour."""
    minute = int(start // _MINUTE_SECONDS)
    while minute < _MINUTES and minute * _MINUTE_SECONDS < end:
        begin = minute * _MINUTE_SECONDS
        yield minute, min(end, begin + _MINUTE_SECONDS) - max(start, begin)
        minute += 1


def of_request(request: Decision) -> float | None:
    """Watt hours that one request has taken: its time at the mean power of its backend's GPUs,
    divided by how many ran there. None: the power was not known.
    """
    backend_id = request.selected_backend_id
    if request.dispatched_at is None or request.ended_at is None or backend_id is None:
        return None
    backend = Backend.objects.filter(pk=backend_id).first()
    if backend is None or backend.node_id is None:
        return None
    span = (request.dispatched_at - _AROUND, request.ended_at + _AROUND)
    gpus = GpuSample.objects.filter(node_id=backend.node_id, at__range=span)
    if backend.gpu_indexes is not None:
        gpus = gpus.filter(gpu__in=[str(index) for index in backend.gpu_indexes])
    means = gpus.order_by().values("gpu").annotate(watts=Avg("power_watts"))
    known = [row["watts"] for row in means if row["watts"] is not None]
    if not known:
        return None
    samples = BackendSample.objects.filter(backend_id=backend.pk, at__range=span)
    running: float = samples.aggregate(mean=Avg("running"))["mean"] or 1.0
    seconds = (request.ended_at - request.dispatched_at).total_seconds()
    return float(sum(known)) * seconds / max(1.0, running) / _JOULES_PER_WH
