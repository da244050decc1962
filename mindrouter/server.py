"""uvicorn with the gateway's manners: whoever is being served may finish, newcomers are told."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import gc
import importlib
import logging
import os
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn
from django.conf import settings

from scheduler.serving import current

logger = logging.getLogger(__name__)

LARGE_BYTES = 1 << 20
#: Freed memory that is kept for smaller blocks. With glibc's 128 KiB every copy of a body of 400 KB
#: was given back to the system, and asked for again page by page.
KEPT_BYTES = 16 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

#: How long, in seconds, a thread that makes a page may keep the interpreter while the event loop
#: waits for it, as it does for each event. With Python's 5 ms a page made all streams stand still.
SWITCH_SECONDS = 0.0005
#: Objects made before the youngest generation is collected; Python's 700 is for small programs.
GC_THRESHOLD = 20_000


class GatewayServer(uvicorn.Server):
    """On the first signal, new requests get 503 while running ones end within SHUTDOWN_GRACE."""

    _draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and settings.SERVES != "api":
            # The pages take a while to load, and whoever comes meanwhile is served.
            await asyncio.to_thread(importlib.import_module, settings.ROOT_URLCONF)
        # What is loaded by now lives as long as the process: the collector need not look at it
        # again and again while requests make garbage.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD, 20, 50)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining is None and self.started:
            self._captured_signals.append(sig)
            # A signal handler may interrupt the loop anywhere; the loop itself begins the drain.
            asyncio.get_running_loop().call_soon_threadsafe(self._begin_drain)
        else:
            super().handle_exit(sig, frame)

    def _begin_drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        runtime = current()
        if runtime is not None:
            runtime.stopping = True
            await _wait_until_idle(settings.SHUTDOWN_GRACE)
            runtime.cancel_serving()
            await _wait_until_idle(2.0)
        self.should_exit = True


async def _wait_until_idle(seconds: float) -> None:
    runtime = current()
    if runtime is not None and runtime.serving:
        await asyncio.wait(set(runtime.serving), timeout=seconds)


def lock_data_folder(directory: Path) -> int:
    """Hold the data folder for this process; the file descriptor is the lock.

    Two schedulers over one set of slots would each grant all of them.
    Raises: BlockingIOError when another gateway runs on the same folder.
    """
    handle = os.open(directory / "gateway.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    return handle


def configuration(host: str, port: int) -> uvicorn.Config:
    """How the gateway is served."""
    return uvicorn.Config(
        "mindrouter.asgi:application",
        host=host,
        port=port,
        http="mindrouter.gateway.protocol:GatewayProtocol",
        loop="uvloop",
        ws="websockets-sansio",
        access_log=False,
        log_config=None,
        backlog=4096,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )


def give_large_memory_back() -> None:
    """Have memory for large bodies returned to the system as soon as it is freed.

    Left alone, glibc learns from the first large block to keep blocks of that size, and small ones
    settle between them.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def serve(host: str, port: int, sockets: list[socket.socket] | None = None) -> None:
    """Run the gateway and the pages until a signal, on the given sockets if there are any."""
    give_large_memory_back()
    sys.setswitchinterval(SWITCH_SECONDS)
    GatewayServer(configuration(host, port)).run(sockets)
