"""What can be seen of the running scheduler, and what each decision records."""

from __future__ import annotations

import pytest

from scheduler.core.errors import Evicted
from tests.core.building import Bench, backend, lease_of, user


def test_statistics_have_the_seeds_figures() -> None:
    bench = Bench(
        [user(1, 3.0, "faculty"), user(2, 1.0, "student")],
        [backend(1, 1, ["llama3.2"]), backend(2, 1, ["mistral"])],
    )
    bench.settle(bench.serve(1, "llama3.2"), 20_000, 10_000)
    bench.settle(bench.serve(2, "mistral"), 15_000, 5_000)
    bench.serve(1, "llama3.2")
    bench.serve(2, "mistral")
    for user_id, model_name in ((1, "llama3.2"), (1, "llama3.2"), (1, "mistral")):
        bench.submit(user_id, model_name)
    bench.now += 1.0
    for model_name in ("llama3.2", "llama3.2"):
        bench.submit(2, model_name)
    bench.now += 2.0
    stats = bench.core.stats(bench.now)
    assert stats.queue_total == 5
    assert stats.queue_by_user == {1: 3, 2: 2}
    assert stats.queue_by_model == {"llama3.2": 4, "mistral": 1}
    assert stats.average_wait_seconds == pytest.approx((3 * 3 + 2 * 2) / 5)
    assert stats.total_users == 2
    assert stats.global_recent_tokens == 50_000
    users = {view.user_id: view for view in stats.users}
    assert (users[1].weight, users[1].recent_tokens, users[1].group) == (3.0, 30_000, "faculty")
    assert (users[2].weight, users[2].recent_tokens, users[2].group) == (1.0, 20_000, "student")


def test_looks_at_many_users_come_in_parts_while_jobs_come_and_go() -> None:
    bench = Bench([user(i) for i in range(1, 1001)], [backend(1, 4)])
    tickets = [bench.submit(i) for i in range(1, 1001)]
    bench.pump()
    bench.core.service_gap(bench.now)  # the gap is measured from one look to the next
    for look in (
        bench.core.stats_in_parts(bench.now),
        bench.core.service_gap_in_parts(bench.now),
        bench.core.checkpoint_in_parts(bench.now),
    ):
        parts = 0
        for _ in look:
            parts += 1
            for ticket in tickets[-7:]:
                bench.core.cancel(ticket, bench.now)
                tickets.remove(ticket)
            bench.submit(parts)
            bench.pump()
        assert parts >= 4
    stats = bench.core.stats(bench.now)
    assert stats.queue_total == sum(stats.queue_by_user.values()) == len(bench.waiting)


def test_an_idle_scheduler_has_nothing_to_show() -> None:
    bench = Bench([user(1)], [backend(1)])
    stats = bench.core.stats(bench.now)
    assert (stats.queue_total, stats.users, stats.average_wait_seconds) == (0, [], 0.0)
    assert bench.core.queue(bench.now) == []
    assert bench.core.service_gap(bench.now) == (0.0, 0.0)
    assert bench.core.next_event(bench.now) == bench.now  # the configuration is new
    assert bench.pump() == []
    assert bench.core.next_event(bench.now) is None


def test_a_paused_backend_drains_what_it_has_and_is_then_as_good_as_disabled() -> None:
    bench = Bench([user(1)], [backend(1, 1), backend(2, 1)])
    leases = [bench.serve(1), bench.serve(1)]
    bench.backends = [backend(1, 1, paused=True), backend(2, 1)]
    bench.configure()
    assert bench.state_of(1).state == "draining"
    for lease in leases:
        bench.settle(lease)
    assert bench.state_of(1).state == "disabled"
    assert bench.serve(1).decision.constraints == {1: {"enabled": "is paused"}}


def test_who_can_be_served_elsewhere_does_not_wait_for_a_backend_out_of_service() -> None:
    bench = Bench([user(1)], [backend(1, 1, ["a", "b"]), backend(2, 1, ["a"])])
    bench.serve(1, "b")
    bench.serve(1, "a")
    for model_name in ("a", "a", "b"):
        bench.submit(1, model_name)
    bench.pump()
    assert [bench.state_of(i).queued for i in (1, 2)] == [3, 2]
    bench.backends[0] = backend(1, 1, ["a", "b"], enabled=False)
    bench.configure()
    assert [bench.state_of(i).queued for i in (1, 2)] == [1, 2]


