"""Several gateway processes on one port, each started again when it ends."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

#: A process that ends sooner is not started again at once.
SHORT_LIFE_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1  # prctl.h


def listen(host: str, port: int) -> socket.socket:
    """The socket that all workers accept from. Raises: OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(4096)
    listener.set_inheritable(True)
    return listener


class Workers:
    """The processes; on SIGTERM or SIGINT each gets SIGTERM and ends its streams first."""

    def __init__(self, command: list[str], listener: socket.socket, number: int) -> None:
        self._command = [*command, "--listener", str(listener.fileno())]
        self._listener = listener
        self._number = number
        self._running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}
        self._stopping = False

    def run(self) -> None:
        """Until all have ended after a signal."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop())
        for _ in range(self._number):
            self._start()
        while self._running:
            self._restart(os.waitpid(-1, 0)[0])

    def _start(self) -> None:
        process = subprocess.Popen(  # noqa: S603  our own command
            self._command,
            pass_fds=[self._listener.fileno()],
            start_new_session=True,  # a terminal's Ctrl-C comes through here
            preexec_fn=_dying_with_parent(),  # noqa: PLW1509  no threads here
        )
        self._running[process.pid] = process, time.monotonic()
        if self._stopping:  # a signal came meanwhile
            process.send_signal(signal.SIGTERM)

    def _restart(self, pid: int) -> None:
        _, began = self._running.pop(pid, (None, 0.0))
        if self._stopping:
            return
        logger.error("Gateway process %d ended; another one starts", pid)
        if time.monotonic() - began < SHORT_LIFE_SECONDS:
            time.sleep(SHORT_LIFE_SECONDS)
        if not self._stopping:
            self._start()

    def _stop(self) -> None:
        self._stopping = True
        for process, _ in list(self._running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)


def _dying_with_parent() -> Callable[[], None] | None:
    """Have the kernel stop a worker whose parent was killed: it would keep the port."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # not Linux
        return None
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def manage(*arguments: str) -> list[str]:
    """The command line of ``manage.py`` with this Python."""
    return [sys.executable, sys.argv[0], *arguments]
