"""Loopback servers that answer polls as vLLM, Ollama, SGLang, llama.cpp or a plain server do.

The answers are cut from captured ones. Faults: hang, HTML in place of JSON, garbage in place of
HTTP, statuses, an endless body, a redirect.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

HTML = b"<!DOCTYPE html><html><body>It works!</body></html>"


@dataclass
class Answer:
    """``body`` other than bytes is sent as JSON."""

    body: Any = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def data(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass
class Asked:
    """A request that a stub has seen."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answers = dict[str, Answer | Callable[[Asked], Answer]]


class Stub:
    """A server on a free loopback port; a context manager. ``answers`` may be changed while it
    runs: path (or "METHOD path") -> answer. ``fault`` overrides all answers."""

    def __init__(self, answers: Answers, server: str = "uvicorn", port: int = 0) -> None:
        self.answers = answers
        self.server = server
        self.fault: str | None = None
        self.asked: list[Asked] = []
        self._released = threading.Event()
        self._http = _Server(("127.0.0.1", port), _handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def count(self, path: str) -> int:
        return sum(asked.path == path for asked in self.asked)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def hang(self, asked: Asked) -> Answer:
        """An answer that comes only when the stub ends."""
        self._released.wait(30)
        return Answer()

    def reply(self, asked: Asked) -> Answer | None:
        """The answer to send; None closes the connection without one."""
        self.asked.append(asked)
        if self.fault == "hang":
            return self.hang(asked)
        if self.fault is not None:
            return FAULTS[self.fault]
        answer = self.answers.get(f"{asked.method} {asked.path}") or self.answers.get(asked.path)
        if answer is None:
            return Answer({"detail": "Not Found"}, 404)
        return answer(asked) if callable(answer) else answer


FAULTS = {
    "html": Answer(HTML, headers={"Content-Type": "text/html"}),
    "garbage": Answer(b"\x00\xff garbage \x01", headers={"raw": "yes"}),
    "500": Answer({"error": "boom"}, 500),
    "503": Answer({"error": {"message": "Loading model", "code": 503}}, 503),
    "401": Answer({"error": {"message": "Invalid API Key", "code": 401}}, 401),
    "huge": Answer(b"[" + b"0," * 5_000_000 + b"0]"),
    "deep": Answer(b"[" * 100_000),
    "redirect": Answer(b"", 302, {"Location": "http://127.0.0.1:9/"}),
    "empty": Answer(b""),
    "null": Answer(None),
    "list": Answer([[], {}, 1]),
}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64


def _handler(stub: Stub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body leave in one packet
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            answer = stub.reply(Asked(self.command, self.path, headers, body))
            if answer is None or "raw" in answer.headers:
                self.close_connection = True
                self.wfile.write(b"" if answer is None else answer.data)
                return
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.data)))
            self.end_headers()
            self.wfile.write(answer.data)

        do_POST = do_GET  # noqa: N815 - the name is http.server's

        def version_string(self) -> str:
            return stub.server

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            # The poll may have gone away, which is its right.
            with contextlib.suppress(ConnectionError, ValueError):
                super().handle()

    return Handler


# ---- the engines


def vllm_stub(*models: str, port: int = 0) -> Stub:
    """vLLM with 2 requests running and 3 waiting."""
    entries = [
        {"id": name, "object": "model", "owned_by": "vllm", "parent": None, "max_model_len": 2048}
        for name in models or ("smollm2",)
    ]
    return Stub(
        {
            "/health": Answer(),
            "/version": Answer({"version": "0.32.0"}),
            "/v1/models": Answer({"object": "list", "data": entries}),
            "/metrics": Answer(VLLM_METRICS.encode()),
            "/openapi.json": Answer({"paths": {"/v1/chat/completions": {}, "/v1/models": {}}}),
        },
        port=port,
    )


