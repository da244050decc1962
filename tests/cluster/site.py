"""A site of several processes: Redis, schedulers and gateways, on one database."""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from django.conf import settings
from django.db import connection

from tests.factories import make_api_key, make_backend, make_group, make_user
from tests.running import NO_TLS, RawClient
from tests.scheduler.redis import RedisServer

SLOTS = 40


class Process:
    """One of a site's processes; the name of its log is its own."""

    def __init__(self, site: ClusterSite, name: str, *command: str, **environment: str) -> None:
        self.site = site
        self.name = name
        self._command = command
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self.starts = 0
        self.prefix: tuple[str, ...] = ()  # of the command: how to get to the process's host

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return (self.site.folder / f"{self.name}.log").read_text()

    def moment_of(self, words: str) -> datetime:
        """When its log last said so."""
        line = next(line for line in reversed(self.log.splitlines()) if words in line)
        return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f")  # noqa: DTZ007  local time

    async def start(self) -> None:
        self.starts += 1
        with (self.site.folder / f"{self.name}.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.prefix,
                sys.executable,
                "manage.py",
                *self._command,
                cwd=settings.BASE_DIR,
                env=self.site.environment | self._environment,
                stdout=log,
                stderr=log,
            )

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def stop(self) -> int:
        """SIGTERM, and wait for the end; returns the exit status."""
        assert self._process is not None
        self._process.terminate()
        async with asyncio.timeout(60.0):
            return await self._process.wait()

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in path.read_text().split()]


class Gateway(Process):
    """``client`` speaks as the user "ada"."""

    def __init__(
        self,
        site: ClusterSite,
        name: str,
        *options: str,
        host: str = "127.0.0.1",
        **environment: str,
    ) -> None:
        self.host = host
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = ("rungateway", "--host", host, "--port", str(self.port), *options)
        super().__init__(site, name, *command, **environment)
        self.client = httpx.AsyncClient(
            base_url=f"http://{host}:{self.port}",
            headers={"Authorization": f"Bearer {site.key}"},
            timeout=90,
            trust_env=False,
            verify=NO_TLS,
            limits=httpx.Limits(max_connections=None),
        )

    async def serves(self) -> bool:
        """Whether a request gets through to the backend."""
        try:
            response = await self.chat()
        except httpx.TransportError:
            return False
        return response.status_code == httpx.codes.OK

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]} | fields
        return await self.client.post("/v1/chat/completions", json=body)

    async def stream(self) -> str:
        """A whole stream's text."""
        return (await self.chat(stream=True)).text

    async def raw(self) -> RawClient:
        return RawClient(*await asyncio.open_connection(self.host, self.port), self.site.key)

    async def stats(self) -> Any:
        """The scheduler's figures, or None where it does not answer."""
        response = await self.client.get(
            "/api/admin/scheduler/stats", headers={"Authorization": f"Bearer {self.site.root}"}
        )
        return response.json() if response.status_code == httpx.codes.OK else None


class ClusterSite:
    """The processes; ``key`` is ada's, ``root`` the key of a member of the staff."""

    def __init__(self, folder: Path, redis: RedisServer, key: str, root: str) -> None:
        self.folder = folder
        self.redis = redis
        self.key = key
        self.root = root
        self.environment = {
            **os.environ,
            "MINDROUTER_DATA": str(folder),
            "REDIS_URL": redis.url,
            "SECRET_KEY": settings.SECRET_KEY,
            "FIELD_ENCRYPTION_KEY": settings.FIELD_ENCRYPTION_KEY,
            "DJANGO_SETTINGS_MODULE": "mindrouter.settings",
        }
        self.schedulers = [Process(self, f"scheduler{n}", "runscheduler") for n in range(2)]
        self.first = Gateway(self, "gateway")
        self.second = Gateway(self, "workers", "--workers", "2", SERVES="api")

    @property
    def gateways(self) -> tuple[Gateway, Gateway]:
        return self.first, self.second

    @property
    def processes(self) -> list[Process]:
        return [*self.schedulers, self.first, self.second]

    async def start(self) -> None:
        for process in self.processes:
            await process.start()
        for gateway in self.gateways:
            await until(gateway.serves)

    async def close(self) -> None:
        for gateway in self.gateways:
            await gateway.client.aclose()
        for process in self.processes:
            await process.kill()

    def leader(self) -> Process:
        """The scheduler that leads, as its log says."""
        last = {process: process.log.rfind("Leading in epoch") for process in self.schedulers}
        leading = [p for p in self.schedulers if last[p] > p.log.rfind("No longer leading")]
        return max(leading, key=lambda p: p.log[last[p] :].split()[3])

    async def idle(self) -> Any:
        """Wait until nothing runs or waits; the figures then."""
        found: list[Any] = []

        async def is_idle() -> bool:
            stats = await self.first.stats()
            found[:] = [stats]
            return (
                stats is not None
                and stats["queue"]["total"] == 0
                and all(backend["in_flight"] == 0 for backend in stats["backends"])
            )

        await until(is_idle)
        return found[0]

    def change(self, statement: str, *values: Any) -> None:
        """Past Django, as an administrator with SQL would."""
        with sqlite3.connect(self.folder / "db.sqlite3", timeout=60) as database:
            database.execute(statement, values)
        database.close()


async def until(condition: Callable[[], Any]) -> None:
    """Ask again and again, since another process tells nobody."""
    async with asyncio.timeout(60.0):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def prepare(folder: Path, backend_url: str) -> tuple[str, str]:
    """A database with a backend of ``SLOTS`` slots and two users, in the folder."""
    # The budget is there from the start: what was used of a later one is known a poll later.
    group = make_group("ada", scheduler_weight=1, token_budget=1_000_000)
    backend = make_backend(
        "a",
        models=("m",),
        base_url=backend_url,
        engine="vllm",
        max_concurrent=SLOTS,
        max_queue=1000,
    )
    users = make_user("ada", group=group), make_user("root", is_staff=True)
    key, root = map(make_api_key, users)
    with (
        sqlite3.connect(settings.DATABASES["default"]["NAME"]) as source,
        sqlite3.connect(folder / "db.sqlite3") as target,
    ):
        source.backup(target)
    source.close()
    target.close()
    for row in (*users, backend, group):  # the tests' own database is as it was
        row.delete()
    connection.close()
    return key, root