def test_a_backend_shows_its_slots_and_who_waits_for_it() -> None:
    bench = Bench([user(1)], [backend(1, 1, ["a"]), backend(2, 1, ["a", "b"])])
    for model_name in ("a", "b"):
        bench.serve(1, model_name)
    for model_name in ("a", "b", "b"):
        bench.submit(1, model_name)
    bench.observe(1, running=1)
    bench.now += 4.0
    first, second = bench.core.backend_states(bench.now)
    assert (first.name, first.in_flight, first.max_concurrent, first.queued) == (
        "backend1",
        1,
        1,
        1,
    )
    assert (second.in_flight, second.queued) == (1, 3)
    assert (first.state, first.observed_age_seconds) == ("ready", 4.0)
    assert (second.state, second.observed_age_seconds) == ("unknown", None)


@pytest.mark.parametrize(
    ("values", "state"), [({"enabled": False}, "disabled"), ({"draining": True}, "draining")]
)
def test_a_backend_out_of_service_says_so(values: dict[str, bool], state: str) -> None:
    assert Bench([user(1)], [backend(1, **values)]).state_of(1).state == state


# ---- position


def test_positions_alternate_between_equal_users() -> None:
    bench = Bench([user(1), user(2), user(3)], [backend(1, 1)])
    bench.serve(3)
    first = [bench.submit(1, max_tokens=0) for _ in range(3)]
    second = [bench.submit(2, max_tokens=0) for _ in range(3)]
    bench.pump()
    positions = [bench.core.position(t, bench.now)[0] for t in (*first, *second)]
    assert positions == [1, 3, 5, 2, 4, 6]
    order = [view.request_id for view in bench.core.queue(bench.now)]
    assert order == [t.job.request_id for pair in zip(first, second, strict=True) for t in pair]


def test_positions_follow_the_weights() -> None:
    bench = Bench([user(1, 3.0), user(2), user(3)], [backend(1, 1)])
    bench.serve(3, prompt=0, max_tokens=0)
    heavy = [bench.submit(1, max_tokens=0) for _ in range(6)]
    light = [bench.submit(2, max_tokens=0) for _ in range(2)]
    bench.pump()
    assert [bench.core.position(t, bench.now)[0] for t in heavy] == [1, 3, 4, 5, 7, 8]
    assert [bench.core.position(t, bench.now)[0] for t in light] == [2, 6]


def test_models_on_the_same_backends_wait_in_one_line() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1, ["a", "b"])])
    bench.serve(1, "a", prompt=0, max_tokens=0)
    bench.submit(1, "a")
    ticket = bench.submit(2, "b")
    bench.pump()
    assert bench.core.position(ticket, bench.now)[0] == 2


def test_background_waits_behind_everybody() -> None:
    bench = Bench([user(1, 0.0), user(2)], [backend(1, 1)])
    bench.serve(2)
    ticket = bench.submit(1)
    for _ in range(3):
        bench.submit(2)
    bench.pump()
    assert bench.core.position(ticket, bench.now)[0] == 4
    assert bench.core.queue(bench.now)[-1].weight == 0.0


def test_seconds_are_estimated_from_the_measured_rate() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1)])
    lease = bench.serve(1)
    for _ in range(60):
        bench.now += 0.5
        bench.submit(1)
        bench.settle(lease)
        lease = lease_of(bench.pump()[0])
    ticket = bench.submit(2)
    bench.pump()
    position, seconds = bench.core.position(ticket, bench.now)
    assert position == 1
    assert seconds == pytest.approx(0.5, rel=0.1)


def test_what_does_not_wait_has_no_position() -> None:
    bench = Bench([user(1)], [backend(1)])
    assert bench.core.position(bench.serve(1).ticket, bench.now) == (0, None)


def test_the_position_at_arrival_is_recorded() -> None:
    bench = Bench([user(i) for i in range(1, 5)], [backend(1, 1)])
    assert bench.serve(1).decision.position_at_arrival == 1
    tickets = [bench.submit(i) for i in (2, 3, 2, 3)]
    bench.pump()
    assert [t.position_at_arrival for t in tickets] == [1, 2, 3, 4]


