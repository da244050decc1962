"""A Redis of a test's own, which can be frozen, emptied, stopped and started again."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RedisServer:
    """A server on a port of its own; it keeps nothing on disk."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.options: tuple[str, ...] = ()

    def start(self) -> None:
        """Start it, empty, and wait until it takes connections."""
        options = ("--save", "", "--appendonly", "no", "--dir", str(self._folder))
        self._process = subprocess.Popen(
            [
                self._program,
                "--port",
                str(self.port),
                "--bind",
                "127.0.0.1",
                *options,
                *self.options,
            ],
            stdout=subprocess.DEVNULL,
        )
        end = time.monotonic() + 30
        while not self._answers():
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError("redis-server did not start")
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def kill(self) -> None:
        """As a crash: connections break, and what it knew is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def freeze(self) -> None:
        """Sockets stay open, and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def redis_server(kind: type[RedisServer] = RedisServer) -> Iterator[RedisServer]:
    """A running server. Raises: FileNotFoundError where Redis is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        raise FileNotFoundError("redis-server is not in the path")
    folder = Path(tempfile.mkdtemp(prefix="mindrouter-redis-"))
    server = kind(program, folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
