"""Costs, holds, tags and clamps, with values worked out by hand (R1–R8, R13)."""

from __future__ import annotations

import pytest

from scheduler.core.jobs import Usage
from tests.core.building import Bench, backend, lease_of, user

# ---- R1


def test_cost_is_tokens_used_unless_prices_say_otherwise() -> None:
    bench = Bench([user(1)], [backend(1, 4)])
    assert bench.settle(bench.serve(1), 100, 50).charged_tokens == 150
    assert bench.settle(bench.serve(1), 100, 50, cached_tokens=80).charged_tokens == 150


def test_prices_apply_to_fresh_cached_and_output_tokens() -> None:
    bench = Bench(
        [user(1)],
        [backend(1, 4)],
        cost_input_token=1.0,
        cost_output_token=3.0,
        cost_cached_token=0.25,
    )
    assert bench.settle(bench.serve(1), 100, 50, cached_tokens=80).cost == 20 + 80 / 4 + 150


def test_cached_tokens_beyond_the_prompt_are_not_believed() -> None:
    bench = Bench([user(1)], [backend(1, 4)], cost_cached_token=0.0)
    assert bench.settle(bench.serve(1), 100, 10, cached_tokens=900).cost == 10


# ---- R2, R5


def test_the_deficit_falls_by_exactly_the_tokens_used() -> None:
    bench = Bench([user(1, 3.0), user(2)], [backend(1, 2)])
    first = bench.serve(1)
    assert first.decision.user_deficit == 3000.0  # 3 · quantum: nothing has been used
    settlement = bench.settle(first, 123, 77)
    assert settlement.charged_tokens == 200
    assert bench.share(1).deficit == pytest.approx(3000.0 - 200.0)


def test_settling_twice_changes_nothing() -> None:
    bench = Bench([user(1)], [backend(1, 2)])
    lease = bench.serve(1)
    bench.settle(lease, 100, 100)
    again = bench.settle(lease, 5000, 5000)
    assert again.charged_tokens == 0.0
    assert bench.share(1).charged_tokens == 200
    assert bench.share(1).deficit == pytest.approx(800.0)
    assert bench.in_flight() == 0


def test_the_weight_at_dispatch_settles_the_lease() -> None:
    bench = Bench([user(1, 1.0), user(2, 1.0)], [backend(1, 1)])
    lease = bench.serve(1, prompt=1000, max_tokens=0)
    bench.users[1] = user(1, 10.0)
    bench.configure()
    bench.settle(lease, 3000, 0)
    # The tag has moved by 3000/1, so at weight 10 the deficit is 10 · (1000 − 3000).
    assert lease.weight == 1.0
    bench.submit(1)
    bench.submit(2)
    bench.pump()
    assert bench.share(1).weight == 10.0
    assert bench.share(1).charged_tokens == 3000


# ---- R3


def test_the_hold_starts_from_256_output_tokens_or_the_clients_limit() -> None:
    bench = Bench([user(1)], [backend(1, 4)])
    assert bench.serve(1, prompt=100).hold == 356
    assert bench.serve(1, prompt=100, max_tokens=40).hold == 140
    assert bench.serve(1, prompt=100, max_tokens=5000).hold == 356


def test_the_expected_output_is_a_moving_average_of_the_users_own() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 4)])
    bench.settle(bench.serve(1), 100, 1000)
    assert bench.serve(1, prompt=0).hold == 1000
    bench.settle(bench.serve(1), 100, 500)
    assert bench.serve(1, prompt=0).hold == pytest.approx(0.9 * 1000 + 0.1 * 500)


def test_a_user_without_a_history_is_expected_to_be_like_the_others() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 4, ["m", "n"])])
    bench.settle(bench.serve(1), 100, 1000)
    assert bench.serve(2, prompt=0).hold == 1000
    assert bench.serve(2, "n", prompt=0).hold == 256


# ---- R4


def test_output_beyond_the_hold_is_charged_while_it_streams() -> None:
    bench = Bench([user(1)], [backend(1, 2)])
    lease = bench.serve(1, prompt=100)
    bench.core.progress(lease, 100, 256, bench.now)
    assert bench.share(1).deficit == pytest.approx(1000 - 356)
    bench.core.progress(lease, 100, 1256, bench.now)
    assert bench.share(1).deficit == pytest.approx(1000 - 1356)
    bench.settle(lease, 100, 2000)
    assert bench.share(1).deficit == pytest.approx(1000 - 2100)