def test_the_position_at_arrival_is_a_fair_estimate_among_many() -> None:
    bench = Bench([user(i) for i in range(1, 202)], [backend(1, 1)])
    bench.serve(1, prompt=0, max_tokens=0)
    for user_id in range(2, 201):
        bench.submit(user_id, max_tokens=0)
    bench.pump()
    mine = [bench.submit(201, max_tokens=0) for _ in range(2)]
    bench.pump()
    assert [bench.core.position(t, bench.now)[0] for t in mine] == [200, 201]
    assert [t.position_at_arrival for t in mine] == pytest.approx([200, 201], abs=10)


# ---- why


def test_a_job_served_at_once_did_not_wait() -> None:
    bench = Bench([user(1)], [backend(1)])
    decision = bench.serve(1).decision
    assert (decision.wait_reason, decision.ahead) == ("none", {})


def test_the_reason_for_waiting_is_the_one_at_arrival() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1)])
    bench.serve(1)
    full = bench.submit(1)
    bench.pump()
    backlog = bench.submit(1)
    bench.pump()
    others = bench.submit(2)
    bench.pump()
    reasons = [full.wait_reason, backlog.wait_reason, others.wait_reason]
    assert reasons == ["backends_full", "own_backlog", "others_ahead"]


def test_waiting_for_failed_backends_is_said() -> None:
    bench = Bench([user(1)], [backend(1, 1)])
    bench.serve(1)
    bench.core.mark_failed(1, bench.now)
    ticket = bench.submit(1)
    bench.pump()
    assert ticket.wait_reason == "backends_failed"


def test_who_was_served_meanwhile_is_counted_by_group() -> None:
    """User 3 is 250 tokens behind, so that three jobs of 100 go first."""
    bench = Bench(
        [user(1, 1.0, "a"), user(2, 1.0, "b"), user(3, 1.0, "c")],
        [backend(1, 1)],
        deprioritize_threshold=1.0,
    )
    bench.settle(bench.serve(3, max_tokens=0), 250)
    lease = bench.serve(1, max_tokens=0)
    waiting = bench.submit(3, max_tokens=0)
    for _ in range(5):
        bench.submit(2, max_tokens=0)
    bench.pump()
    while waiting.state == "queued":
        bench.settle(lease, 100)
        lease = lease_of(bench.pump()[0])
    assert lease.decision.ahead == {"b": (3, 300.0)}


def test_a_decision_holds_the_values_of_its_moment() -> None:
    bench = Bench([user(1, 2.0, "staff"), user(2)], [backend(1, 1)])
    bench.settle(bench.serve(1, max_tokens=0), 400)
    decision = bench.serve(1, max_tokens=0).decision
    before = decision._asdict()
    bench.now += 50.0
    bench.core.mark_failed(1, bench.now)
    bench.submit(2)
    bench.pump()
    assert decision._asdict() == before
    assert decision.selected_backend_id == 1
    assert decision.user_group == "staff"
    assert decision.user_weight == 2.0
    assert decision.user_recent_usage == 400.0


def test_an_admins_eviction_is_told_by_the_next_pump() -> None:
    bench = Bench([user(1)], [backend(1, 1)])
    lease = bench.serve(1)
    ticket = bench.submit(1)
    bench.pump()
    error = Evicted("queue_timeout", "Removed by an administrator.")
    bench.core.evict(ticket, error, bench.now)
    bench.core.evict(lease.ticket, error, bench.now)
    assert bench.pump() == [ticket]
    assert ticket.error is error
    assert lease.ticket.state == "leased"


# ---- measured


def test_the_gap_of_two_backlogged_users_is_what_they_were_charged_apart() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 2)])
    for user_id in (1, 2):
        for _ in range(5):
            bench.submit(user_id, prompt=100 * user_id, max_tokens=0)
    bench.pump()
    assert bench.core.service_gap(bench.now)[0] == 0.0
    bench.settle(bench.running(1)[0], 700)
    gap, bound = bench.core.service_gap(bench.now)
    assert gap == 600.0
    assert bound >= gap


def test_the_token_rate_of_a_backend_is_measured() -> None:
    bench = Bench([user(1)], [backend(1)])
    assert bench.core.token_rate(1) == bench.core.token_rate(99) == 30.0
    lease = bench.serve(1)
    bench.now += 2.0
    bench.settle(lease, 100, 120)
    assert bench.core.token_rate(1) == 60.0
    lease = bench.serve(1)
    bench.now += 2.0
    bench.settle(lease, 100, 9999, estimated=True)  # a guess teaches nothing
    assert bench.core.token_rate(1) == 60.0
