"""The router as a process of its own, on a copy of the test's database."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import httpx
from django.conf import settings
from django.db import connection

from scheduler.loading import load
from scheduler.models import Decision
from scheduler.spool import MARKER
from tests.factories import make_api_key, make_backend, make_group, make_user
from tests.running import LONG, NO_TLS, RawClient

#: What runs daphne. A stream with the word "explode" in it meets a fault of our own.
DAPHNE = """
import sys
import daphne.server
import mindrouter.asgi
from daphne.cli import CommandLineInterface
from mindrouter.gateway.events import EventStream
feed = EventStream.feed
def explode(self, data):
    if b"explode" in data:
        raise RuntimeError("forced")
    return feed(self, data)
EventStream.feed = explode
CommandLineInterface().run(["-b", "127.0.0.1", "-p", sys.argv[1], "mindrouter.asgi:application"])
"""
COMMANDS = {
    "uvicorn": ["manage.py", "rungateway", "--host", "127.0.0.1", "--port"],
    "daphne": ["-c", DAPHNE],
}


class RouterProcess:
    """One process; `client` and `raw` speak as the user "ada"."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.key = key
        self.port = _free_port()
        self.client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
            trust_env=False,
            verify=NO_TLS,
        )
        self.process: asyncio.subprocess.Process
        self._raw: list[RawClient] = []

    async def start(self, server: str = "uvicorn", **environment: str) -> Self:
        """Start it and wait until it serves."""
        log = (self.folder / "log").open("ab")
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *COMMANDS[server],
            str(self.port),
            cwd=settings.BASE_DIR,
            env={
                **os.environ,
                "MINDROUTER_DATA": str(self.folder),
                "SECRET_KEY": settings.SECRET_KEY,
                "FIELD_ENCRYPTION_KEY": settings.FIELD_ENCRYPTION_KEY,
                "DJANGO_SETTINGS_MODULE": "mindrouter.settings",
                **environment,
            },
            stdout=log,
            stderr=log,
        )
        log.close()
        began = time.monotonic()
        while not await self._serves():
            assert self.process.returncode is None, self.log()[-3000:]
            assert time.monotonic() - began < 120, self.log()[-3000:]
            await asyncio.sleep(0.05)
        return self

    async def _serves(self) -> bool:
        try:
            # Not /healthz alone: daphne starts the scheduler with the first request.
            return (await self.client.get("/v1/models")).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self, within: float = LONG) -> int:
        """Wait for the end; returns the exit status."""
        async with asyncio.timeout(within):
            return await self.process.wait()

    async def raw(self) -> RawClient:
        streams = await asyncio.open_connection("127.0.0.1", self.port)
        self._raw.append(RawClient(*streams, self.key))
        return self._raw[-1]

    def log(self) -> str:
        return (self.folder / "log").read_text()

    async def records(self, count: int, within: float = 30.0) -> list[Decision]:
        """Wait until there are so many records; in the order of arrival."""
        async with asyncio.timeout(within):
            while True:
                found = await asyncio.to_thread(self._load)
                if len(found) >= count:
                    assert len(found) == count, found
                    return found
                await asyncio.sleep(0.05)

    async def until_begun(self, count: int) -> None:
        """Wait until so many requests have come in all, as the spool says."""
        async with asyncio.timeout(LONG):
            while self.begun() < count:  # noqa: ASYNC110  another process
                await asyncio.sleep(0.01)

    def begun(self) -> int:
        """Requests whose start is in the spool; nothing is taken out of it before ``records``."""
        files = [path.read_bytes() for path in (self.folder / "spool").glob("*.*")]
        return sum(data.count(MARKER) for data in files)

    def _load(self) -> list[Decision]:
        try:
            load(self.folder / "spool")
            return list(Decision.objects.order_by("arrived_at", "id"))
        finally:
            connection.close()

    async def close(self) -> None:
        await self.client.aclose()
        for client in self._raw:
            client.reset()
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def router_process(
    folder: Path, backend_url: str, server: str = "uvicorn", **environment: str
) -> AsyncIterator[RouterProcess]:
    """A process with the backend "a", which has the model "m" and two slots."""
    key = await asyncio.to_thread(_prepare, folder, backend_url)
    router = RouterProcess(folder, key)
    try:
        yield await router.start(server, **environment)
    finally:
        await router.close()


def _prepare(folder: Path, backend_url: str) -> str:
    try:
        make_backend("a", models=("m",), base_url=backend_url, engine="vllm", max_concurrent=2)
        key = make_api_key(make_user("ada", group=make_group("ada")))
        with (
            sqlite3.connect(settings.DATABASES["default"]["NAME"]) as source,
            sqlite3.connect(folder / "db.sqlite3") as target,
        ):
            source.backup(target)
        target.close()
        source.close()
        return key
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