def test_progress_reported_twice_is_charged_once() -> None:
    bench = Bench([user(1)], [backend(1, 2)])
    lease = bench.serve(1, prompt=100)
    for _ in range(3):
        bench.core.progress(lease, 100, 900, bench.now)
    assert lease.charged == 1000


def test_progress_after_the_end_changes_nothing() -> None:
    bench = Bench([user(1)], [backend(1, 2)])
    lease = bench.serve(1)
    bench.settle(lease, 100, 0)
    bench.core.progress(lease, 100, 9000, bench.now)
    assert bench.share(1).deficit == pytest.approx(900)


# ---- R6


def test_a_job_cancelled_in_the_queue_is_never_charged() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1)])
    bench.serve(2)
    waiting = bench.submit(1)
    bench.pump()
    bench.core.cancel(waiting, bench.now)
    bench.core.cancel(waiting, bench.now)
    assert waiting.state == "cancelled"
    assert bench.core.stats(bench.now).queue_total == 0
    assert [view.unit for view in bench.core.shares(bench.now)] == [2]


def test_cancelling_a_lease_refunds_it_in_full() -> None:
    bench = Bench([user(1)], [backend(1, 1)])
    lease = bench.serve(1, prompt=5000)
    assert bench.share(1).deficit == pytest.approx(1000 - 5256)
    bench.core.cancel(lease.ticket, bench.now)
    assert lease.ticket.state == "cancelled"
    assert bench.in_flight() == 0
    again = bench.serve(1)
    assert again.decision.user_deficit == pytest.approx(1000.0)


def test_a_failed_attempt_is_refunded_and_never_held_twice() -> None:
    bench = Bench([user(1)], [backend(1, 1), backend(2, 1)])
    first = bench.serve(1, prompt=1000)
    bench.core.retry(first, bench.now, exclude=frozenset({first.backend_id}))
    assert bench.pump() == [first.ticket]
    second = lease_of(first.ticket)
    assert second.backend_id != first.backend_id
    assert bench.share(1).deficit == pytest.approx(1000 - 1256)
    bench.settle(second, 1000, 100)
    assert bench.share(1).charged_tokens == 1100


def test_a_refund_charges_nothing_and_frees_the_slot() -> None:
    bench = Bench([user(1)], [backend(1, 1)])
    lease = bench.serve(1, prompt=1000)
    bench.core.refund(lease, bench.now)
    bench.core.refund(lease, bench.now)
    assert bench.in_flight() == 0
    assert bench.serve(1).decision.user_deficit == pytest.approx(1000.0)


def test_an_estimated_usage_is_charged_like_any_other() -> None:
    bench = Bench([user(1)], [backend(1, 1)])
    assert bench.settle(bench.serve(1), 60, 37, estimated=True).charged_tokens == 97


# ---- R7


def deficits(bench: Bench) -> dict[int, float]:
    return {view.user_id: view.deficit for view in bench.core.queue(bench.now)}


def test_a_newcomer_starts_at_the_level_of_the_class() -> None:
    """User 1 has used 10,000 tokens alone; user 2 owes nothing for that and is owed nothing."""
    bench = Bench([user(1), user(2)], [backend(1, 1)])
    for _ in range(10):
        bench.settle(bench.serve(1, max_tokens=0), 1000)
    bench.serve(1, max_tokens=0)  # the level is now 10,000
    bench.submit(1, max_tokens=0)
    bench.submit(2, max_tokens=0)
    bench.pump()
    assert deficits(bench) == pytest.approx({2: 1000.0, 1: 900.0})


def test_idling_saves_nothing_up() -> None:
    """User 2 stops at 100 while user 1 goes on to 10,000, and comes back at that level."""
    bench = Bench([user(1), user(2)], [backend(1, 1)])
    bench.settle(bench.serve(2, max_tokens=0), 100)
    for _ in range(10):
        bench.settle(bench.serve(1, max_tokens=0), 1000)
    bench.serve(1, max_tokens=0)
    bench.submit(1, max_tokens=0)
    bench.submit(2, max_tokens=0)
    bench.pump()
    assert deficits(bench) == pytest.approx({2: 1000.0, 1: 900.0})


