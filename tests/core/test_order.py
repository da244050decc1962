"""Who is next: heavy users, burst credits, waiting, and the order of candidates (R9–R12, D1)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.burst import BurstCredits
from scheduler.core.order import Choice
from scheduler.core.tunables import Tunables
from tests.core.building import Bench, backend, lease_of, user


def priority(base: float, factor: float, wait_bonus: float = 0.0) -> float:
    bench = Bench([user(1)], [backend(1)])
    return Choice(bench.submit(1).flow, base, factor, wait_bonus).priority(0.0)


# ---- R9, D1


def test_the_factor_multiplies_what_is_owed_and_divides_what_is_not() -> None:
    assert priority(1000.0, 0.5) == 500.0
    assert priority(-1000.0, 0.5) == -2000.0
    assert priority(0.0, 0.1) == 0.0
    assert priority(-1000.0, 0.5, wait_bonus=30.0) == -1970.0


@given(
    base=st.floats(-1e9, 1e9),
    factor=st.floats(0.1, 1.0),
    less=st.floats(0.0, 1e6),
)
def test_a_factor_never_helps_and_order_is_kept_under_it(
    base: float, factor: float, less: float
) -> None:
    assert priority(base, factor) <= priority(base, 1.0)
    assert priority(base - less, factor) <= priority(base, factor)


def test_the_seeds_sign_trap_is_closed() -> None:
    """Heavy user: −50,000 at weight 3 and factor 0.1. Light user: −2,000 at weight 1."""
    assert priority(-50_000 / 3, 0.1) < priority(-2_000, 1.0)


def with_usage(first: int, second: int) -> Bench:
    """Two users who have settled so many tokens lately."""
    bench = Bench([user(1), user(2)], [backend(1, 2)])
    bench.settle(bench.serve(1), first)
    bench.settle(bench.serve(2), second)
    return bench


@pytest.mark.parametrize(
    ("first", "factor"), [(5000, 1.0), (6000, 0.8), (7500, 0.5), (9500, 0.1), (9999, 0.1)]
)
def test_the_factor_falls_with_the_share_of_recent_tokens(first: int, factor: float) -> None:
    bench = with_usage(first, 10_000 - first)
    assert bench.share(1).factor == pytest.approx(factor)
    assert bench.share(2).factor == 1.0


def test_usage_is_forgotten_after_the_window() -> None:
    bench = with_usage(9000, 1000)
    bench.now += 289.0
    assert bench.share(1).recent_tokens == 9000
    bench.now += 11.0
    assert bench.core.stats(bench.now).global_recent_tokens == 0.0


def test_the_threshold_is_tunable() -> None:
    bench = with_usage(7500, 2500)
    bench.configure(deprioritize_threshold=0.7)
    assert bench.share(1).factor == pytest.approx(0.9)


def test_a_heavy_user_waits_behind_one_who_is_owed_a_little_less() -> None:
    """User 1 is owed 1000, user 2 800; the factor 0.1 turns 1000 into 100."""
    bench = Bench([user(1), user(2), user(3)], [backend(1, 2)])
    bench.settle(bench.serve(1, max_tokens=0), 90_000)
    bench.now += 1.0
    blocker = bench.serve(3, prompt=0, max_tokens=0)  # the level is wherever user 1 began
    bench.serve(3, prompt=0, max_tokens=0)
    bench.submit(1, max_tokens=0)
    bench.submit(2, max_tokens=0)
    bench.pump()
    views = {v.user_id: v for v in bench.core.queue(bench.now)}
    assert views[1].factor == pytest.approx(0.1)
    assert views[1].priority < views[2].priority
    bench.settle(blocker, 0)
    assert [t.job.user_id for t in bench.pump()] == [2]


def test_a_heavy_user_alone_in_the_queue_is_served_without_delay() -> None:
    bench = with_usage(90_000, 10)
    assert bench.serve(1).decision.factor == 0.1


def test_a_heavy_user_is_back_in_order_when_no_longer_heavy() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1)])
    bench.settle(bench.serve(1, max_tokens=0), 100)
    lease = bench.serve(2, max_tokens=0)
    bench.submit(1, max_tokens=0)
    bench.submit(2, max_tokens=0)
    bench.submit(1, max_tokens=0)
    bench.pump()
    assert {v.user_id: v.factor for v in bench.core.queue(bench.now)} == {1: 0.1, 2: 1.0}
    bench.settle(lease, 300)
    (ticket,) = bench.pump()  # now user 2 has had 3/4
    assert ticket.job.user_id == 1
    assert lease_of(ticket).decision.factor == 1.0


def test_a_heavy_users_job_may_be_retried_while_the_user_is_set_aside() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 2)])
    bench.settle(bench.serve(1), 5000)
    first, second = bench.serve(1), bench.serve(1)
    waiting = bench.submit(1)
    bench.settle(second)
    assert bench.pump() == [waiting]  # heavy: compared apart
    last = bench.submit(1)
    bench.submit(2)
    bench.core.mark_busy(1, bench.now, 1.0)
    bench.core.retry(first, bench.now)
    bench.core.cancel(first.ticket, bench.now)
    bench.core.cancel(last, bench.now)
    bench.now += 1.0
    assert [ticket.job.user_id for ticket in bench.pump()] == [2]


# ---- R10


def burst_credits(**values: float) -> BurstCredits:
    burst = BurstCredits(Tunables(**values))  # type: ignore[arg-type]
    burst.rest(0.0)
    return burst


def test_credits_grow_while_idle_up_to_the_cap() -> None:
    burst = burst_credits()
    assert burst.value(0.0) == 0.0
    assert burst.value(4.0) == 400.0
    assert burst.value(60.0) == 1000.0
    burst.wake(4.0)
    assert burst.value(60.0) == 400.0


def test_credits_halve_when_jobs_wait_and_then_every_30_seconds() -> None:
    burst = burst_credits()
    burst.wake(10.0)
    burst.after_pass(3, 10.0)
    assert burst.beta == 500.0
    for now in (11.0, 20.0, 39.9):
        burst.after_pass(3, now)
    assert burst.beta == 500.0
    assert burst.next_halving() == 40.0
    burst.after_pass(3, 40.0)
    assert burst.beta == 250.0


def test_credits_never_halve_twice_within_a_second() -> None:
    burst = burst_credits()
    burst.wake(10.0)
    for step in range(10):
        burst.after_pass(1, 10.0 + step / 20)
        burst.after_pass(0, 10.0 + step / 20)
    assert burst.beta == 500.0
    burst.after_pass(1, 11.0)
    assert burst.beta == 250.0


def test_a_job_that_is_served_at_once_halves_nothing() -> None:
    bench = Bench([user(1, 2.0)], [backend(1, 1)])
    bench.now += 5.0
    assert bench.serve(1).decision.burst_credits == 2.0 * 500.0
    assert bench.share(1).burst_credits == 1000.0
    bench.submit(1)
    bench.pump()
    assert bench.share(1).burst_credits == 500.0


def test_lowering_the_cap_takes_nothing_away_and_lets_nothing_grow() -> None:
    bench = Bench([user(1)], [backend(1, 2)])
    bench.now += 60.0
    lease = bench.serve(1)
    bench.configure(burst_credit_cap=100.0)
    bench.settle(lease)
    bench.now += 60.0
    assert bench.serve(1).decision.burst_credits <= 1000.0


# ---- R11


def test_the_wait_bonus_counts_from_the_later_of_arrival_and_last_dispatch() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1)])
    lease = bench.serve(1)
    bench.now += 10.0
    for _ in range(3):
        bench.submit(2)
    bench.pump()
    bench.now += 20.0
    assert [v.wait_bonus for v in bench.core.queue(bench.now)] == [20.0, 20.0, 20.0]
    bench.settle(lease)
    bench.pump()
    bench.now += 5.0
    assert [v.wait_bonus for v in bench.core.queue(bench.now)] == [5.0, 5.0]


def test_waiting_makes_up_for_a_small_debt() -> None:
    """User 1 is 50 tokens behind; after 50 s it is level, and it came first."""
    bench = Bench([user(1), user(2), user(3)], [backend(1, 1)], deprioritize_threshold=1.0)
    bench.settle(bench.serve(1, max_tokens=0), 50)
    lease = bench.serve(3, prompt=0, max_tokens=0)
    bench.submit(1, max_tokens=0)
    bench.pump()
    bench.now += 50.1
    bench.submit(2, max_tokens=0)
    bench.settle(lease, 0)
    assert [t.job.user_id for t in bench.pump()] == [1]


def test_the_wait_bonus_rate_may_change_while_jobs_wait() -> None:
    bench = Bench([user(1), user(2), user(3)], [backend(1, 1)], deprioritize_threshold=1.0)
    bench.settle(bench.serve(1, max_tokens=0), 50)
    lease = bench.serve(3, prompt=0, max_tokens=0)
    bench.submit(1, max_tokens=0)
    bench.now += 10.0
    bench.submit(2, max_tokens=0)
    bench.pump()
    assert bench.core.queue(bench.now)[0].user_id == 2
    bench.configure(wait_bonus_rate=10.0, deprioritize_threshold=1.0)
    assert bench.core.queue(bench.now)[0].user_id == 1
    bench.settle(lease, 0)
    assert [t.job.user_id for t in bench.pump()] == [1]


# ---- R12


def test_jobs_of_one_user_and_class_are_served_first_come_first_served() -> None:
    bench = Bench([user(1)], [backend(1, 1)])
    lease = bench.serve(1)
    tickets = [bench.submit(1) for _ in range(5)]
    served = []
    for _ in tickets:
        bench.now += 1.0
        bench.settle(lease)
        (ticket,) = bench.pump()
        served.append(ticket)
        lease = lease_of(ticket)
    assert served == tickets


def test_a_full_model_blocks_no_other() -> None:
    bench = Bench([user(1, 3.0), user(2)], [backend(1, 1, ["a"]), backend(2, 1, ["b"])])
    bench.serve(1, "a")
    for _ in range(20):
        bench.submit(1, "a")
    bench.pump()
    assert bench.serve(2, "b").backend_id == 2


def test_a_newcomer_does_not_pass_those_who_wait_for_the_same_slot() -> None:
    bench = Bench([user(1), user(2), user(3)], [backend(1, 1)])
    lease = bench.serve(1)
    waiting = bench.submit(2)
    bench.pump()
    bench.now += 1.0
    bench.settle(lease)
    newcomer = bench.submit(3)
    assert bench.pump() == [waiting]
    assert newcomer.state == "queued"


def test_the_users_of_two_models_on_one_backend_share_it_evenly() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1, ["a", "b"])])
    lease = bench.serve(1, "a", max_tokens=0)
    for _ in range(10):
        bench.submit(1, "a", max_tokens=0)
        bench.submit(2, "b", max_tokens=0)
    served = []
    for _ in range(10):
        bench.settle(lease)
        (ticket,) = bench.pump()
        served.append(ticket.job.user_id)
        lease = lease_of(ticket)
    assert served.count(1) == served.count(2) == 5
