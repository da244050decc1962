"""PostgreSQL, a backend and a site for the tests of several processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from django.conf import settings

from tests.cluster.site import ClusterSite
from tests.scheduler import postgres
from tests.scheduler.redis import RedisServer
from tests.stubs.openai_stub import OpenAIStub

MakeSite = Callable[[Path, RedisServer, postgres.PostgreSQL], ClusterSite]


@pytest.fixture(scope="session")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[postgres.PostgreSQL]:
    """One server for all; its own database has the tables and is there to be copied."""
    try:
        with postgres.postgresql() as server:
            _migrate(server, tmp_path_factory.mktemp("tables"))
            yield server
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


def _migrate(server: postgres.PostgreSQL, folder: Path) -> None:
    environment = {**os.environ, "DATABASE_URL": server.url, "MINDROUTER_DATA": str(folder)}
    command = [sys.executable, "manage.py", "migrate", "-v0", "--skip-checks"]
    subprocess.run(command, cwd=settings.BASE_DIR, env=environment, check=True)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stub() -> AsyncIterator[OpenAIStub]:
    """The backend of one file's site."""
    async with await OpenAIStub.start() as server:
        yield server


@pytest.fixture(scope="module")
def make_site() -> MakeSite:
    """A file with a site of its own kind has this of its own."""
    return lambda folder, redis, server: ClusterSite(folder, redis, server.copy(folder.name))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def site(
    make_site: MakeSite,
    redis: RedisServer,
    postgresql: postgres.PostgreSQL,
    stub: OpenAIStub,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[ClusterSite]:
    """Running processes, for one file's tests."""
    site = make_site(tmp_path_factory.mktemp("site"), redis, postgresql)
    await asyncio.to_thread(site.configure, stub.url)
    try:
        await site.start()
        yield site
    finally:
        await site.close()