def test_a_debt_from_elsewhere_is_cut_to_the_cap() -> None:
    bench = Bench([user(1, 2.0), user(2)], [backend(1, 4, ["fast"]), backend(2, 1, ["slow"])])
    bench.settle(bench.serve(2, "slow", max_tokens=0), 100)
    bench.serve(2, "slow", max_tokens=0)
    bench.submit(2, "slow")
    bench.settle(bench.serve(1, "fast"), 500_000)
    bench.submit(1, "slow")
    bench.pump()
    # level 100 (+ quantum 1000) − (100 + 8192/2), times weight 2
    assert deficits(bench)[1] == pytest.approx(2 * (1000 - 8192 / 2))


def test_what_is_held_elsewhere_does_not_count_as_debt() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 4, ["fast"]), backend(2, 1, ["slow"])])
    bench.serve(2, "slow", max_tokens=0)
    bench.submit(2, "slow")
    bench.settle(bench.serve(1, "fast"), 500_000)
    held = bench.serve(1, "fast", prompt=3000, max_tokens=0)
    bench.submit(1, "slow")
    bench.pump()
    assert deficits(bench)[1] == pytest.approx(1000 - (8192 + 3000))
    bench.core.refund(held, bench.now)
    assert deficits(bench)[1] == pytest.approx(1000 - 8192)


def test_debt_within_a_class_is_kept_whatever_its_size() -> None:
    """One job at a time, each dearer than the debt cap: the user still pays for all of it."""
    bench = Bench([user(1), user(2)], [backend(1, 2)])
    big = bench.serve(1, prompt=100, max_tokens=0)
    bench.serve(2, prompt=100, max_tokens=0)
    bench.submit(2, prompt=100, max_tokens=0)
    bench.settle(big, 30_000)
    bench.pump()
    bench.submit(1)
    bench.pump()
    # User 2 was dispatched at 100, which is the level now.
    assert deficits(bench)[1] == pytest.approx(100 + 1000 - 30_000)


def test_a_debt_from_elsewhere_on_top_of_an_own_one_is_cut_to_the_own_one() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 2, ["slow"]), backend(2, 4, ["fast"])])
    big = bench.serve(1, "slow", max_tokens=0)
    bench.serve(2, "slow", max_tokens=0)
    bench.submit(2, "slow", max_tokens=0)
    bench.settle(big, 20_000)
    bench.pump()  # user 2 at 100, which is the level now
    bench.settle(bench.serve(1, "fast", max_tokens=0), 300_000)
    bench.submit(1, "slow", max_tokens=0)
    bench.pump()
    assert deficits(bench)[1] == pytest.approx(100 + 1000 - 20_000)


def test_clamps_act_on_activation_only() -> None:
    """A user in long backlog whose jobs turn out dear keeps the debt: 1:1:1 would follow else."""
    bench = Bench([user(1), user(2)], [backend(1, 2)])
    first = bench.serve(1, max_tokens=0)
    for _ in range(3):
        bench.submit(1, max_tokens=0)
    bench.serve(2, max_tokens=0)
    bench.submit(2, max_tokens=0)
    bench.core.progress(first, 50_000, 0, bench.now)
    assert deficits(bench)[1] < -40_000


def test_a_class_that_wakes_up_starts_at_its_neighbours_level() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 2, ["a", "b"])])
    for _ in range(5):
        bench.settle(bench.serve(1, "a", max_tokens=0), 1000)
    bench.serve(1, "a", max_tokens=0)  # level of a: 5000
    bench.serve(1, "a", max_tokens=0)  # level of a: 5100
    bench.submit(1, "a", max_tokens=0)
    bench.submit(2, "b", max_tokens=0)
    bench.pump()
    assert deficits(bench) == pytest.approx({1: 1000 - 100, 2: 1000.0})


