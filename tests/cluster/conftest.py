"""PostgreSQL for the tests of several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.conf import settings

from tests.scheduler import postgres


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
