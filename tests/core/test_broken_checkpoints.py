"""A checkpoint is taken up whole or not at all, whatever became of it where it was kept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.checkpoint import BrokenCheckpointError
from tests.core.building import Bench, backend, user

UNIT: list[Any] = [1, 1, False, 5.0, None, 10.0, {"m": 20.0}]
HUGE = 10**400

BROKEN: dict[str, Any] = {
    "a list": [1],
    "a text": "x",
    "nothing": None,
    "units are no list": {"beta": 5, "latest_level": [3, 0], "units": 7},
    "a unit without its values": {"units": [UNIT, UNIT[:2]]},
    "a tag is a word": {"units": [[1, 1, False, "x", None, 10.0, {}]]},
    "a tag beyond all bounds": {"units": [[1, 1, False, float("inf"), None, 10.0, {}]]},
    "a charge is a word": {"units": [[1, 1, False, 5.0, None, "x", {}]]},
    "an average is a word": {"units": [[1, 1, False, 5.0, None, 10.0, {"m": "x"}]]},
    "a user is a word": {"units": [[1, "ada", False, 5.0, None, 10.0, {}]]},
    "a number is a word": {"beta": "much"},
    "a number is too large": {"beta": HUGE},
    "a level is too large": {"latest_level": [HUGE, 0]},
    "a level is missing": {"latest_level": []},
    "outputs are a list": {"outputs": ["m"]},
    "a model's average is a word": {"outputs": {"m": "x"}},
    "a latency is a word": {"measures": [[1, "m", "fast", None]]},
    "a window without tokens": {"units": [UNIT], "window": [{"age": 3}]},
    "a window of the future": {"units": [UNIT], "window": [{"age": -3, "tokens": []}]},
    "its second part is broken": {
        "units": [UNIT],
        "window": [{"age": 2, "tokens": [[0, 5000]]}, {"age": 1, "tokens": "x"}],
    },
    "tokens beyond all bounds": {
        "units": [UNIT], "window": [{"age": 1, "tokens": [[0, float("inf")]]}]
    },
    "tokens of nobody": {"units": [UNIT], "window": [{"age": 1, "tokens": [[1, 5]]}]},
    "tokens of the one before the first": {
        "units": [UNIT], "window": [{"age": 1, "tokens": [[-1, 5]]}]
    },
}  # fmt: skip


def state_of(broken: Any) -> Any:
    return {"version": 1, **broken} if isinstance(broken, dict) else broken


def new_bench() -> Bench:
    return Bench([user(1), user(2)], [backend(1, 2)])


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_of_a_checkpoint_that_is_broken_nothing_is_taken_up(broken: Any) -> None:
    bench = new_bench()
    with pytest.raises(BrokenCheckpointError):
        bench.core.restore(state_of(broken), bench.now)
    assert bench.core.checkpoint(bench.now) == new_bench().core.checkpoint(bench.now)


def saved() -> dict[str, Any]:
    bench = new_bench()
    for user_id, tokens in ((1, 300), (2, 40), (1, 7)):
        lease = bench.serve(user_id)
        bench.core.first_byte(lease, bench.now + 0.2)
        bench.settle(lease, 100, tokens)
        bench.now += 10.0
    return bench.core.checkpoint(bench.now)


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all values within a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = [way] if way else []
    for key, one in inner:
        new = (*way, key)
        found += places(one, new) if isinstance(one, list | dict) else [new]
    return found


VALUES: list[Any] = ["x", None, [], {}, -1, -1.5, 10**25, True, [[1]], {"m": []}]


@given(st.data())
@settings(max_examples=400)
def test_with_any_value_of_it_exchanged_it_is_whole_or_broken_and_jobs_are_served(
    data: st.DataObject,
) -> None:
    state = saved()
    *way, last = data.draw(st.sampled_from(places(state)))
    held: Any = state
    for key in way:
        held = held[key]
    held[last] = data.draw(st.sampled_from(VALUES))
    bench = new_bench()
    try:
        bench.core.restore(state, bench.now)
    except BrokenCheckpointError:
        assert bench.core.checkpoint(bench.now) == new_bench().core.checkpoint(bench.now)
    for user_id in (1, 2):
        bench.settle(bench.serve(user_id), 10, 10)
    bench.core.shares(bench.now)
    bench.core.checkpoint(bench.now)
