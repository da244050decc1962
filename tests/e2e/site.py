"""A whole site: ``manage.py start`` with its processes, as ``make run`` starts it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
MODEL = Path(os.environ.get("MINDROUTER_DEMO_MODEL") or ROOT / ".venv/share/smollm2.gguf")


def free_port() -> int:
    """A port with the demo's, a thousand above, and those of a cluster's servers free too."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
        if port < 63000 and all(_is_free(port + n) for n in (1000, 1001, 2000, 2001)):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


class Site:
    """A running site and what its console said."""

    def __init__(self, data: Path, command: str = "start", **environment: str) -> None:
        self.command = command
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.data = data
        self.environment = {
            **os.environ,
            "MINDROUTER_DATA": str(data),
            "PORT": str(self.port),
            "HOST": "127.0.0.1",
            "MINDROUTER_DEMO_MODEL": str(MODEL),
            **environment,
        }
        self.log = data.with_suffix(".log")
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "manage.py", self.command],
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def console(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def key(self) -> str:
        found = re.search(r"mr-[0-9a-f]{64}", self.console)
        assert found, self.console
        return found[0]

    def until(self, what: str, is_true: Callable[[], object], seconds: float = 60.0) -> None:
        """Wait until ``is_true``; the processes are separate, so there is only asking again."""
        end = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < end, f"not within {seconds} s: {what}\n{self.console[-4000:]}"
            assert self.process.poll() is None, self.console[-4000:]
            time.sleep(0.05)

    def serves(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def manage(self, *arguments: str, stdin: str = "") -> str:
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            check=False,
            cwd=ROOT,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def processes(self) -> dict[int, str]:
        """{pid: command line} of every process that has this site's data folder."""
        mine = f"MINDROUTER_DATA={self.data}".encode()
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            try:
                if mine in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if command:
                        found[int(folder.name)] = command
            except OSError:
                continue
        return found

    def pids(self, part: str) -> set[int]:
        """The processes that the supervisor started with ``part`` in their command line.

        A child that a process forks to run another program shows its parent's command line until
        it does, and is gone a moment later: it does not count.
        """
        every = self.processes()
        return {
            pid
            for pid, command in every.items()
            if part in command and part not in every.get(parent_of(pid), "")
        }

    def stop(self, seconds: float = 30.0) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(seconds)


def parent_of(pid: int) -> int:
    """0 where the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


@contextmanager
def running_site(data: Path, command: str = "start", **environment: str) -> Iterator[Site]:
    """A site that serves; stopped, by force if need be, at the end."""
    site = Site(data, command, **environment)
    try:
        site.until("healthz answers", site.serves, 180)
        yield site
    finally:
        try:
            site.stop()
        finally:
            for pid in site.processes():
                os.kill(pid, signal.SIGKILL)
