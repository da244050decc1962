"""R15: calls that nobody waits for, as units with a part of their user's weight."""

from __future__ import annotations

import pytest

from scheduler.core.jobs import BACKGROUND, end_user_of, is_background_call
from tests.core.building import Bench, backend, lease_of, serve_until, user

TITLES = (1, "", BACKGROUND)  # of user 1


def test_a_unit_tells_whose_calls_it_is_of() -> None:
    units = [1, (1, "eve"), (1, "", BACKGROUND), (1, "eve", BACKGROUND)]
    assert [end_user_of(unit) for unit in units] == [None, "eve", None, "eve"]
    assert [is_background_call(unit) for unit in units] == [False, False, True, True]


def test_background_calls_get_their_part_of_a_users_share() -> None:
    """Weights 2, 2 and 2 × 0.25, for jobs of different lengths: 4 : 4 : 1 of 450,000 tokens."""
    bench = Bench(
        [user(1, 2.0), user(2, 2.0)],
        [backend(1, 2)],
        background_weight=0.25,
        wait_bonus_rate=0.0,
        deprioritize_threshold=1.0,
    )
    served = serve_until(bench, 450_000, {1: 100, 2: 50, TITLES: 25})
    assert served == {
        1: pytest.approx(200_000, abs=1000),
        2: pytest.approx(200_000, abs=1000),
        TITLES: pytest.approx(50_000, abs=1000),
    }


def test_in_group_mode_background_calls_count_as_part_of_a_member() -> None:
    """Two groups of weight 1. In the first, one member chats (1) and has titles made (0.25): the
    group's half is split 4 : 1."""
    bench = Bench(
        [user(1, group="a"), user(2, group="b")],
        [backend(1, 2)],
        background_weight=0.25,
        share_mode="group",
        wait_bonus_rate=0.0,
        deprioritize_threshold=1.0,
    )
    served = serve_until(bench, 200_000, {1: 100, 2: 100, TITLES: 100})
    assert served == {
        1: pytest.approx(80_000, abs=1000),
        2: pytest.approx(100_000, abs=1000),
        TITLES: pytest.approx(20_000, abs=1000),
    }


def test_the_weight_that_a_group_shares_is_right_again_after_they_have_ended() -> None:
    bench = Bench(
        [user(1, 2.0), user(2, 2.0)], [backend(1, 8)], background_weight=0.25, share_mode="group"
    )
    titles = bench.serve(1, unit=TITLES)
    assert titles.weight == 2.0  # alone in its group
    assert bench.serve(2).weight == pytest.approx(2.0 * 2 / 2.5)
    bench.settle(titles)
    assert bench.serve(1).weight == pytest.approx(2.0 * 2 / 4)


def test_with_a_split_share_background_calls_divide_it_with_the_others() -> None:
    bench = Bench([user(1, 3.0)], [backend(1, 8)], background_weight=0.25, end_user_share="split")
    assert bench.serve(1, unit=(1, "ada")).weight == 3.0
    assert bench.serve(1, unit=(1, "ada", BACKGROUND)).weight == 3.0 / 2 * 0.25


def test_a_weight_of_0_has_them_served_only_when_nobody_else_waits() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1)], background_weight=0.0)
    lease = bench.serve(2)
    for who, unit in ((1, TITLES), (2, 2), (1, TITLES), (1, 1)):
        bench.submit(who, unit=unit)
    order = []
    for _ in range(4):
        bench.settle(lease)
        (ticket,) = bench.pump()
        order.append(ticket.job.unit)
        lease = lease_of(ticket)
    assert sorted(order[:2]) == [1, 2]
    assert order[2:] == [TITLES, TITLES]
    assert lease.decision.user_weight == 0.0


def test_another_weight_acts_on_those_that_wait() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1)], background_weight=0.25)
    lease = bench.serve(2, prompt=5000)
    titles = bench.submit(1, unit=TITLES)
    bench.submit(2)
    assert bench.core.queue(bench.now)[0].unit == TITLES  # the other has had 5,000 tokens
    bench.configure(background_weight=0.0)
    bench.settle(lease, 5000)
    assert [ticket.job.unit for ticket in bench.pump()] == [2]
    bench.configure(background_weight=0.5)
    bench.settle(lease_of(bench._tickets[-1]), 100)
    assert bench.pump() == [titles]
    assert lease_of(titles).weight == 0.5


def test_the_checkpoint_keeps_what_they_have_had() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 4)], background_weight=0.25)
    bench.settle(bench.serve(1, unit=TITLES), 1000)
    saved = bench.core.checkpoint(bench.now)
    other = Bench([user(1), user(2)], [backend(1, 4)], background_weight=0.25)
    other.core.restore(saved, other.now)
    assert other.share(TITLES).recent_tokens == 1000