VLLM_METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smollm2"} 2.0
vllm:num_requests_running_created{engine="0",model_name="smollm2"} 1.79595297461e+09
vllm:num_requests_waiting{engine="0",model_name="smollm2"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smollm2",reason="capacity"} 3.0
vllm:engine_sleep_state{engine="0",model_name="smollm2",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="smollm2",sleep_state="discard_all"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="smollm2"} 0.25
"""


def llamacpp_stub(name: str = "smollm2", *, embeddings: bool = False, port: int = 0) -> Stub:
    """llama.cpp with 2 slots of 2048 tokens, 2 requests running and 3 waiting."""
    entry = {
        "id": name,
        "aliases": [name],
        "object": "model",
        "owned_by": "llamacpp",
        "meta": {"n_ctx": 2048, "n_ctx_train": 8192, "size": 96576768},
    }
    props = {
        "default_generation_settings": {"n_ctx": 2048},
        "total_slots": 2,
        "model_alias": name,
        "model_path": f"/models/{name}.gguf",
        "modalities": {"vision": False, "audio": False},
        "chat_template_caps": {"supports_tools": False},
        "build_info": "b7000-abc",
        "is_sleeping": False,
    }
    metrics = b"llamacpp:requests_processing 2\nllamacpp:requests_deferred 3\n"
    return Stub(
        {
            "/health": Answer({"status": "ok"}),
            "/v1/models": Answer({"object": "list", "data": [entry]}),
            "/props": Answer(props),
            "/metrics": Answer(metrics),
            "POST /v1/embeddings": Answer(
                {"error": {"type": "not_supported_error"}}, 400 if embeddings else 501
            ),
        },
        server="llama.cpp",
        port=port,
    )


def sglang_stub(name: str = "qwen", *, port: int = 0) -> Stub:
    """SGLang with two data-parallel ranks; it copies some of Ollama's paths."""
    ranks = [
        {
            "dp_rank": rank,
            "num_running_reqs": 3 + rank,
            "num_waiting_reqs": rank,
            "max_running_requests": 16,
            "token_usage": 0.5 * rank,
        }
        for rank in (0, 1)
    ]
    info = {
        "model_path": "/models/qwen",
        "is_generation": True,
        "has_image_understanding": True,
        "tool_call_parser": "qwen25",
    }
    entry = {"id": name, "object": "model", "owned_by": "sglang", "max_model_len": 32768}
    return Stub(
        {
            "/health": Answer(),
            "/v1/models": Answer({"object": "list", "data": [entry]}),
            "/model_info": Answer(info),
            "/v1/loads?include=core,memory,queues": Answer({"version": "0.5.23", "loads": ranks}),
            "/api/tags": Answer({"models": [{"name": name, "model": name}]}),
        },
        port=port,
    )


@dataclass
class OllamaModel:
    """A model on an Ollama stub's disk. Sizes in bytes; ``size_vram`` None: not loaded."""

    name: str
    capabilities: tuple[str, ...] = ("completion", "tools")
    size: int = 2048 * 1024 * 1024
    size_vram: int | None = None
    context: int = 4096
    digest: str = ""


def ollama_stub(*models: OllamaModel, version: str = "0.12.0", port: int = 0) -> Stub:
    """Ollama; the models' largest context is 131,072 tokens."""
    on_disk = models or (OllamaModel("llama3.2:latest"),)

    def listed(model: OllamaModel) -> dict[str, Any]:
        return {
            "name": model.name,
            "model": model.name,
            "size": model.size,
            "digest": model.digest or f"sha-{model.name}",
            "details": {"format": "gguf", "family": "llama"},
        }

    def show(asked: Asked) -> Answer:
        wanted = json.loads(asked.body)["model"]
        for model in on_disk:
            if model.name == wanted:
                info = {"general.architecture": "llama", "llama.context_length": 131072}
                capabilities = list(model.capabilities)
                return Answer({"model_info": info, "capabilities": capabilities, "license": "MIT"})
        return Answer({"error": f"model '{wanted}' not found"}, 404)

    loaded = [
        listed(m) | {"size_vram": m.size_vram, "context_length": m.context}
        for m in on_disk
        if m.size_vram is not None
    ]
    return Stub(
        {
            "/api/version": Answer({"version": version}),
            "/api/tags": Answer({"models": [listed(model) for model in on_disk]}),
            "/api/ps": Answer({"models": loaded}),
            "POST /api/show": show,
            "/v1/models": Answer({"data": [{"id": m.name, "owned_by": "library"} for m in models]}),
        },
        port=port,
    )


def openai_stub(*models: str, port: int = 0) -> Stub:
    """A server that lists its models and tells nothing else."""
    entries = [{"id": name, "object": "model", "owned_by": "acme"} for name in models or ("m",)]
    return Stub({"/v1/models": Answer({"object": "list", "data": entries})}, port=port)


STUBS: dict[str, Callable[[], Stub]] = {
    "vllm": vllm_stub,
    "llamacpp": llamacpp_stub,
    "ollama": ollama_stub,
    "sglang": sglang_stub,
    "openai": openai_stub,
}


# ---- nodes

DCGM_METRICS = """\
# HELP DCGM_FI_DEV_FB_USED Framebuffer memory used (in MiB).
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",modelName="NVIDIA A100",Hostname="gpu-1"} 20480
DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-b",modelName="NVIDIA A100",Hostname="gpu-1"} 1024
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-a",modelName="NVIDIA A100",Hostname="gpu-1"} 20000
DCGM_FI_DEV_FB_FREE{gpu="1",UUID="GPU-b",modelName="NVIDIA A100",Hostname="gpu-1"} 39456
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",modelName="NVIDIA A100",Hostname="gpu-1"} 90
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-b",modelName="NVIDIA A100",Hostname="gpu-1"} 10
"""

GPU_INFO = {
    "hostname": "gpu-1",
    "gpu_count": 2,
    "gpus": [
        {
            "index": 0,
            "name": "NVIDIA A100",
            "uuid": "GPU-a",
            "memory_total_gb": 40.0,
            "memory_used_gb": 20.0,
            "memory_free_gb": 20.0,
            "utilization_gpu": 90,
        },
        {
            "index": 1,
            "name": "NVIDIA A100",
            "uuid": "GPU-b",
            "memory_total_gb": 40.0,
            "memory_used_gb": 1.5,
            "memory_free_gb": 38.5,
            "utilization_gpu": 10,
        },
    ],
}


def node_stub(body: Any = GPU_INFO, *, port: int = 0) -> Stub:
    """A node's telemetry at /gpu-info (JSON) and /metrics (DCGM exporter)."""
    return Stub({"/gpu-info": Answer(body), "/metrics": Answer(DCGM_METRICS.encode())}, port=port)
