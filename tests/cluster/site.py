"""A site of several processes: PostgreSQL, Redis, schedulers, gateways and a recorder."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psycopg
from django.conf import settings

from tests.running import NO_TLS, RawClient
from tests.scheduler.redis import RedisServer

SLOTS = 40
POOL_SIZE = 3
# The budget is there from the start: what was used of a later one is known a poll later.
CONFIGURATION = """
groups: [{{name: ada, scheduler_weight: 1, token_budget: 1000000}}]
users: [{{username: ada, group: ada}}, {{username: root, is_staff: true, is_superuser: true}}]
api_keys: [{{user: ada, name: a, key: "{key}"}}, {{user: root, name: r, key: "{root}"}},
  {{user: ada, name: spare, key: "{spare}"}}]
backends:
  - {{name: a, base_url: "{url}", engine: vllm, max_concurrent: {slots}, max_queue: 1000,
      models: [{{name: m}}]}}
"""


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
                env=self.site.environment | self._environment | self._named_in_the_database(),
                stdout=log,
                stderr=log,
            )

    def _named_in_the_database(self) -> dict[str, str]:
        url = self.site.environment["DATABASE_URL"]
        return {"DATABASE_URL": f"{url}?application_name={self.name}"}

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

    async def administer(self, path: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.site.root}"}
        return await self.client.get(f"/api/admin/{path}", headers=headers)

    async def stats(self) -> Any:
        """The scheduler's figures, or None where it does not answer."""
        response = await self.administer("scheduler/stats")
        return response.json() if response.status_code == httpx.codes.OK else None


class ClusterSite:
    """The processes; ``key`` is ada's, ``spare`` another of hers that nothing else uses, ``root``
    the key of a member of the staff."""

    key = "mr-" + "a" * 64
    root = "mr-" + "f" * 64
    spare = "mr-" + "5" * 64

    def __init__(self, folder: Path, redis: RedisServer, database: str) -> None:
        self.folder = folder
        self.redis = redis
        self.database = database
        self.environment = {
            **os.environ,
            "MINDROUTER_DATA": str(folder),
            "REDIS_URL": redis.url,
            "DATABASE_URL": database,
            "DATABASE_POOL_SIZE": str(POOL_SIZE),
            "SECRET_KEY": settings.SECRET_KEY,
            # Whoever asks until all processes know a change asks some with a wrong key meanwhile.
            "FAILED_KEYS_PER_MINUTE": "1000000",
            "FIELD_ENCRYPTION_KEY": settings.FIELD_ENCRYPTION_KEY,
            "DJANGO_SETTINGS_MODULE": "mindrouter.settings",
        }
        self.schedulers = [Process(self, f"scheduler{n}", "runscheduler") for n in range(2)]
        self.first = Gateway(self, "gateway")
        self.second = Gateway(self, "workers", "--workers", "2", SERVES="api")
        self.recorder = Process(self, "recorder", "runrecorder")

    def configure(self, backend_url: str) -> None:
        """Two users, and at that address the backend "a" with ``SLOTS`` slots."""
        keys = {"key": self.key, "spare": self.spare, "root": self.root}
        text = CONFIGURATION.format(**keys, url=backend_url, slots=SLOTS)
        self.manage("apply", "-", given=text)

    def manage(self, *command: str, given: str = "", **environment: str) -> None:
        subprocess.run(
            [sys.executable, "manage.py", *command],
            cwd=settings.BASE_DIR,
            env=self.environment | environment,
            input=given,
            text=True,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    @property
    def gateways(self) -> tuple[Gateway, Gateway]:
        return self.first, self.second

    @property
    def processes(self) -> list[Process]:
        return [*self.schedulers, *self.gateways, self.recorder]

    async def start(self) -> None:
        for process in self.processes:
            await process.start()
        for gateway in self.gateways:
            await until(gateway.serves, within=240.0)  # seven processes start at once

    async def close(self) -> None:
        for gateway in self.gateways:
            await gateway.client.aclose()
        for process in self.processes:
            await process.kill()

    def leader(self) -> Process:
        """The scheduler that leads, as its log says."""
        last = {process: process.log.rfind("Leading in epoch") for process in self.schedulers}
        leading = [p for p in self.schedulers if last[p] > p.log.rfind("No longer leading")]
        return max(leading, key=lambda p: int(p.log[last[p] :].split()[3]))

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

    def change(self, statement: str) -> None:
        """Past Django, as an administrator with SQL would."""
        with psycopg.connect(self.database) as database:
            database.execute(statement)

    def select(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database) as database:
            return database.execute(query).fetchall()


async def until(condition: Callable[[], Any], within: float = 60.0) -> None:
    """Ask again and again, since another process tells nobody."""
    async with asyncio.timeout(within):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
