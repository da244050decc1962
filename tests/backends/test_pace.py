"""When events are passed on in batches, and how long these wait."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from backends.pace import (
    BATCH_SECONDS,
    LEAST_EVENTS,
    SAMPLE_EVENTS,
    Pace,
)


class Clock:
    """Stands still but for what it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def count(pace: Pace) -> bool:
    """As whoever passes an event on: whether it waits for others."""
    pace.events += 1
    return pace.is_batching or (pace.events >= SAMPLE_EVENTS and pace.begins())


def counted(pace: Pace, clock: Clock, gaps: Iterable[float]) -> list[bool]:
    """What each event is told that comes so many seconds behind the one before it."""
    told = []
    for gap in gaps:
        clock.now += gap
        told.append(count(pace))
    return told


def batching() -> tuple[Pace, Clock]:
    clock = Clock()
    pace = Pace(clock)
    assert counted(pace, clock, [0.0] * SAMPLE_EVENTS)[-1]
    return pace, clock


def test_events_that_come_seldom_wait_for_no_others() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert counted(pace, clock, [0.000_26] * 1000) == [False] * 1000  # 16 in 4.16 ms


def test_batches_begin_with_the_last_of_so_many_events_that_they_are_worth_it() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert counted(pace, clock, [0.000_24] * 17) == [False] * 15 + [True, True]  # in 3.84 ms


def test_each_sample_is_taken_by_itself() -> None:
    clock = Clock()
    pace = Pace(clock)
    slow_start = [0.01] + [0.000_1] * 15
    assert counted(pace, clock, slow_start) == [False] * 16
    assert counted(pace, clock, [0.000_1] * 16) == [False] * 15 + [True]


def test_a_turn_rests_for_what_is_left_of_two_milliseconds() -> None:
    pace, clock = batching()
    clock.now += 0.000_5
    assert round(pace.rest(), 9) == 0.001_5
    clock.now += 0.001_5
    counted(pace, clock, [0.000_1] * LEAST_EVENTS)
    clock.now += 0.000_1
    assert round(pace.rest(), 9) == 0.001_7


def test_who_has_more_to_do_than_time_rests_not_at_all_and_still_gathers() -> None:
    pace, clock = batching()
    for _ in range(5):
        counted(pace, clock, [0.000_03] * 100)
        assert pace.rest() == 0.0
        assert pace.is_batching


def test_a_rest_that_brought_a_single_event_was_the_last() -> None:
    pace, clock = batching()
    clock.now += pace.rest()
    assert counted(pace, clock, [0.0]) == [True]
    assert pace.rest() == 0.0
    assert counted(pace, clock, [0.000_26] * 100) == [False] * 100


def test_the_first_event_behind_a_silence_waits_for_nothing() -> None:
    pace, clock = batching()
    clock.now += pace.rest() + 60.0
    count(pace)
    assert pace.rest() == 0.0
    assert not pace.is_batching


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 0.02)), max_size=200))
def test_nobody_waits_longer_than_for_one_batch(turns: list[tuple[int, float]]) -> None:
    clock = Clock()
    pace = Pace(clock)
    for events, seconds in turns:
        told = [count(pace) for _ in range(events)]
        assert told == sorted(told)  # who is told to wait begins with the sample's end
        clock.now += seconds
        if any(told):
            rest = pace.rest()
            assert 0.0 <= rest <= max(0.0, BATCH_SECONDS - seconds) + 1e-9
            clock.now += rest
