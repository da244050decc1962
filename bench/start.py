"""How long it takes from ``manage.py start`` to the first answer, all processes on one machine.

    .venv/bin/python -m bench.start [--starts 5]

A first start, which makes the database, comes before those that are measured. The demo is left out:
its language models are servers of their own.
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.servers import ROOT, favoured, free_port

PATIENCE_SECONDS = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--starts", type=int, default=5)
    options = parser.parse_args()
    with favoured(), tempfile.TemporaryDirectory() as folder:
        print(f"first start, which makes the database: {start(Path(folder)):.2f} s", flush=True)
        found = sorted(start(Path(folder)) for _ in range(options.starts))
    middle = statistics.median(found)
    print(f"start to first answer: {middle:.2f} s ({found[0]:.2f}-{found[-1]:.2f})")


def start(folder: Path) -> float:
    """Seconds until ``/healthz`` answers. Raises: RuntimeError."""
    port = free_port()
    env = {
        **os.environ,
        "MINDROUTER_DATA": str(folder),
        "DATABASE_URL": f"sqlite:///{folder}/db.sqlite3",
        "DEMO": "0",
        "PORT": str(port),
    }
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # as where it is used
    began = time.monotonic()
    with (folder / "start.out").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "start"],
            cwd=ROOT,
            env=env,
            stdout=output,
            stderr=output,
        )
    try:
        while not answers(port):
            if process.poll() is not None or time.monotonic() - began > PATIENCE_SECONDS:
                raise RuntimeError((folder / "start.out").read_text()[-2000:])
            time.sleep(0.01)
        return time.monotonic() - began
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    main()