def test_a_new_user_on_an_idle_cluster_has_no_advantage_over_the_last_one() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1)])
    for _ in range(10):
        bench.settle(bench.serve(1, max_tokens=0), 1000)
    new = bench.serve(2, max_tokens=0)  # level 9000: where the latest dispatch began
    bench.submit(2, max_tokens=0)
    bench.submit(1, max_tokens=0)
    bench.pump()
    assert new.decision.user_deficit == 1000.0
    assert deficits(bench) == pytest.approx({2: 900.0, 1: 0.0})


# ---- R8


def test_use_anywhere_counts_everywhere() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1, ["a", "b"])])
    first = bench.serve(1, "a", max_tokens=0)
    for model_name in ("a", "b"):
        bench.submit(1, model_name, max_tokens=0)
    bench.submit(2, "b", max_tokens=0)
    bench.core.progress(first, 2000, 0, bench.now)
    bench.pump()
    views = {(v.user_id, v.model_name): v.deficit for v in bench.core.queue(bench.now)}
    assert views[1, "a"] == pytest.approx(1000 - 2000)
    assert views[1, "b"] == pytest.approx(1000 - 2000)


def two_classes() -> Bench:
    """User 1 waits for both models, each on its own backend; user 2 only for the slow one."""
    bench = Bench([user(1), user(2)], [backend(1, 1, ["fast"]), backend(2, 1, ["slow"])])
    bench.serve(2, "slow", max_tokens=0)
    bench.serve(1, "fast", max_tokens=0)
    for user_id, model_name in ((1, "fast"), (1, "fast"), (1, "slow"), (2, "slow")):
        bench.submit(user_id, model_name, max_tokens=0)
    bench.pump()
    return bench


def slow_deficit(bench: Bench) -> float:
    views = bench.core.queue(bench.now)
    return next(v.deficit for v in views if v.user_id == 1 and v.model_name == "slow")


def test_a_charge_elsewhere_moves_a_waiting_class_only_up_to_the_cap() -> None:
    bench = two_classes()
    bench.settle(bench.running(1)[0], 100_000)
    assert slow_deficit(bench) == pytest.approx(1000 - 8192)


def test_releasing_a_hold_gives_back_only_what_it_had_moved() -> None:
    bench = two_classes()
    lease = bench.running(1)[0]
    bench.core.progress(lease, 60_000, 0, bench.now)
    # While the 60,000 are held they may count in full, like any hold.
    assert slow_deficit(bench) == pytest.approx(1000 - 60_000)
    bench.core.refund(lease, bench.now)
    assert slow_deficit(bench) == pytest.approx(1000.0)


def test_a_clipped_charge_is_not_refunded_beyond_what_it_moved() -> None:
    bench = two_classes()
    bench.settle(bench.running(1)[0], 100_000)
    bench.pump()
    lease = bench.running(1)[0]
    before = slow_deficit(bench)
    bench.core.refund(lease, bench.now)
    assert slow_deficit(bench) == pytest.approx(before + 100)
    assert slow_deficit(bench) <= 1000 - 8192 + 1e-9


def test_a_refund_undoes_no_more_than_the_hold_had_moved() -> None:
    """A debt of 20,000 on the slow model is beyond the cap, so that a hold elsewhere moves
    nothing there; neither does its refund."""
    bench = Bench([user(1), user(2)], [backend(1, 2, ["slow"]), backend(2, 1, ["fast"])])
    own = bench.serve(1, "slow", max_tokens=0)
    bench.serve(2, "slow", max_tokens=0)
    for user_id in (1, 2):
        bench.submit(user_id, "slow", max_tokens=0)
    bench.pump()
    bench.core.progress(own, 20_000, 0, bench.now)
    bench.settle(own, 20_000)
    bench.pump()
    before = slow_deficit(bench)
    elsewhere = bench.serve(1, "fast", prompt=5000, max_tokens=0)
    assert slow_deficit(bench) == pytest.approx(before)
    bench.core.refund(elsewhere, bench.now)
    assert slow_deficit(bench) == pytest.approx(before)


