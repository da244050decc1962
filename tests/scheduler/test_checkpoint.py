"""The scheduler's memory in the database: encoded by hand, read by the model's field."""

from __future__ import annotations

import pytest

from scheduler.models import ShareCheckpoint
from scheduler.runtime import load_all, save_state
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
