"""The scheduler's memory in the database: encoded by hand, read by the model's field."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

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
