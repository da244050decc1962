"""The records and configuration side on PostgreSQL, and what happens while it is away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from scheduler.spool import Record, Spool
from tests.scheduler.postgres import PostgreSQL, find_binaries, postgresql

try:
    find_binaries()
except FileNotFoundError as missing:
    pytest.skip(str(missing), allow_module_level=True)

#: Tests that use the database, run again on PostgreSQL.
SAME_TESTS = (
    "tests/scheduler/test_triggers.py",
    "tests/scheduler/test_apply.py",
    "tests/scheduler/test_export.py",
    "tests/scheduler/test_loading.py",
    "tests/scheduler/test_retention.py",
    "tests/scheduler/test_checkpoint.py",
    "tests/scheduler/test_api_decisions.py",
    "tests/scheduler/test_api_stats.py",
    "tests/accounts/test_key_command.py",
    "tests/accounts/test_weight_constraints.py",
)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSQL]:
    with postgresql() as running:
        yield running


def environment(server: PostgreSQL, folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "DATABASE_URL": server.url,
        "MINDROUTER_DATA": str(folder),
        "MINDROUTER_TEST_KEEP_URLS": "1",
        "LOG_LEVEL": "WARNING",
    }


@pytest.mark.timeout(300)
def test_the_same_tests_pass_on_postgresql(server: PostgreSQL, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SAME_TESTS],
        env=environment(server, tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:]


def test_records_appear_soon_after_the_database_is_back(server: PostgreSQL, tmp_path: Path) -> None:
    """The recorder outlives two outages, the first before it ever had a connection."""
    settings = environment(server, tmp_path)
    subprocess.run([sys.executable, "manage.py", "migrate", "-v0"], env=settings, check=True)
    spool = Spool(tmp_path / "spool")
    server.stop()
    with subprocess.Popen([sys.executable, "manage.py", "runrecorder"], env=settings) as recorder:
        try:
            for outage in ("first", "second"):
                spool.close(Record(request_id=outage, arrived_at=1.0, outcome="completed"))
                time.sleep(4)  # long enough for the longest pause between attempts
                server.start()
                back = time.monotonic()
                while not _is_stored(server, outage):
                    assert time.monotonic() - back < 10, (
                        "not loaded 10 s after the database was back"
                    )
                    time.sleep(0.1)
                server.stop()
        finally:
            server.start()
            recorder.send_signal(signal.SIGTERM)
            assert recorder.wait(20) == 0
    spool.stop()


def _is_stored(server: PostgreSQL, request_id: str) -> bool:
    query = "SELECT outcome FROM scheduler_decision WHERE request_id = %s"
    with psycopg.connect(server.url) as connection:
        return connection.execute(query, [request_id]).fetchone() == ("completed",)
