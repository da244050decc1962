"""The time series of polls: how often a row is kept, and for how long."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from backends import sampling
from backends.engines.gpu import Gpu
from backends.keeping import save_node
from backends.models import BackendSample, GpuSample, Node, NodeStatus
from backends.sampling import forget_samples, sample_backend
from backends.services import probe_backends
from backends.tasks import forget
from tests.factories import make_backend
from tests.stubs.engines import vllm_stub

pytestmark = pytest.mark.django_db(transaction=True)

GPUS = (
    Gpu(
        index="0",
        memory_total_mib=40960.0,
        memory_used_mib=1024.0,
        memory_free_mib=39936.0,
        utilization=0.5,
        temperature_celsius=40.0,
        power_watts=60.5,
    ),
    Gpu(index="1"),
)


@pytest.fixture
def now() -> datetime:
    return timezone.now()


def at(seconds: float, now: datetime) -> datetime:
    return now + timedelta(seconds=seconds)


def test_a_poll_of_a_node_keeps_one_row_per_gpu_with_null_for_what_is_unknown(
    now: datetime,
) -> None:
    node = Node.objects.create(name="n")
    NodeStatus.objects.create(node=node)
    save_node(node, now, GPUS, "")
    first, second = GpuSample.objects.order_by("gpu").values_list(
        "node", "gpu", "at", "memory_total_mib", "memory_used_mib", "utilization",
        "temperature_celsius", "power_watts",
    )  # fmt: skip
    assert first == ("n", "0", now, 40960.0, 1024.0, 0.5, 40.0, 60.5)
    assert second == ("n", "1", now, None, None, None, None, None)


def test_a_failed_poll_of_a_node_adds_nothing(now: datetime) -> None:
    node = Node.objects.create(name="n")
    NodeStatus.objects.create(node=node)
    save_node(node, now, None, "no answer")
    assert not GpuSample.objects.exists()


def test_a_poll_of_a_backend_is_kept(now: datetime) -> None:
    with vllm_stub() as stub:
        backend = make_backend("a", base_url=stub.url)
        probe_backends([backend.pk])
    row = BackendSample.objects.get()
    assert (row.backend_id, row.backend, row.reachable) == (backend.pk, "a", True)
    assert (row.running, row.waiting, row.kv_use, row.vram_free_mib) == (2, 3, 0.25, None)


def test_there_is_at_most_one_row_in_each_interval(now: datetime, settings: Any) -> None:
    settings.TELEMETRY_INTERVAL = 10
    backend, other = make_backend(), make_backend()
    moments = [0.0, 5.0, 9.4, 9.6, 14.9, 19.3, 19.7]
    for seconds in moments:
        sample_backend(backend, at(seconds, now), {"running": 1})
    sample_backend(other, at(5.0, now), {})
    kept = BackendSample.objects.filter(backend_id=backend.pk).order_by("at")
    assert [(row.at - now).total_seconds() for row in kept] == [0.0, 9.6, 19.3]
    assert BackendSample.objects.filter(backend_id=other.pk).count() == 1


def test_a_clock_that_was_set_back_stops_nothing(now: datetime) -> None:
    backend = make_backend()
    sample_backend(backend, at(3600, now), {})
    sample_backend(backend, now, {})
    assert BackendSample.objects.count() == 2


def test_rows_outlive_their_backend_and_node(now: datetime) -> None:
    node = Node.objects.create(name="n")
    NodeStatus.objects.create(node=node)
    save_node(node, now, GPUS, "")
    backend = make_backend("a")
    sample_backend(backend, now, {})
    backend.delete()
    node.delete()
    assert (GpuSample.objects.count(), BackendSample.objects.get().backend) == (2, "a")


def test_old_rows_go_in_bounded_batches_oldest_first(
    now: datetime, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.TELEMETRY_RETENTION = 2
    monkeypatch.setattr(sampling, "BATCH_ROWS", 3)
    monkeypatch.setattr(sampling, "MOST_BATCHES", 2)
    day = 86400
    old = [-10 * day + n for n in range(8)]
    BackendSample.objects.bulk_create(
        BackendSample(backend_id=1, backend="a", at=at(seconds, now))
        for seconds in [*old, -2 * day + 60, 0]
    )
    assert forget_samples(now) == 6
    left = sorted((row.at - now).total_seconds() for row in BackendSample.objects.all())
    assert left == [old[6], old[7], -2 * day + 60, 0]
    assert forget_samples(now) == 2
    assert forget_samples(now) == 0
    assert BackendSample.objects.count() == 2


def test_the_worker_forgets(now: datetime) -> None:
    GpuSample.objects.create(node_id=1, node="n", gpu="0", at=now - timedelta(days=8))
    GpuSample.objects.create(node_id=1, node="n", gpu="0", at=now - timedelta(days=6))
    forget.apply()
    assert GpuSample.objects.count() == 1


def test_the_schedule_has_the_task(settings: Any) -> None:
    assert forget.name in {entry["task"] for entry in settings.CELERY_BEAT_SCHEDULE.values()}
