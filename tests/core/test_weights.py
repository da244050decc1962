"""R13: which weight counts, and what odd weights do (B59)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from scheduler.core.weights import checked_weight, effective_weight
from tests.core.building import Bench, backend, lease_of, serve_until, user

FALLBACKS = {"student": 1.5, "staff": 2.5, "faculty": 3.5, "admin": 20.0}


def weight(**values: Any) -> float:
    defaults: dict[str, Any] = {
        "override": None,
        "group_weight": None,
        "group_name": None,
        "is_superuser": False,
        "is_staff": False,
        "fallbacks": FALLBACKS,
    }
    return effective_weight(**(defaults | values))


def test_the_users_own_weight_comes_first_also_when_it_is_0() -> None:
    assert weight(override=7.0, group_weight=3.0, group_name="staff", is_superuser=True) == 7.0
    assert weight(override=0.0, group_weight=3.0) == 0.0


def test_the_groups_weight_comes_next_also_when_it_is_0() -> None:
    assert weight(group_weight=3.0, group_name="student", is_staff=True) == 3.0
    assert weight(group_weight=0.0, group_name="faculty") == 0.0


@pytest.mark.parametrize(
    ("group_name", "expected"),
    [("student", 1.5), ("staff", 2.5), ("Faculty", 3.5), ("ADMIN", 20.0), ("physics", 1.0)],
)
def test_a_group_without_a_weight_falls_back_by_its_name(group_name: str, expected: float) -> None:
    assert weight(group_name=group_name, is_superuser=True) == expected


def test_a_user_without_a_group_falls_back_by_the_accounts_flags() -> None:
    assert weight(is_superuser=True, is_staff=True) == 20.0
    assert weight(is_staff=True) == 2.5
    assert weight() == 1.5


def test_without_environment_the_seeds_values_apply() -> None:
    names = ("student", "staff", "faculty", "admin")
    assert [weight(group_name=name, fallbacks={}) for name in names] == [1.0, 2.0, 3.0, 10.0]


@pytest.mark.parametrize("bad", [-1.0, -1e-9, math.nan, math.inf, 1.1e9])
def test_a_weight_that_is_no_share_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="between 0 and"):
        weight(override=bad)
    with pytest.raises(ValueError, match="between 0 and"):
        weight(group_weight=bad)
    with pytest.raises(ValueError, match="between 0 and"):
        weight(fallbacks={"student": bad})


@pytest.mark.parametrize("good", [0.0, 0.05, 0.5, 1.0, 1e9])
def test_a_weight_from_0_to_a_billion_is_a_share(good: float) -> None:
    assert checked_weight(good) == good


# ---- 0 is background


def test_background_is_served_only_when_nobody_else_waits() -> None:
    bench = Bench([user(1, 0.0), user(2)], [backend(1, 1)])
    first = bench.serve(2)
    for user_id in (1, 2, 1, 2):
        bench.submit(user_id)
    order = []
    lease = first
    for _ in range(4):
        bench.settle(lease)
        (ticket,) = bench.pump()
        order.append(ticket.job.user_id)
        lease = lease_of(ticket)
    assert order == [2, 2, 1, 1]


def test_background_takes_a_slot_that_no_positive_weight_can_use() -> None:
    bench = Bench([user(1, 0.0), user(2)], [backend(1, 1, ["a"]), backend(2, 1, ["b"])])
    bench.serve(2, "b")
    bench.submit(2, "b")
    assert bench.serve(1, "a").weight == 1.0


def test_background_users_are_equal_among_themselves() -> None:
    bench = Bench([user(i, 0.0) for i in (1, 2, 3)], [backend(1, 2)])
    served = serve_until(bench, 60_000, {1: 1000, 2: 100, 3: 400})
    assert list(served.values()) == pytest.approx([20_000] * 3, abs=2000)


def test_the_decision_shows_background_as_weight_0() -> None:
    bench = Bench([user(1, 0.0)], [backend(1, 1)])
    lease = bench.serve(1)
    assert lease.decision.user_weight == 0.0
    assert bench.share(1).weight == 0.0


def test_what_background_used_is_no_debt_once_the_weight_is_positive() -> None:
    bench = Bench([user(1, 0.0), user(2)], [backend(1, 1)])
    bench.settle(bench.serve(1), 90_000)
    bench.serve(2)
    bench.submit(1)
    bench.submit(2)
    bench.users[1] = user(1, 1.0)
    bench.configure()
    views = {v.user_id: v.deficit for v in bench.core.queue(bench.now)}
    assert views[1] == pytest.approx(1000.0)


def test_a_weight_of_0_acts_on_waiting_jobs() -> None:
    bench = Bench([user(1, 5.0), user(2)], [backend(1, 1)])
    lease = bench.serve(2, prompt=5000)
    bench.submit(1)
    bench.submit(2)
    bench.pump()
    assert bench.core.queue(bench.now)[0].user_id == 1
    bench.users[1] = user(1, 0.0)
    bench.configure()
    bench.settle(lease, 5000)
    assert [t.job.user_id for t in bench.pump()] == [2]


def test_a_lease_is_settled_in_the_space_that_it_was_dispatched_in() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 2)])
    lease = bench.serve(1, max_tokens=0)
    bench.users[1] = user(1, 0.0)
    bench.configure()
    bench.settle(lease, 7000)
    bench.users[1] = user(1, 1.0)
    bench.configure()
    assert bench.share(1).deficit == pytest.approx(1000 - 7000)


def test_everybody_in_background_is_served_as_usual() -> None:
    bench = Bench([user(1, 0.0), user(2, 0.0)], [backend(1, 4)])
    tickets = [bench.submit(i) for i in (1, 2, 1, 2)]
    assert set(bench.pump()) == set(tickets)


# ---- odd weights


def test_a_billion_neither_overflows_nor_shuts_the_others_out() -> None:
    bench = Bench([user(1, 1e9), user(2)], [backend(1, 2)])
    bench.serve(2, prompt=1000)
    bench.serve(1, prompt=1000)
    light = bench.submit(2, prompt=1000)
    for _ in range(50):
        bench.submit(1, prompt=1000)
    bench.pump()
    waited = 0
    while light.state == "queued":
        bench.now += 60.0
        bench.settle((bench.running(1) or bench.running(2))[0], 1000)
        bench.pump()
        waited += 1
    # Its debt of one request is made good by the wait bonus: 1 token a second.
    assert waited <= 25
    assert all(math.isfinite(view.deficit) for view in bench.core.shares(bench.now))


def test_a_weight_of_a_twentieth_gets_its_share() -> None:
    bench = Bench([user(1, 0.05), user(2, 1.0)], [backend(1, 2)], wait_bonus_rate=0.0)
    served = serve_until(bench, 420_000, {1: 100, 2: 100})
    assert served[1] == pytest.approx(420_000 * 0.05 / 1.05, rel=0.05)


def test_a_new_weight_acts_on_the_next_dispatch() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 2)], deprioritize_threshold=1.0)
    for user_id in (1, 2):
        for _ in range(200):
            bench.submit(user_id, max_tokens=0)
    running = bench.pump()

    def serve(jobs: int) -> dict[int, int]:
        served = {1: 0, 2: 0}
        for _ in range(jobs):
            bench.settle(lease_of(running.pop(0)), 100)
            (ticket,) = bench.pump()
            running.append(ticket)
            served[ticket.job.user_id] += 1
        return served

    assert serve(100) == {1: 50, 2: 50}
    bench.users[1] = user(1, 3.0)
    bench.configure()
    assert serve(100) == pytest.approx({1: 75, 2: 25}, abs=1)
