"""R17: what timed boosts make of weights."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.boosts import TimedFactor, boosted, multiplied
from scheduler.core.jobs import UserSpec


def spec(**fields) -> UserSpec:
    values = {"user_id": 1, "username": "ada", "group_id": 7, "group_name": "physics"}
    return UserSpec(**(values | {"weight": 3.0, "group_weight": 3.0} | fields))


def boost(factor: float, **whose: int) -> TimedFactor:
    return TimedFactor(name="b", factor=factor, starts_at=10.0, ends_at=20.0, **whose)


def test_a_boost_is_in_force_from_its_start_until_just_before_its_end():
    one = boost(2, group_id=7)
    assert [one.in_force(at) for at in (9.999, 10.0, 19.999, 20.0)] == [False, True, True, False]


def test_a_groups_boost_counts_for_the_group_and_each_member():
    assert boosted(spec(), [boost(2, group_id=7)]) == spec(weight=6.0, group_weight=6.0)
    own = spec(weight=5.0)  # an override
    assert boosted(own, [boost(2, group_id=7)]) == spec(weight=10.0, group_weight=6.0)


def test_a_users_boost_counts_for_that_user_only():
    assert boosted(spec(), [boost(4, user_id=1)]) == spec(weight=12.0, group_weight=3.0)
    assert boosted(spec(), [boost(4, user_id=2), boost(4, group_id=8)]) == spec()


def test_a_user_without_a_group_is_in_nobody_elses():
    alone = spec(group_id=None, group_name=None)
    assert boosted(alone, [boost(4, user_id=2)]) == alone


def test_boosts_that_overlap_are_all_multiplied():
    both = [boost(2, group_id=7), boost(1.5, user_id=1), boost(3, group_id=7)]
    assert boosted(spec(), both) == spec(weight=27.0, group_weight=18.0)


@pytest.mark.parametrize(
    ("weight", "factors", "result"),
    [
        (0.0, [5.0], 0.0),  # background stays it
        (3.0, [0.0, 9.0], 0.0),
        (1e9, [1e9], 1e9),
        (1e-6, [1e-6], 1e-6),
        (2.0, [], 2.0),
    ],
)
def test_weights_stay_in_their_range(weight, factors, result):
    assert multiplied(weight, factors) == result


@given(
    st.floats(1e-6, 1e9),
    st.lists(st.floats(1e-6, 1e9), max_size=5).flatmap(
        lambda found: st.tuples(st.just(found), st.permutations(found))
    ),
)
def test_the_order_of_boosts_makes_no_difference_and_weights_stay_valid(weight, orders):
    one, other = (multiplied(weight, factors) for factors in orders)
    assert one == other
    assert 1e-6 <= one <= 1e9
