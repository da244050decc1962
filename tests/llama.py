"""A real llama.cpp server with a real small model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = Path(os.environ.get("MINDROUTER_DEMO_MODEL") or Path(sys.prefix) / "share" / "smollm2.gguf")


@contextmanager
def llama_server(*options: str) -> Iterator[str]:
    """The address of a server with these options of ``deploy/llama_server.py``."""
    fetch = [sys.executable, str(ROOT / "deploy" / "fetch_model.py"), str(MODEL)]
    subprocess.run(fetch, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(ROOT / "deploy" / "llama_server.py")
    command = [sys.executable, script, "--model", str(MODEL), "--port", str(port), *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    assert any(line.startswith("READY") for line in server.stdout)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        server.stdout.close()
