"""A real Celery worker with its beat inside, as it runs in embedded mode."""

from __future__ import annotations

import itertools
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path

import pytest
from django.conf import settings

from backends.probe import TOTAL_SECONDS
from tests.stubs.engines import Stub, openai_stub

_ROOT = Path(__file__).resolve().parents[2]


class Site:
    """A data folder of its own, with the backends that a test puts into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "MINDROUTER_DATA": str(folder),
            "DJANGO_SETTINGS_MODULE": "mindrouter.settings",
        }

    def manage(self, *arguments: str) -> None:
        command = [sys.executable, "manage.py", *arguments]
        subprocess.run(command, cwd=_ROOT, env=self.environment, check=True, capture_output=True)

    def add(self, **backends: Stub) -> None:
        entries = "".join(
            f"  - {{name: {name}, base_url: '{stub.url}', poll_interval: 1}}\n"
            for name, stub in backends.items()
        )
        code = (
            "from backends.models import Backend\n"
            "import yaml, sys\n"
            f"for fields in yaml.safe_load('''\n{entries}'''): Backend.objects.create(**fields)\n"
        )
        self.manage("shell", "-c", code)

    def query(self, statement: str, *values: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.folder / "db.sqlite3", timeout=20)) as database:
            return database.execute(statement, values).fetchall()

    def note_claims(self) -> None:
        """Have the database itself note when each poll was begun: a stub's own notes come late
        whenever the tests' process stands still."""
        with closing(sqlite3.connect(self.folder / "db.sqlite3", timeout=20)) as database:
            database.executescript(
                "CREATE TABLE noted (backend, at);"
                "CREATE TRIGGER note AFTER UPDATE OF attempted_at ON backends_backendstatus "
                "WHEN NEW.attempted_at IS NOT OLD.attempted_at BEGIN "
                "INSERT INTO noted VALUES (NEW.backend_id, NEW.attempted_at); END;"
            )

    def claims(self, name: str) -> list[float]:
        """When the polls of a backend were begun, in seconds."""
        found = self.query(
            "SELECT at FROM noted JOIN backends_backend ON backends_backend.id = backend "
            "WHERE name = ? ORDER BY at",
            name,
        )
        return [datetime.fromisoformat(str(at)).timestamp() for (at,) in found]

    @contextmanager
    def worker(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "celery", "-A", "mindrouter", "worker", "--beat"]
        command += ["--pool", "threads", "--concurrency", "4", "--loglevel", "WARNING", *options]
        with (self.folder / "worker.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=_ROOT, env=self.environment, stdout=log, stderr=log
            )
            try:
                yield process
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(20)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    site.manage("migrate", "--verbosity", "0")
    return site


def wait_for_polls(stub: Stub, count: int) -> None:
    """Wait for ``count`` polls of a plain server."""
    ends = time.monotonic() + 60
    while stub.count("/v1/models") < count:
        assert time.monotonic() < ends, f"{stub.count('/v1/models')} polls, not {count}"
        time.sleep(0.05)


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def test_workers_poll_each_backend_once_per_interval_and_a_hung_one_delays_no_other(
    site: Site,
) -> None:
    with openai_stub("m") as well, openai_stub("m") as hung:
        hung.fault = "hang"
        site.add(well=well, hung=hung)
        site.note_claims()
        second_beat = ["--schedule", str(site.folder / "second"), "--hostname", "second@host"]
        with site.worker("--hostname", "first@host"), site.worker(*second_beat):
            wait_for_polls(well, 6)
    times = site.claims("well")
    assert well.count("/v1/models") <= len(times)
    # Two workers, each with a beat, and yet about one poll a second. Never two at once.
    assert min(gaps(times)) > 0.15
    assert statistics.median(gaps(times)) < 2.5
    # The next poll of the hung one begins when the one before has been given up.
    assert hung.count("/v1/models") <= len(site.claims("hung"))
    assert min(gaps(site.claims("hung"))) > TOTAL_SECONDS - 1
    assert site.query("SELECT name, listed FROM backends_backendmodel") == [("m", 1)]


def test_the_task_has_the_name_that_the_beat_calls() -> None:
    from mindrouter.celery import app

    app.loader.import_default_modules()
    assert {entry["task"] for entry in settings.CELERY_BEAT_SCHEDULE.values()} <= set(app.tasks)
