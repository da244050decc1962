"""The seed's three scenarios, shares by weight, and share modes (R7, R12, R14; B31)."""

from __future__ import annotations

import pytest

from tests.core.building import Bench, backend, lease_of, serve_until, user


def shares_of(served: dict[int, float]) -> dict[int, float]:
    return {user_id: tokens / sum(served.values()) for user_id, tokens in served.items()}


def test_a_single_user_bursts_over_every_slot_of_an_idle_cluster() -> None:
    bench = Bench([user(1)], [backend(1, 32), backend(2, 32)])
    tickets = [bench.submit(1) for _ in range(64)]
    assert set(bench.pump()) == set(tickets)
    assert [view.in_flight for view in bench.core.backend_states(bench.now)] == [32, 32]


def test_a_student_who_comes_to_a_heavy_faculty_user_is_served_next() -> None:
    bench = Bench([user(1, 3.0, "faculty"), user(2, 1.0)], [backend(1, 4)])
    for _ in range(40):
        bench.submit(1)
    running = bench.pump()
    bench.now += 5.0
    single = bench.submit(2)
    bench.pump()
    assert single.state == "queued"
    bench.settle(lease_of(running[0]), 100, 200)
    assert bench.pump() == [single]


def test_three_groups_of_weight_3_2_1_get_50_33_and_17_percent() -> None:
    bench = Bench([user(1, 3.0, "faculty"), user(2, 2.0, "staff"), user(3, 1.0)], [backend(1, 8)])
    shares = shares_of(serve_until(bench, 300_000, {1: 500, 2: 500, 3: 500}))
    assert shares == pytest.approx({1: 1 / 2, 2: 1 / 3, 3: 1 / 6}, abs=0.005)


def test_shares_are_tokens_and_not_requests() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1)])
    shares = shares_of(serve_until(bench, 200_000, {1: 4000, 2: 100}))
    assert shares == pytest.approx({1: 0.5, 2: 0.5}, abs=0.02)


def members(share_mode: str) -> Bench:
    users = [user(1, 3.0, "faculty")]
    users += [user(i, 2.0, "staff") for i in (2, 3)]
    users += [user(i, 1.0, "students") for i in range(4, 9)]
    return Bench(users, [backend(1, 8)], share_mode=share_mode)


def by_group(served: dict[int, float]) -> list[float]:
    shares = shares_of(served)
    return [shares[1], shares[2] + shares[3], sum(shares[i] for i in range(4, 9))]


def test_in_user_mode_every_member_carries_the_groups_weight() -> None:
    served = serve_until(members("user"), 300_000, dict.fromkeys(range(1, 9), 200))
    assert by_group(served) == pytest.approx([3 / 12, 4 / 12, 5 / 12], abs=0.005)


def test_in_group_mode_active_members_split_the_groups_weight() -> None:
    served = serve_until(members("group"), 300_000, dict.fromkeys(range(1, 9), 200))
    assert by_group(served) == pytest.approx([3 / 6, 2 / 6, 1 / 6], abs=0.005)


def test_in_group_mode_the_weight_in_force_is_kept_in_the_lease() -> None:
    bench = Bench([user(i, 2.0, "staff") for i in (1, 2)], [backend(1, 4)], share_mode="group")
    alone = bench.serve(1)
    assert alone.weight == 2.0
    bench.serve(2)
    assert bench.serve(1).weight == 1.0
    assert alone.weight == 2.0


def test_in_group_mode_an_override_counts_among_the_members() -> None:
    bench = Bench(
        [user(1, 3.0, "staff", group_weight=2.0), user(2, 1.0, "staff", group_weight=2.0)],
        [backend(1, 4)],
        share_mode="group",
    )
    first, second = bench.submit(1), bench.submit(2)
    bench.pump()
    assert lease_of(first).weight == 1.5
    assert lease_of(second).weight == 0.5


def test_in_group_mode_a_user_without_a_group_keeps_the_own_weight() -> None:
    bench = Bench([user(1, 2.0, None)], [backend(1, 4)], share_mode="group")
    assert bench.serve(1).weight == 2.0


def test_changing_the_share_mode_acts_on_waiting_jobs() -> None:
    bench = members("user")
    for user_id in range(1, 9):
        for _ in range(2):
            bench.submit(user_id)
    running = bench.pump()
    assert {lease_of(t).weight for t in running if t.job.user_id >= 4} <= {1.0}
    bench.configure(share_mode="group")
    bench.settle(lease_of(running[0]))
    (ticket,) = bench.pump()
    expected = {1: 3.0, 2: 1.0, 3: 1.0}.get(ticket.job.user_id, 0.2)
    assert lease_of(ticket).weight == pytest.approx(expected)


def test_two_users_who_queue_64_jobs_each_share_64_slots_evenly() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 64)])
    for user_id in (1, 2):
        for _ in range(64):
            bench.submit(user_id)
    served = [ticket.job.user_id for ticket in bench.pump()]
    assert (served.count(1), served.count(2)) == (32, 32)


def test_end_users_of_a_trusted_key_are_served_in_turn() -> None:
    bench = Bench([user(1)], [backend(1, 1)])
    bench.serve(1, unit=(1, "ada"))
    for _ in range(3):
        bench.submit(1, unit=(1, "ada"))
    bob = bench.submit(1, unit=(1, "bob"))
    bench.pump()
    assert bench.core.position(bob, bench.now)[0] == 1


def test_end_users_may_split_the_owners_weight() -> None:
    bench = Bench([user(1, 3.0), user(2, 3.0)], [backend(1, 8)], end_user_share="split")
    bench.serve(1, unit=(1, "ada"))
    assert bench.serve(1, unit=(1, "bob")).weight == 1.5
    assert bench.serve(1, unit=(1, "eve")).weight == 1.0
    assert bench.serve(2).weight == 3.0


def test_end_users_count_as_members_unless_the_weight_is_split() -> None:
    bench = Bench([user(1, 3.0)], [backend(1, 8)])
    assert [bench.serve(1, unit=(1, name)).weight for name in ("ada", "bob")] == [3.0, 3.0]
