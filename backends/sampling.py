"""The time series of polls: at most one row per GPU and per backend each ``TELEMETRY_INTERVAL``,
kept for ``TELEMETRY_RETENTION``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import models

from backends.engines.gpu import Gpu
from backends.models import Backend, BackendSample, GpuSample, Node

#: Rows deleted by one statement: no other writer waits for longer than that takes.
BATCH_ROWS = 5000
#: Batches of one run; what is left is for the next.
MOST_BATCHES = 40
#: Polls come a little early or late: this part of the interval may be missing.
_TOLERANCE = 0.05

_OF_A_BACKEND = ("reachable", "running", "waiting", "kv_use", "gpu_use")
_MEMORY = ("vram_total_mib", "vram_free_mib")


def sample_backend(backend: Backend, at: datetime, values: Mapping[str, Any]) -> None:
    """Keep what a poll that began ``at`` has found, unless there is a row from just before it."""
    before = BackendSample.objects.filter(backend_id=backend.pk)
    if _is_time(before, at):
        found = {name: values.get(name) for name in (*_OF_A_BACKEND, *_MEMORY)}
        BackendSample.objects.create(backend_id=backend.pk, backend=backend.name, at=at, **found)


def sample_node(node: Node, at: datetime, gpus: Sequence[Gpu]) -> None:
    """The same for each GPU of a node."""
    if not _is_time(GpuSample.objects.filter(node_id=node.pk), at):
        return
    GpuSample.objects.bulk_create(
        GpuSample(
            node_id=node.pk,
            node=node.name,
            gpu=gpu.index[:20],
            at=at,
            memory_total_mib=gpu.memory_total_mib,
            memory_used_mib=gpu.memory_used_mib,
            utilization=gpu.utilization,
            temperature_celsius=gpu.temperature_celsius,
            power_watts=gpu.power_watts,
        )
        for gpu in gpus
    )


def _is_time(before: models.QuerySet[Any], at: datetime) -> bool:
    interval = float(settings.TELEMETRY_INTERVAL) * (1 - _TOLERANCE)
    return not before.filter(at__gt=at - timedelta(seconds=interval), at__lte=at).exists()


def forget_samples(now: datetime) -> int:
    """Delete what is older than ``TELEMETRY_RETENTION`` days, oldest first, in batches of which
    each is a transaction of its own; returns how many rows that were."""
    oldest = now - timedelta(days=float(settings.TELEMETRY_RETENTION))
    return sum(_forget(model, oldest) for model in (GpuSample, BackendSample))


def _forget(model: type[GpuSample | BackendSample], oldest: datetime) -> int:
    manager: models.Manager[Any] = model._default_manager  # noqa: SLF001  Django's documented way
    deleted = 0
    for _ in range(MOST_BATCHES):
        rows = manager.filter(at__lt=oldest).order_by("at")
        batch = list(rows.values_list("pk", flat=True)[:BATCH_ROWS])
        if batch:
            deleted += manager.filter(pk__in=batch).delete()[0]
        if len(batch) < BATCH_ROWS:
            break
    return deleted
