"""``manage.py doctor`` names what is missing, says what to do, and fails only for problems."""

from __future__ import annotations

import io
import json
import shutil
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.core.management import call_command
from django.utils import timezone
from kombu import Connection

from backends.models import BackendStatus
from backends.probe import ProbeResult
from mindrouter.cli import doctor
from mindrouter.cli.doctor import Finding
from scheduler import pulse
from tests.factories import make_backend
from tests.scheduler.redis import RedisServer

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def folder(settings: Any, tmp_path: Any) -> None:
    settings.DATA_DIR = tmp_path
    settings.STATE_DIR, settings.SPOOL_DIR = tmp_path / "state", tmp_path / "spool"


@pytest.fixture
def whole() -> None:
    """A site on which everything runs."""
    now = time.time()
    pulse.write(
        pulse.Pulse(
            kind="gateway", pid=1, at=now, started_at=now, loop_lag=0, serving=2, unwritten=0,
            lines_lost=0, write_errors=0, database_away=False, in_touch=True,
        )
    )  # fmt: skip
    pulse.write_recorder(pulse.RecorderPulse(at=now, caught_up_at=now, offsets={}))


def states(found: list[Finding]) -> dict[str, str]:
    return {one.about: one.state for one in found}


def test_a_site_without_any_process_is_told_what_to_start() -> None:
    found = list(doctor.examine())
    assert states(found) == {
        "settings": "ok",
        "scheduling core": "ok",
        "data folder": "ok",
        "database": "ok",
        "gateway": "problem",
        "broker": "ok",
        "recorder": "problem",
        "clock": "ok",
        "backends": "warning",
    } | {one.about: one.state for one in found if one.about == "settings"}
    assert all(one.do for one in found if one.state != "ok")


def test_a_whole_site_passes_with_the_status_of_success(whole: None) -> None:
    out = io.StringIO()
    call_command("doctor", stdout=out)
    assert "PROBLEM" not in out.getvalue()
    assert "process 1 serves 2 requests" in out.getvalue()


def test_a_problem_is_in_the_exit_status_and_in_the_json() -> None:
    out = io.StringIO()
    with pytest.raises(SystemExit, match="1"):
        call_command("doctor", "--json", stdout=out)
    (gateway,) = [one for one in json.loads(out.getvalue()) if one["about"] == "gateway"]
    assert "rungateway" in gateway["do"]


def test_backends_are_asked_and_their_real_slots_compared(
    whole: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = make_backend("good", models=("m",), max_concurrent=8)
    bad = make_backend("bad", models=("m",), max_concurrent=8)
    now = timezone.now()
    BackendStatus.objects.create(
        backend=good, slots=2, observed_at=now, attempted_at=now, reachable=True
    )
    refused = ProbeResult(reachable=False, error="connection refused")
    monkeypatch.setattr(doctor, "detect_engines", lambda rows: {one.pk: refused for one in rows})
    found = list(doctor.examine())
    assert states(found)["beat and worker"] == "ok"
    assert [one.what for one in found if one.about == "backend bad"] == [
        f"{bad.base_url} does not answer: connection refused"
    ]
    (more,) = [one for one in found if one.about == "good"]
    assert more.state == "problem"
    assert more.do.startswith("Set max_concurrent to 2")


def test_polls_that_have_stopped_name_beat_and_worker(
    whole: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_ago = timezone.now() - timedelta(minutes=5)
    BackendStatus.objects.create(backend=make_backend("a"), attempted_at=long_ago)
    monkeypatch.setattr(
        doctor, "detect_engines", lambda rows: {one.pk: ProbeResult(reachable=None) for one in rows}
    )
    assert states(list(doctor.examine()))["beat and worker"] == "problem"


def test_redis_and_the_broker_that_are_away_are_named(whole: None, settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:9"
    assert states(list(doctor.examine()))["redis"] == "problem"


def test_what_may_run_on_another_machine_of_a_cluster_is_not_missed(
    whole: None, settings: Any
) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:9"
    assert states(list(doctor._processes())) == {"gateway": "ok"}
    (settings.STATE_DIR / "scheduler-7.json").touch()  # one that has died here
    assert states(list(doctor._processes())) == {"gateway": "ok", "scheduler": "problem"}
    shutil.rmtree(settings.STATE_DIR)
    assert states(list(doctor._processes())) == {"gateway": "problem", "scheduler": "problem"}


def test_a_queue_that_redis_does_not_have_is_an_empty_one(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.app, "connection", partial(Connection, redis.url))
    (found,) = doctor._broker()
    assert (found.state, found.what) == ("ok", "nothing waits for the worker")


def test_records_that_could_not_be_written_are_named(whole: None) -> None:
    one = pulse.pulses()[0]
    one.unwritten = 7
    pulse.write(one)
    (found,) = [one for one in doctor.examine() if one.about == "gateway"]
    assert (found.state, "7 records" in found.what) == ("problem", True)
