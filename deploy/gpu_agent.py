"""Tells the router about this machine's GPUs: a small server to run on each GPU node.

    python gpu_agent.py --port 8007            # GPU_AGENT_KEY in the environment: asked for

Needs nothing but Python; with ``nvidia-ml-py`` installed it asks the driver directly, else it runs
``nvidia-smi``. ``GET /gpu-info`` answers as described in docs/telemetry.md, ``GET /health`` tells
that the agent runs. What a board does not support is null, never 0.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hmac
import importlib
import json
import math
import os
import socket
import subprocess
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Gpu = dict[str, Any]

MIB_PER_GIB = 1024
BYTES_PER_GIB = 1024**3
SMI_SECONDS = 5.0
SMI = [
    "nvidia-smi",
    "--query-gpu=index,name,uuid,memory.total,memory.used,memory.free,"
    "utilization.gpu,temperature.gpu,power.draw",
    "--format=csv,noheader,nounits",
]


class Unreadable(Exception):  # noqa: N818
    """The GPUs cannot be read at present."""


# ---- with nvidia-ml-py


def gpus_of_driver(nvml: Any) -> list[Gpu]:
    """What the driver says, through ``nvml``, the module ``pynvml``. Raises: Unreadable."""
    try:
        nvml.nvmlInit()
        return [_gpu_of_driver(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise Unreadable(str(error)) from error


def _gpu_of_driver(nvml: Any, index: int) -> Gpu:
    def ask(name: str, *arguments: Any) -> Any:
        with contextlib.suppress(nvml.NVMLError):
            return getattr(nvml, name)(*arguments)
        return None

    handle = ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:  # it has fallen off the bus: still one of the node's GPUs
        return _gpu(index, "", "")
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    use = ask("nvmlDeviceGetUtilizationRates", handle)
    milliwatts = ask("nvmlDeviceGetPowerUsage", handle)
    return _gpu(
        index,
        _text(ask("nvmlDeviceGetName", handle)),
        _text(ask("nvmlDeviceGetUUID", handle)),
        memory_total_gb=None if memory is None else memory.total / BYTES_PER_GIB,
        memory_used_gb=None if memory is None else memory.used / BYTES_PER_GIB,
        memory_free_gb=None if memory is None else memory.free / BYTES_PER_GIB,
        utilization_gpu=None if use is None else use.gpu,
        temperature_gpu=ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        power_draw_watts=None if milliwatts is None else milliwatts / 1000,
    )


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""


# ---- with nvidia-smi


def gpus_of_smi() -> list[Gpu]:
    """What ``nvidia-smi`` says. Raises: Unreadable."""
    try:
        found = subprocess.run(  # noqa: S603  a fixed command
            SMI, capture_output=True, text=True, check=True, timeout=SMI_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unreadable(str(error)) from error
    return parse_smi(found.stdout)


def parse_smi(text: str) -> list[Gpu]:
    """The GPUs in the CSV that ``SMI`` writes: MiB, percent, °C, watts; ``[N/A]`` is null."""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != 9 or not row[0].isdigit():
            continue
        total, used, free, use, temperature, power = map(_number, row[3:])
        gpus.append(
            _gpu(
                int(row[0]),
                row[1],
                row[2],
                memory_total_gb=None if total is None else total / MIB_PER_GIB,
                memory_used_gb=None if used is None else used / MIB_PER_GIB,
                memory_free_gb=None if free is None else free / MIB_PER_GIB,
                utilization_gpu=use,
                temperature_gpu=temperature,
                power_draw_watts=power,
            )
        )
    return gpus


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


# ---- the answer


def _gpu(index: int, name: str, uuid: str, **figures: float | None) -> Gpu:
    known = dict.fromkeys(
        (
            "memory_total_gb",
            "memory_used_gb",
            "memory_free_gb",
            "utilization_gpu",
            "temperature_gpu",
            "power_draw_watts",
        )
    )
    rounded = {key: None if v is None else round(v, 4) for key, v in figures.items()}
    return {"index": index, "name": name, "uuid": uuid, **known, **rounded}


def document(gpus: list[Gpu]) -> dict[str, Any]:
    return {
        "hostname": socket.gethostname(),
        "timestamp": time.time(),
        "gpu_count": len(gpus),
        "gpus": gpus,
    }


def handler(read: Callable[[], list[Gpu]], key: str) -> type[BaseHTTPRequestHandler]:
    """Answers requests with what ``read`` finds; with a ``key``, only to those who send it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10  # seconds that a connection may be idle

        def do_GET(self) -> None:
            if self.path == "/health":
                self._answer(200, {"status": "ok"})
            elif key and not self._knows(key):
                self._answer(401, {"error": "wrong key"})
            elif self.path == "/gpu-info":
                self._tell()
            else:
                self._answer(404, {"error": "not found"})

        def _knows(self, key: str) -> bool:
            bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
            given = self.headers.get("X-Sidecar-Key") or bearer
            return hmac.compare_digest(given.encode(), key.encode())

        def _tell(self) -> None:
            try:
                self._answer(200, document(read()))
            except Unreadable as error:
                self._answer(503, {"error": str(error)})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """A line for each poll is more than any log is for."""

    return Handler


def reader() -> Callable[[], list[Gpu]]:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return gpus_of_smi
    return lambda: gpus_of_driver(nvml)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tell the router about this machine's GPUs.")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")
    parser.add_argument("--port", type=int, default=8007)
    options = parser.parse_args()
    key = os.environ.get("GPU_AGENT_KEY", "")
    server = ThreadingHTTPServer((options.host, options.port), handler(reader(), key))
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
