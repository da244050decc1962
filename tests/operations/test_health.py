"""Whether a router is up, has started, and can serve: told as it is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from scheduler import pulse
from scheduler.loading import Loader
from scheduler.management.commands import runrecorder
from scheduler.spool import MAX_BACKLOG_LINES
from tests.running import RunningRouter, until


async def ready(router: RunningRouter) -> tuple[int, dict[str, Any]]:
    """The status, and the answer with its checks."""
    response = await router.client.get("/readyz")
    return response.status_code, response.json()


def recorder_is(caught_up_ago: float) -> None:
    now = time.time()
    pulse.write_recorder(pulse.RecorderPulse(at=now, caught_up_at=now - caught_up_ago, offsets={}))


async def test_a_router_with_nothing_wrong_is_ready(router: RunningRouter) -> None:
    recorder_is(0.0)
    status, told = await ready(router)
    assert (status, told["status"]) == (200, "ready")
    assert {name for name, check in told["checks"].items() if check["needed"]} == {
        "process",
        "scheduler",
    }
    assert [*told["checks"]] == [
        "process",
        "scheduler",
        "spool",
        "database",
        "polls",
        "backends",
        "recorder",
    ]


async def test_probes_need_no_key_and_answer_head_requests(router: RunningRouter) -> None:
    recorder_is(0.0)
    for path in ("/healthz", "/readyz", "/startupz"):
        response = await router.client.head(path, headers={"Authorization": ""})
        assert (response.status_code, response.content) == (200, b"")
        assert (await router.client.post(path)).status_code == 405
    assert (await router.client.get("/startupz")).json() == {"status": "started"}


def away(router: RunningRouter) -> None:
    router.runtime.database_away = True


def late(router: RunningRouter) -> None:
    recorder_is(31.0)


@pytest.mark.parametrize(("break_it", "name"), [(away, "database"), (late, "recorder")])
async def test_what_requests_do_not_need_degrades_a_router_and_leaves_it_ready(
    router: RunningRouter, break_it: Callable[[RunningRouter], None], name: str
) -> None:
    recorder_is(0.0)
    break_it(router)
    status, told = await ready(router)
    assert (status, told["status"]) == (200, "degraded")
    assert [key for key, check in told["checks"].items() if not check["ok"]] == [name]
    assert told["checks"][name]["message"]


async def test_a_router_whose_backends_nobody_polls_says_so(
    router: RunningRouter, backend: int
) -> None:
    recorder_is(0.0)
    _, told = await ready(router)
    assert told["status"] == "degraded"
    assert told["checks"]["polls"]["youngest_age_seconds"] is None
    assert told["checks"]["backends"] | {"message": ""} == {
        "ok": False,
        "needed": False,
        "in_service": 1,
        "ready": 0,
        "message": "",
    }


async def test_a_router_that_shuts_down_is_not_ready(router: RunningRouter) -> None:
    recorder_is(0.0)
    router.runtime.stopping = True
    status, told = await ready(router)
    assert (status, told["status"]) == (503, "not ready")
    assert "shutting down" in told["checks"]["process"]["message"]
    router.runtime.stopping = False


async def test_a_router_whose_background_work_has_ended_is_not_ready(
    router: RunningRouter,
) -> None:
    recorder_is(0.0)
    router.runtime._tasks[0].cancel()
    await until(router.runtime._tasks[0].done, 60.0)
    assert (await ready(router))[0] == 503


async def test_a_router_without_its_scheduler_is_neither_started_nor_ready(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder_is(0.0)
    monkeypatch.setattr(type(router.runtime), "in_touch", False)
    status, told = await ready(router)
    assert (status, told["checks"]["scheduler"]["ok"]) == (503, False)
    assert (await router.client.get("/startupz")).status_code == 503
    assert (await router.client.get("/healthz")).status_code == 200


async def test_records_that_wait_in_memory_degrade_and_lost_ones_make_unready(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder_is(0.0)
    spool = router.runtime.spool
    monkeypatch.setattr(spool, "_flush_backlog", lambda: None)  # the disk stays full
    spool._keep(b"{}\n")
    assert (await ready(router))[1]["status"] == "degraded"
    spool._backlog.extend([b"{}\n"] * MAX_BACKLOG_LINES)
    assert (await ready(router))[0] == 503
    spool._backlog.clear()


async def test_a_gateway_tells_its_pulse(router: RunningRouter) -> None:
    await until(lambda: bool(pulse.pulses()), 60.0)
    [told] = pulse.pulses()
    assert (told.kind, told.pid, told.in_touch) == ("gateway", os.getpid(), True)


@pytest.mark.django_db
def test_the_recorder_tells_how_far_it_has_come(settings: Any, tmp_path: Any) -> None:
    settings.STATE_DIR, settings.SPOOL_DIR = tmp_path / "state", tmp_path / "spool"
    settings.SPOOL_DIR.mkdir()
    (settings.SPOOL_DIR / "x-1.open").write_bytes(b"\n" * 7)
    assert pulse.spool_backlog(pulse.recorder_pulse()) == 7
    loader = Loader(settings.SPOOL_DIR)
    tell = runrecorder.Teller(loader, None)
    loader.load()
    tell.caught_up()
    tell.beat()
    told = pulse.recorder_pulse()
    assert told is not None
    assert told.offsets == {"x-1": 7}
    assert pulse.spool_backlog(told) == 0


async def test_nobody_waits_for_a_disk_that_does_not_answer(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError("Input/output error")

    monkeypatch.setattr(pulse, "spool_backlog", broken)
    status, told = await ready(router)
    assert (status, told["checks"]["recorder"]["ok"]) == (200, False)
