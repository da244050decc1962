"""The wall clock jumps; scheduling, limits and time limits go by another that only goes forward."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

import pytest

from backends.models import Backend, BackendStatus
from tests.running import LONG, RunningRouter
from tests.stubs.openai_stub import OpenAIStub, held, reset

HOUR = 3600.0
JUMPS = pytest.mark.parametrize("jump", [HOUR, -HOUR, 400 * 24 * HOUR], ids=["on", "back", "year"])
pytestmark = pytest.mark.parametrize("mode", ["embedded", "cluster"])


class Wall:
    """The wall clock, which can be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        self._real = time.time
        monkeypatch.setattr(time, "time", lambda: self._real() + self.ahead)


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    return Wall(monkeypatch)


@JUMPS
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_jump_ends_no_wait_and_no_request_and_shows_in_no_duration(
    router: RunningRouter, stub: OpenAIStub, wall: Wall, jump: float, streamed: bool
) -> None:
    await router.backend(stub, "a", max_concurrent=1)
    go_on = asyncio.Event()
    stub.then(held(go_on))
    running = asyncio.create_task(router.chat(stream=streamed))
    await stub.until_calls(1, LONG)
    waiting = asyncio.create_task(router.chat(stream=streamed))
    await router.until_waiting(1, LONG)
    wall.ahead = jump
    await router.reload()
    assert (router.in_flight, router.waiting) == (1, 1)
    go_on.set()
    answers = [await running, await waiting]
    assert [one.status_code for one in answers] == [200, 200]
    assert int(answers[1].headers["x-mindrouter-queue-ms"]) < LONG * 1000
    for record in await router.records():
        moments = [
            record.arrived_at,
            record.queued_at,
            record.dispatched_at,
            record.first_byte_at,
            record.ended_at,
        ]
        assert None not in moments
        assert moments == sorted(moments)
        assert (moments[-1] - moments[0]).total_seconds() < LONG
        assert record.outcome == "completed"


@JUMPS
async def test_a_jump_neither_opens_nor_lengthens_a_fail_window(
    router: RunningRouter, stub: OpenAIStub, wall: Wall, jump: float
) -> None:
    number = await router.backend(stub, "a")
    async with await OpenAIStub.start() as other:
        await router.change(lambda: Backend.objects.update(priority=10))
        await router.backend(other, "b")
        stub.then(reset)
        assert (await router.chat()).headers["x-mindrouter-backend"] == "b"
    states = router.scheduling.scheduler.backend_states(time.monotonic())
    before = next(one.failed_for_seconds for one in states if one.id == number)
    wall.ahead = jump
    await router.reload()
    states = router.scheduling.scheduler.backend_states(time.monotonic())
    after = next(one.failed_for_seconds for one in states if one.id == number)
    assert before is not None
    assert after is not None
    assert 0 < after <= before


@JUMPS
async def test_a_jump_frees_no_minute(
    router: RunningRouter, stub: OpenAIStub, wall: Wall, jump: float
) -> None:
    await router.backend(stub, "a")
    key = await router.user("eve", requests_per_minute=1)
    assert (await router.chat(key=key)).status_code == 200
    wall.ahead = jump
    await router.reload()
    refused = await router.chat(key=key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60


@JUMPS
async def test_polled_numbers_from_before_a_jump_stop_no_request(
    router: RunningRouter, stub: OpenAIStub, wall: Wall, jump: float
) -> None:
    number = await router.backend(stub, "a")
    seen = {"reachable": True, "observed_at": datetime.now(UTC), "running": 1}
    await router.change(
        lambda: BackendStatus.objects.update_or_create(backend_id=number, defaults=seen)
    )
    wall.ahead = jump
    await router.reload()
    for _ in range(2):
        assert (await router.chat()).status_code == 200
