"""From a node's telemetry to where a request goes, through polls, snapshot and scheduler."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from backends.catalog import available_mib
from backends.models import Backend, BackendModel, BackendStatus, Node, NodeStatus
from backends.services import poll_due
from scheduler.snapshot import load_telemetry
from tests.factories import make_backend
from tests.running import RunningRouter
from tests.stubs.engines import OllamaModel, node_stub, ollama_stub
from tests.stubs.openai_stub import OpenAIStub

GIB = 1024**3


def polled_twice() -> None:
    """The node's figures count from the first poll of a backend after its own."""
    poll_due()
    NodeStatus.objects.update(attempted_at=None)
    BackendStatus.objects.update(attempted_at=None)
    poll_due()


@pytest.mark.django_db(transaction=True)
def test_a_backend_has_the_memory_of_its_own_gpus() -> None:
    with node_stub() as node_server, ollama_stub() as server:
        node = Node.objects.create(name="n", telemetry_url=f"{node_server.url}/gpu-info")
        rows = [
            make_backend("all", base_url=server.url, node=node),
            make_backend("second", base_url=server.url, node=node, gpu_indexes=[1]),
            make_backend("missing", base_url=server.url, node=node, gpu_indexes=[1, 9]),
        ]
        polled_twice()
    found = {
        row.name: (row.status.vram_total_mib, row.status.vram_free_mib, row.status.gpu_use)
        for row in Backend.objects.filter(pk__in=[r.pk for r in rows]).select_related("status")
    }
    assert found == {
        "all": (81920.0, 59904.0, 0.5),
        "second": (40960.0, 39424.0, 0.1),
        "missing": (None, None, 0.1),
    }


async def telling(router: RunningRouter, backend: int, free_mib: float, age: float = 0.0) -> None:
    """A backend whose last poll, `age` seconds ago, found no model loaded on 40 GiB."""

    def save() -> Any:
        moment = timezone.now() - timedelta(seconds=age)
        BackendStatus.objects.update_or_create(
            backend_id=backend,
            defaults={
                "answered_at": moment,
                "observed_at": moment,
                "reachable": True,
                "loaded_models": {},
                "vram_total_mib": 40960.0,
                "vram_free_mib": free_mib,
            },
        )
        BackendModel.objects.filter(backend=backend).update(vram_mib=16384.0)
        return load_telemetry()

    telemetry = await router.ask(save)
    await router.reload()
    router.runtime._observe(telemetry, router.runtime._loop.time())


async def test_a_model_that_does_not_fit_goes_elsewhere_and_the_decision_says_so(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    small = await router.backend(stub, "small")
    large = await router.backend(stub, "large")
    await telling(router, small, 8192.0)
    await telling(router, large, 32768.0)
    assert {(await router.chat()).headers["x-mindrouter-backend"] for _ in range(4)} == {"large"}
    record = (await router.records())[0]
    assert record.selected_backend_id == large
    assert record.constraints[str(small)] == {"memory_fit": "needs 16384 MiB, 8192 MiB are free"}


async def test_old_telemetry_excludes_nothing(router: RunningRouter, stub: OpenAIStub) -> None:
    only = await router.backend(stub, "small")
    await telling(router, only, 8192.0, age=31.0)
    assert (await router.chat()).status_code == 200


class Status:
    def __init__(self, free: float | None, total: float | None, loaded: Any) -> None:
        self.vram_free_mib, self.vram_total_mib, self.loaded_models = free, total, loaded


@pytest.mark.parametrize(
    ("engine", "status", "available"),
    [
        ("ollama", Status(1000.0, 40000.0, {"a": 5000.0, "b": None, "c": 2000.0}), 8000.0),
        ("ollama", Status(36000.0, 40000.0, {"a": 5000.0}), 40000.0),  # polled at two moments
        ("ollama", Status(1000.0, None, {"a": 5000.0}), 6000.0),
        ("ollama", Status(None, 40000.0, {"a": 5000.0}), None),
        ("ollama", Status(1000.0, 40000.0, None), 1000.0),
        ("vllm", Status(1000.0, 40000.0, {"a": 5000.0}), 1000.0),
    ],
)
def test_what_ollama_can_unload_counts_as_available(
    engine: str, status: Any, available: float | None
) -> None:
    assert available_mib(engine, status) == available


@pytest.mark.django_db(transaction=True)
def test_a_loaded_model_of_ollama_makes_room_for_another() -> None:
    loaded = OllamaModel("big:latest", size_vram=16 * GIB)
    with node_stub() as node_server, ollama_stub(loaded, OllamaModel("other:latest")) as server:
        node = Node.objects.create(name="n", telemetry_url=f"{node_server.url}/gpu-info")
        make_backend("o", base_url=server.url, node=node, gpu_indexes=[0])
        polled_twice()
    (known,) = load_telemetry()
    assert BackendStatus.objects.get().vram_free_mib == 20480.0
    assert known.telemetry.vram_free_mib == 20480.0 + 16384.0
