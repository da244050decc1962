"""Configuration changes while jobs wait and run, and surviving a restart."""

from __future__ import annotations

import json

import pytest

from tests.core.building import Bench, backend, lease_of, user


def test_a_removed_backends_leases_still_settle() -> None:
    bench = Bench([user(1)], [backend(1, 1), backend(2, 1)])
    leases = [bench.serve(1), bench.serve(1)]
    bench.backends = [backend(2, 1)]
    bench.configure()
    for lease in leases:
        assert bench.settle(lease, 100, 10).charged_tokens == 110
    assert [v.id for v in bench.core.backend_states(bench.now)] == [2]
    assert bench.in_flight() == 0


def test_a_backend_that_comes_back_remembers_what_runs_there() -> None:
    bench = Bench([user(1)], [backend(1, 2)])
    lease = bench.serve(1)
    bench.backends = []
    bench.configure()
    bench.backends = [backend(1, 2)]
    bench.configure()
    assert bench.state_of(1).in_flight == 1
    bench.settle(lease)
    assert bench.in_flight() == 0


def test_waiting_jobs_use_a_backend_that_is_added() -> None:
    bench = Bench([user(1)], [backend(1, 1)])
    bench.serve(1)
    waiting = [bench.submit(1) for _ in range(2)]
    bench.pump()
    bench.backends.append(backend(2, 1))
    bench.configure()
    assert bench.pump() == [waiting[0]]
    assert lease_of(waiting[0]).backend_id == 2


def test_jobs_keep_their_order_through_a_change_of_backends() -> None:
    bench = Bench([user(1)], [backend(1, 1)])
    lease = bench.serve(1)
    waiting = [bench.submit(1) for _ in range(4)]
    bench.pump()
    bench.backends = [backend(1, 1), backend(2, 1, enabled=False)]
    bench.configure()
    served = []
    for _ in waiting:
        bench.settle(lease)
        (ticket,) = bench.pump()
        served.append(ticket)
        lease = lease_of(ticket)
    assert served == waiting


def test_a_change_of_backends_moves_no_deficit() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 2)])
    bench.serve(1, max_tokens=0)
    bench.serve(2, max_tokens=0)
    for user_id in (1, 2):
        bench.submit(user_id, max_tokens=0)
    bench.settle(bench.running(1)[0], 5000)
    bench.core.mark_busy(1, bench.now, 1.0)

    def difference() -> float:
        deficit = {v.user_id: v.deficit for v in bench.core.queue(bench.now)}
        return deficit[2] - deficit[1]

    assert difference() == pytest.approx(4900.0)
    bench.backends = [backend(1, 2), backend(2, 0)]
    bench.configure()
    assert difference() == pytest.approx(4900.0)


def test_jobs_that_nobody_can_serve_any_more_are_dropped() -> None:
    bench = Bench([user(1)], [backend(1, 1, ["a", "b"])])
    bench.serve(1, "a")
    ticket = bench.submit(1, "b")
    bench.pump()
    bench.backends = [backend(1, 1, ["a"])]
    bench.configure()
    assert bench.pump() == [ticket]
    assert ticket.error is not None
    assert ticket.error.reason == "model_not_found"


def test_a_deleted_users_jobs_end_in_peace() -> None:
    bench = Bench([user(1, 3.0), user(2)], [backend(1, 1)])
    lease = bench.serve(1)
    waiting = bench.submit(1)
    bench.pump()
    del bench.users[1]
    bench.configure()
    bench.settle(lease)
    assert bench.pump() == [waiting]
    assert lease_of(waiting).weight == 3.0


def test_moving_to_another_group_counts_at_once() -> None:
    bench = Bench(
        [user(1, 1.0, "a", group_max_queued=1), user(2, 1.0, "b", group_max_queued=1)],
        [backend(1, 1)],
        share_mode="group",
    )
    bench.serve(2)
    bench.submit(1)
    bench.users[1] = user(1, 1.0, "b", group_max_queued=9)
    bench.configure(share_mode="group")
    bench.pump()
    bench.settle(bench.running(2)[0])
    (ticket,) = bench.pump()
    assert lease_of(ticket).decision.user_group == "b"


def test_fewer_slots_are_kept_to_as_requests_end() -> None:
    bench = Bench([user(1)], [backend(1, 3)])
    leases = [bench.serve(1) for _ in range(3)]
    waiting = bench.submit(1)
    bench.backends = [backend(1, 1)]
    bench.configure()
    for lease in leases[:2]:
        bench.settle(lease)
        assert bench.pump() == []
    bench.settle(leases[2])
    assert bench.pump() == [waiting]


