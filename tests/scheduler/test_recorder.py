"""``manage.py runrecorder``: goes on through failures and loads what is left before it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.conf import settings
from django.db import OperationalError

from scheduler.management.commands import runrecorder
from scheduler.spool import Record, Spool


class Steps:
    """A loader that does one thing after the other, then asks to stop."""

    def __init__(self, *steps: int | Exception) -> None:
        self.steps = list(steps)
        self.stop = threading.Event()

    def offsets(self) -> dict[str, int]:
        return {}

    def load(self) -> int:
        step = self.steps.pop(0) if self.steps else 0
        if not self.steps:
            self.stop.set()
        if isinstance(step, Exception):
            raise step
        return step


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, without making them."""
    seen: list[float] = []

    def wait(event: threading.Event, timeout: float) -> bool:
        seen.append(timeout)
        return event.is_set()

    monkeypatch.setattr(threading.Event, "wait", wait)
    return seen


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry per time the database connection was closed."""
    seen: list[bool] = []
    fake = SimpleNamespace(close=lambda: seen.append(True))
    monkeypatch.setattr(runrecorder, "connection", fake)
    return seen


def run(steps: Steps) -> None:
    counting = runrecorder.Counting(settings.STATE_DIR / "counts")
    runrecorder.run(steps, steps.stop, counting)  # type: ignore[arg-type]


def test_it_backs_off_up_to_two_seconds_while_the_database_is_away(
    pauses: list[float], closed: list[bool]
) -> None:
    away = [OperationalError("away")] * 6
    run(Steps(1, *away, 3, 0))
    assert pauses == [0, 0.25, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 0.25, 0.25]
    assert len(closed) == 7  # after each failure and at the end


def test_a_failure_after_a_success_starts_the_back_off_anew(
    pauses: list[float], closed: list[bool]
) -> None:
    run(Steps(OperationalError("away"), OperationalError("away"), 1, OSError("gone"), 0))
    assert pauses == [0, 0.2, 0.4, 0.25, 0.2, 0.25]


def test_an_idle_recorder_gives_its_connection_back(
    pauses: list[float], closed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runrecorder, "IDLE_SECONDS", -1.0)
    run(Steps(0, 0))
    assert len(closed) == 3


def test_the_recorder_uses_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"OPTIONS": {"pool": {"max_size": 8}}}
    monkeypatch.setattr(runrecorder, "connection", SimpleNamespace(settings_dict=settings))
    runrecorder.use_a_plain_connection()
    assert settings == {"OPTIONS": {"connect_timeout": 5}}


def test_the_process_loads_what_came_and_stops_when_told(tmp_path: Path) -> None:
    """The real process: starts before there are tables, ends with everything loaded."""
    environment = {**os.environ, "MINDROUTER_DATA": str(tmp_path), "LOG_LEVEL": "WARNING"}
    environment.pop("DATABASE_URL", None)

    def manage(*arguments: str) -> list[str]:
        return [sys.executable, "manage.py", *arguments]

    with subprocess.Popen(
        manage("runrecorder"), env=environment, stderr=subprocess.PIPE, text=True
    ) as recorder:
        try:
            spool = Spool(tmp_path / "spool")
            spool.close(Record(request_id="early", arrived_at=1.0, outcome="completed"))
            assert recorder.stderr is not None
            assert "Records wait in the spool" in recorder.stderr.readline()
            subprocess.run(manage("migrate", "-v0"), env=environment, check=True)
            spool.close(Record(request_id="late", arrived_at=2.0, outcome="refused"))
            spool.stop()
        finally:
            recorder.send_signal(signal.SIGTERM)
        assert recorder.wait(20) == 0
    query = (
        "from scheduler.models import Decision;"
        "print(*Decision.objects.values_list('request_id', 'outcome'))"
    )
    shell = subprocess.run(
        manage("shell", "-v0", "-c", query),
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert shell.stdout.strip() == "('late', 'refused') ('early', 'completed')"
    assert list((tmp_path / "spool").iterdir()) == []
