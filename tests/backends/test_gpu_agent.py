# ruff: noqa: N802  the driver has pynvml's names
"""The agent that a GPU node runs, and that the router understands what it tells."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from backends.engines.gpu import Gpu, parse_gpus
from backends.engines.replies import Reply

_SPEC = importlib.util.spec_from_file_location(
    "gpu_agent", Path(__file__).parents[2] / "deploy" / "gpu_agent.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
agent = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(agent)

GIB = 1024**3


class NVMLError(Exception):
    pass


class Driver:
    """As ``pynvml``: a whole board, one that supports nothing but its name, and a dead one."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 2:
            raise NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetName(self, handle: int) -> Any:
        return b"NVIDIA A100" if handle == 0 else "NVIDIA GB10"  # bytes: older versions

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=40 * GIB, used=0, free=40 * GIB) if self._has(handle) else None

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=0, memory=3) if self._has(handle) else None

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> Any:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 41 if self._has(handle) else None

    def nvmlDeviceGetPowerUsage(self, handle: int) -> Any:
        return 61_250 if self._has(handle) else None

    def _has(self, handle: int) -> bool:
        if handle:
            raise NVMLError("Not Supported")
        return True


UNSUPPORTED = {
    "memory_total_gb": None,
    "memory_used_gb": None,
    "memory_free_gb": None,
    "utilization_gpu": None,
    "temperature_gpu": None,
    "power_draw_watts": None,
}


def test_the_driver_is_asked_and_what_it_does_not_support_is_null_and_never_0() -> None:
    assert agent.gpus_of_driver(Driver()) == [
        {
            "index": 0,
            "name": "NVIDIA A100",
            "uuid": "GPU-0",
            "memory_total_gb": 40.0,
            "memory_used_gb": 0.0,
            "memory_free_gb": 40.0,
            "utilization_gpu": 0,
            "temperature_gpu": 41,
            "power_draw_watts": 61.25,
        },
        {"index": 1, "name": "NVIDIA GB10", "uuid": "GPU-1", **UNSUPPORTED},
        {"index": 2, "name": "", "uuid": "", **UNSUPPORTED},
    ]


def test_a_driver_that_is_not_there_is_an_error_and_not_a_node_without_gpus() -> None:
    class Missing(Driver):
        def nvmlInit(self) -> None:
            raise NVMLError("Driver Not Loaded")

    with pytest.raises(agent.Unreadable, match="Driver Not Loaded"):
        agent.gpus_of_driver(Missing())


def test_nvidia_smi_serves_where_the_bindings_are_missing() -> None:
    text = (
        "0, NVIDIA A100-SXM4-40GB, GPU-a, 40960, 1024, 39936, 7, 33, 54.21\n"
        "1, NVIDIA GB10, GPU-b, [N/A], [N/A], [N/A], 0, 40, [Not Supported]\n"
        "No devices were found\n"
    )
    first, second = agent.parse_smi(text)
    assert first == {
        "index": 0,
        "name": "NVIDIA A100-SXM4-40GB",
        "uuid": "GPU-a",
        "memory_total_gb": 40.0,
        "memory_used_gb": 1.0,
        "memory_free_gb": 39.0,
        "utilization_gpu": 7.0,
        "temperature_gpu": 33.0,
        "power_draw_watts": 54.21,
    }
    assert (second["memory_total_gb"], second["power_draw_watts"]) == (None, None)
    assert (second["utilization_gpu"], second["temperature_gpu"]) == (0.0, 40.0)


@contextmanager
def running(read: Any, key: str = "") -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), agent.handler(read, key))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def get(url: str, **headers: str) -> httpx.Response:
    return httpx.get(url, headers=headers, trust_env=False)


def test_the_router_reads_what_the_agent_answers() -> None:
    with running(lambda: agent.gpus_of_driver(Driver())) as url:
        answer = get(f"{url}/gpu-info")
        assert get(f"{url}/health").json() == {"status": "ok"}
        assert get(f"{url}/other").status_code == 404
    assert answer.json()["gpu_count"] == 3
    found = parse_gpus(Reply(answer.status_code, answer.content))
    assert found == (
        Gpu(
            index="0",
            uuid="GPU-0",
            name="NVIDIA A100",
            memory_total_mib=40960.0,
            memory_used_mib=0.0,
            memory_free_mib=40960.0,
            utilization=0.0,
            temperature_celsius=41.0,
            power_watts=61.25,
        ),
        Gpu(index="1", uuid="GPU-1", name="NVIDIA GB10"),
        Gpu(index="2"),
    )


def test_with_a_key_only_those_who_send_it_are_answered() -> None:
    with running(list, key="secret") as url:
        assert get(f"{url}/gpu-info").status_code == 401
        assert get(f"{url}/gpu-info", **{"X-Sidecar-Key": "wrong"}).status_code == 401
        assert get(f"{url}/gpu-info", **{"X-Sidecar-Key": "secret"}).status_code == 200
        assert get(f"{url}/gpu-info", Authorization="Bearer secret").status_code == 200
        assert get(f"{url}/health").status_code == 200


def test_gpus_that_cannot_be_read_are_a_failed_poll() -> None:
    def fail() -> Any:
        raise agent.Unreadable("Driver Not Loaded")

    with running(fail) as url:
        answer = get(f"{url}/gpu-info")
    assert (answer.status_code, answer.json()) == (503, {"error": "Driver Not Loaded"})
    assert parse_gpus(Reply(answer.status_code, answer.content)) is None