def test_a_user_who_waits_elsewhere_is_lifted_only_where_it_comes_back() -> None:
    """User 1 waits at 0 for the quiet model and comes to the busy one, whose level is 5000."""
    bench = Bench([user(1), user(2)], [backend(1, 1, ["quiet"]), backend(2, 1, ["busy"])])
    bench.serve(1, "quiet", prompt=0, max_tokens=0)
    bench.submit(1, "quiet", max_tokens=0)
    for _ in range(5):
        bench.settle(bench.serve(2, "busy", max_tokens=0), 1000)
    bench.serve(2, "busy", max_tokens=0)
    bench.submit(1, "busy", max_tokens=0)
    bench.pump()
    views = {v.model_name: v.deficit for v in bench.core.queue(bench.now)}
    assert views == pytest.approx({"quiet": 1000.0, "busy": 1000.0})


def test_a_lift_is_undone_once_only_the_other_model_was_waited_for() -> None:
    """Lifted to 5000 for the busy model and never served there: the quiet one saw nothing."""
    bench = Bench([user(1), user(2)], [backend(1, 1, ["quiet"]), backend(2, 1, ["busy"])])
    bench.serve(1, "quiet", prompt=0, max_tokens=0)
    quiet = bench.submit(1, "quiet", max_tokens=0)
    for _ in range(5):
        bench.settle(bench.serve(2, "busy", max_tokens=0), 1000)
    bench.serve(2, "busy", max_tokens=0)
    busy = bench.submit(1, "busy", max_tokens=0)
    bench.pump()
    for ticket in (busy, quiet):
        bench.core.cancel(ticket, bench.now)
    bench.submit(1, "quiet", max_tokens=0)
    bench.pump()
    assert deficits(bench) == pytest.approx({1: 1000.0})


def test_a_refund_brings_a_waiting_user_forward_at_once() -> None:
    """User 1's hold of 4000 puts it behind user 2; refunded, it is level again and came first."""
    bench = Bench([user(1), user(2), user(3)], [backend(1, 2)])
    blocker = bench.serve(3, prompt=0, max_tokens=0)
    big = bench.serve(1, prompt=4000, max_tokens=0)
    first = bench.submit(1, prompt=10, max_tokens=0)
    bench.submit(2, prompt=10, max_tokens=0)
    bench.pump()
    assert bench.core.queue(bench.now)[0].user_id == 2
    bench.core.mark_busy(1, bench.now, 1.0)
    bench.core.refund(big, bench.now)
    assert bench.pump() == []
    bench.now += 1.0
    assert bench.pump() == [first]
    assert blocker.open  # only the one slot was free


def test_a_debt_that_was_cut_stays_cut_when_the_user_waits_nowhere_any_more() -> None:
    bench = two_classes()
    bench.settle(bench.running(1)[0], 100_000)
    for ticket in [t for t in bench.waiting if t.job.user_id == 1]:
        if ticket.job.model_name == "fast":
            bench.core.cancel(ticket, bench.now)
    slow = next(t for t in bench.waiting if t.job.user_id == 1 and t.state == "queued")
    before = slow_deficit(bench)
    bench.core.cancel(slow, bench.now)
    bench.submit(1, "slow", max_tokens=0)
    bench.pump()
    assert slow_deficit(bench) == pytest.approx(before)


# ---- T4


def test_tags_move_by_true_cost_whatever_the_estimates() -> None:
    """Two backlogged users, wild estimates: the deficits' difference is that of the true costs."""
    bench = Bench([user(1, 2.0), user(2)], [backend(1, 4)])
    for user_id in (1, 2):
        for _ in range(20):
            bench.submit(user_id, prompt=1, max_tokens=None)
    used = {1: 0, 2: 0}
    running = bench.pump()
    for step in range(16):
        ticket = running.pop(0)
        tokens = 37 * step * step
        used[ticket.job.user_id] += 1 + tokens
        bench.settle(lease_of(ticket), 1, tokens)
        running += bench.pump()
    for ticket in running:
        bench.core.cancel(ticket, bench.now)
    deficit = deficits(bench)
    assert deficit[1] / 2 - deficit[2] == pytest.approx(used[2] - used[1] / 2)


def test_usage_needs_no_estimate_of_the_prompt_to_be_charged_rightly() -> None:
    bench = Bench([user(1)], [backend(1)])
    lease = bench.serve(1, prompt=1)
    bench.core.settle(lease, Usage(prompt_tokens=4321, completion_tokens=0), bench.now)
    assert bench.share(1).deficit == pytest.approx(1000 - 4321)