def test_a_configuration_that_says_the_same_changes_nothing() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1)])
    bench.serve(1)
    for user_id in (1, 2, 1):
        bench.submit(user_id)
    bench.pump()
    before = bench.core.queue(bench.now)
    bench.configure()
    assert bench.core.queue(bench.now) == before


# ---- restart


def restarted(bench: Bench, after: float = 0.0) -> Bench:
    state = json.loads(json.dumps(bench.core.checkpoint(bench.now)))
    new = Bench(list(bench.users.values()), bench.backends)
    new.now = 5.0 + after  # another clock
    new.core.restore(state, 5.0)
    return new


def test_shares_survive_a_restart() -> None:
    bench = Bench([user(1, 2.0), user(2)], [backend(1, 2)])
    bench.now += 3.0
    bench.settle(bench.serve(1), 6000, 1000)
    bench.settle(bench.serve(2, unit=(2, "eve")), 500, 500)
    lease = bench.serve(1)
    bench.now += 2.0
    bench.core.first_byte(lease, bench.now)
    bench.settle(lease, 100, 300)
    new = restarted(bench)
    for unit in (1, (2, "eve")):
        before, after = bench.share(unit), new.share(unit)
        assert after.recent_tokens == before.recent_tokens
        assert after.charged_tokens == before.charged_tokens
        assert after.factor == before.factor
    assert new.serve(1).hold == bench.serve(1).hold
    assert new.core.token_rate(1) == bench.core.token_rate(1)
    assert new.share(1).burst_credits == pytest.approx(bench.share(1).burst_credits)


def test_a_debt_is_the_same_after_a_restart() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1)])
    bench.settle(bench.serve(1, max_tokens=0), 3000)
    bench.settle(bench.serve(2, max_tokens=0), 1000)
    new = restarted(bench)
    new.serve(2, max_tokens=0)
    new.submit(1, max_tokens=0)
    new.submit(2, max_tokens=0)
    new.pump()
    deficit = {v.user_id: v.deficit for v in new.core.queue(new.now)}
    assert deficit[2] - deficit[1] == pytest.approx(3000 - 1000 - 100)


def test_usage_is_as_old_after_a_restart_as_before() -> None:
    bench = Bench([user(1)], [backend(1, 2)])
    bench.settle(bench.serve(1), 6000)
    bench.now += 200.0
    assert restarted(bench, 80.0).core.stats(85.0).global_recent_tokens == 6000
    assert restarted(bench, 101.0).core.stats(106.0).global_recent_tokens == 0


def test_what_is_held_is_not_charged_over_a_restart() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1)])
    bench.settle(bench.serve(2, max_tokens=0), 200)
    bench.settle(bench.serve(1, max_tokens=0), 100)
    bench.serve(1, prompt=9000)
    new = restarted(bench)
    new.serve(1, prompt=0, max_tokens=0)
    new.submit(1, max_tokens=0)
    new.submit(2, max_tokens=0)
    new.pump()
    deficit = {v.user_id: v.deficit for v in new.core.queue(new.now)}
    assert deficit[1] - deficit[2] == pytest.approx(200 - 100)


def test_a_checkpoint_of_another_version_or_of_users_that_are_gone_is_no_obstacle() -> None:
    bench = Bench([user(1), user(2)], [backend(1)])
    bench.core.restore({}, bench.now)
    bench.core.restore({"version": 99, "units": "?"}, bench.now)
    bench.settle(bench.serve(1), 100)
    bench.settle(bench.serve(2), 100)
    del bench.users[1]
    new = restarted(bench)
    assert [view.user_id for view in new.core.shares(new.now)] == [2]
    assert new.serve(2).backend_id == 1


def test_idle_users_are_forgotten_after_the_window() -> None:
    bench = Bench([user(i) for i in range(1, 51)], [backend(1, 1)])
    for user_id in range(1, 51):
        bench.settle(bench.serve(user_id), 10)
        bench.now += 0.1
    assert len(bench.core.checkpoint(bench.now)["units"]) == 50
    bench.now += 400.0
    bench.serve(1)
    assert len(bench.core.checkpoint(bench.now)["units"]) == 1


def test_a_user_who_only_ever_cancels_is_forgotten_too() -> None:
    bench = Bench([user(1)], [backend(1, 1)])
    bench.core.cancel(bench.serve(1, unit=(1, "eve")).ticket, bench.now)
    bench.serve(1)
    waiting = bench.submit(1, unit=(1, "bob"))
    bench.pump()
    bench.core.cancel(waiting, bench.now)
    assert len(bench.core.checkpoint(bench.now)["units"]) == 3
    bench.now += 400.0
    bench.settle(bench.running(1)[0])
    bench.serve(1)
    assert len(bench.core.checkpoint(bench.now)["units"]) == 1
