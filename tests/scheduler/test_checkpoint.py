"""The scheduler's memory in the database: encoded by hand, read by the model's field."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from scheduler import runtime
from scheduler.models import ShareCheckpoint
from scheduler.runtime import Runtime, load_all, save_state
from tests.core.building import Bench, backend, user

pytestmark = pytest.mark.django_db


def test_saved_shares_are_read_as_they_were_saved_last() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 2)])
    bench.settle(bench.serve(1), 100, 37)
    save_state(bench.core.checkpoint(bench.now))
    bench.settle(bench.serve(2), 0, 1)
    state = bench.core.checkpoint(bench.now)
    save_state(state)
    assert len(state["units"]) == 2
    assert load_all()[2] == state
    assert ShareCheckpoint.objects.count() == 1


async def test_what_was_to_be_saved_when_all_is_stopped_is_left_to_the_last_checkpoint(
    tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def endless(parts: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    settings.SPOOL_DIR = tmp_path
    monkeypatch.setattr(runtime, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(runtime, "pausing", endless)
    stopped = Runtime()
    stopped._settled = True
    task = asyncio.create_task(stopped._write_checkpoints())
    await begun.wait()
    task.cancel()
    await asyncio.wait([task])
    assert stopped._settled


def saved_elsewhere(state: dict[str, Any]) -> None:
    try:
        save_state(state)
    finally:
        connection.close()


@pytest.mark.django_db(transaction=True)
async def test_a_checkpoint_that_cannot_be_read_costs_the_shares_and_not_the_start(
    tmp_path: Path, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.SPOOL_DIR = tmp_path
    await asyncio.to_thread(saved_elsewhere, {"version": 1, "outputs": {"m": 9}, "units": 7})
    runtime = await Runtime.start()
    try:
        assert runtime.scheduler.checkpoint(time.monotonic())["outputs"] == {}
        told = [one.message for one in caplog.records if "are left out" in one.message]
        assert len(told) == 1
    finally:
        await runtime.stop()
