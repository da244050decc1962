"""Fail windows, probes, busy backends, fail-open and retries (P5, P6; D2)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.building import Bench, backend, lease_of, user

STRATEGIES = ["score", "affinity", "round_robin"]


def pair(strategy: Any, slots: int = 8) -> Bench:
    return Bench([user(1)], [backend(1, slots), backend(2, slots)], strategies={"m": strategy})


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache_key", [None, "k"])
def test_a_failed_backend_gets_nothing_in_its_window(strategy: str, cache_key: str | None) -> None:
    bench = pair(strategy)
    bench.core.mark_failed(1, bench.now)
    for _ in range(6):
        bench.now += 4.9
        lease = bench.serve(1, cache_key=cache_key)
        assert lease.backend_id == 2
        assert "failed" in lease.decision.constraints[1]["fail_window"]
        bench.settle(lease)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_the_window_one_probe_goes_first(strategy: str) -> None:
    bench = pair(strategy, 4)
    bench.core.mark_failed(1, bench.now)
    assert bench.state_of(1).state == "failed"
    assert bench.state_of(1).failed_for_seconds == 30.0
    bench.now += 30.0
    for _ in range(10):
        bench.submit(1)
    leases = [lease_of(t) for t in bench.pump()]
    assert [lease.backend_id for lease in leases].count(1) == 1
    assert [lease.backend_id for lease in leases].count(2) == 4
    bench.core.mark_ok(1, bench.now)
    assert {lease_of(t).backend_id for t in bench.pump()} == {1}


def test_a_probe_that_fails_opens_a_new_window() -> None:
    bench = pair("score", 4)
    bench.core.mark_failed(1, bench.now)
    bench.now += 30.0
    probe = next(x for x in (bench.serve(1) for _ in range(4)) if x.backend_id == 1)
    bench.core.mark_failed(1, bench.now)
    bench.core.retry(probe, bench.now, exclude=frozenset({1}))
    assert bench.pump() == [probe.ticket]
    assert lease_of(probe.ticket).backend_id == 2
    bench.now += 29.9
    assert {bench.serve(1).backend_id for _ in range(1)} == {2}


def test_a_probe_without_a_verdict_is_followed_by_another() -> None:
    bench = Bench([user(1)], [backend(1, 4)])
    bench.core.mark_failed(1, bench.now)
    bench.now += 30.0
    first = bench.submit(1)
    second = bench.submit(1)
    assert bench.pump() == [first]
    bench.core.cancel(first, bench.now)
    assert bench.pump() == [second]


def test_a_stream_that_ends_well_during_the_window_ends_it() -> None:
    bench = pair("round_robin")
    lease = bench.serve(1)
    bench.core.mark_failed(lease.backend_id, bench.now)
    bench.now += 1.0
    bench.settle(lease)
    bench.core.mark_ok(lease.backend_id, bench.now)
    assert {bench.serve(1).backend_id for _ in range(2)} == {1, 2}


def test_when_all_have_failed_the_best_of_them_is_tried() -> None:
    bench = pair("score")
    for backend_id in (1, 2):
        bench.core.mark_failed(backend_id, bench.now)
    lease = bench.serve(1)
    assert lease.decision.reason == "fail_open"


def test_a_full_backend_that_works_is_waited_for_rather_than_a_failed_one() -> None:
    bench = pair("score", 1)
    bench.core.mark_failed(1, bench.now)
    bench.serve(1)
    ticket = bench.submit(1)
    assert bench.pump() == []
    assert ticket.wait_reason == "backends_full"


def test_the_end_of_a_window_is_an_event() -> None:
    bench = pair("score", 1)
    bench.core.mark_failed(1, bench.now)
    bench.serve(1)
    ticket = bench.submit(1)
    bench.pump()
    assert bench.core.next_event(bench.now) == bench.now + 30.0
    bench.now += 30.0
    assert bench.pump() == [ticket]
    assert lease_of(ticket).backend_id == 1


def test_a_busy_backend_is_left_alone_for_a_moment_and_not_marked() -> None:
    bench = pair("score")
    bench.core.mark_busy(1, bench.now, 2.0)
    assert {bench.serve(1).backend_id for _ in range(3)} == {2}
    assert bench.state_of(1).state == "unknown"
    bench.now += 2.0
    assert bench.serve(1).backend_id == 1


def test_when_all_are_busy_the_job_waits() -> None:
    bench = pair("score")
    for backend_id in (1, 2):
        bench.core.mark_busy(backend_id, bench.now, 1.5)
    ticket = bench.submit(1)
    assert bench.pump() == []
    assert bench.core.next_event(bench.now) == bench.now + 1.5
    bench.now += 1.5
    assert bench.pump() == [ticket]


@pytest.mark.parametrize("values", [{"enabled": False}, {"draining": True}, {"paused": True}])
def test_jobs_for_a_backend_out_of_service_wait(values: dict[str, bool]) -> None:
    bench = Bench([user(1)], [backend(1, **values)])
    ticket = bench.submit(1)
    assert bench.pump() == []
    assert ticket.wait_reason == "paused"
    bench.backends = [backend(1)]
    bench.configure()
    assert bench.pump() == [ticket]


def test_a_backend_that_refuses_connections_is_left_alone_until_it_is_polled_well() -> None:
    bench = pair("score")
    bench.observe(1, reachable=False)
    assert bench.state_of(1).state == "down"
    assert {bench.serve(1).backend_id for _ in range(3)} == {2}
    bench.now += 1.0
    bench.observe(1, reachable=True)
    assert bench.state_of(1).state == "ready"
    assert bench.serve(1).backend_id == 1


def test_an_unreachable_backend_is_tried_when_there_is_no_other() -> None:
    bench = Bench([user(1)], [backend(1, 2)])
    bench.observe(1, reachable=False)
    lease = bench.serve(1)
    assert lease.decision.reason == "fail_open"
    bench.now += 1.0
    bench.core.mark_ok(1, bench.now)
    assert bench.state_of(1).state == "ready"
    assert bench.serve(1).decision.reason == "only_candidate"


def test_draining_lets_running_requests_end() -> None:
    bench = Bench([user(1)], [backend(1, 2)])
    lease = bench.serve(1)
    bench.backends = [backend(1, 2, draining=True)]
    bench.configure()
    assert bench.state_of(1).state == "draining"
    assert bench.settle(lease, 100, 10).charged_tokens == 110
    assert bench.in_flight() == 0


# ---- P6


def test_a_retried_job_keeps_its_place() -> None:
    bench = Bench([user(1)], [backend(1, 1), backend(2, 1)])
    first = bench.serve(1)
    second = bench.serve(1)
    waiting = [bench.submit(1) for _ in range(2)]
    bench.now += 1.0
    bench.core.retry(first, bench.now)
    bench.settle(second)
    assert bench.pump() == [first.ticket, waiting[0]]
    assert first.ticket.attempts == 2


def test_a_retried_jobs_wait_counts_from_its_arrival() -> None:
    """Nothing costs anything here, so that waiting alone decides."""
    bench = Bench([user(1), user(2), user(3)], [backend(1, 1)])
    lease = bench.serve(3, prompt=0, max_tokens=0)
    first = bench.submit(1, prompt=0, max_tokens=0)
    bench.pump()
    bench.now += 50.0
    other = bench.submit(2, prompt=0, max_tokens=0)
    bench.now += 40.0
    bench.settle(lease, 0)
    assert bench.pump() == [first]
    bench.now += 10.0
    bench.submit(1, prompt=0, max_tokens=0)
    bench.core.retry(lease_of(first), bench.now)
    assert bench.pump() == [first]
    bench.settle(lease_of(first), 0)
    assert bench.pump() == [other]


def test_a_retried_job_brings_its_age_to_a_line_that_has_formed_meanwhile() -> None:
    """User 1's later job came after user 2's; the one that comes back came before both."""
    bench = Bench([user(1), user(2)], [backend(1, 1)])
    first = bench.serve(1, prompt=0, max_tokens=0)
    bench.now += 50.0
    other = bench.submit(2, prompt=0, max_tokens=0)
    bench.now += 50.0
    bench.submit(1, prompt=0, max_tokens=0)
    bench.pump()
    bench.core.retry(first, bench.now)
    assert bench.pump() == [first.ticket]
    bench.settle(lease_of(first.ticket), 0)
    assert bench.pump() == [other]


def test_two_retries_of_one_user_go_in_the_order_of_their_arrival() -> None:
    bench = Bench([user(1)], [backend(1, 2)])
    first, second = bench.serve(1), bench.serve(1)
    bench.submit(1)
    bench.core.mark_busy(1, bench.now, 1.0)
    bench.core.retry(second, bench.now)
    bench.core.retry(first, bench.now)
    bench.now += 1.0
    assert bench.pump() == [first.ticket, second.ticket]


def test_a_retry_is_not_subject_to_queue_bounds() -> None:
    bench = Bench([user(1)], [backend(1, 1, max_queue=0)])
    lease = bench.serve(1)
    bench.core.mark_failed(1, bench.now)
    bench.core.retry(lease, bench.now, exclude=frozenset({1}))
    assert lease.ticket.state in ("queued", "leased")


def test_an_excluded_backend_is_used_when_there_is_no_other() -> None:
    bench = Bench([user(1)], [backend(1, 1)])
    lease = bench.serve(1)
    bench.core.retry(lease, bench.now, exclude=frozenset({1}))
    assert bench.pump() == [lease.ticket]


def test_an_excluded_backend_is_used_when_the_others_are_out_of_service() -> None:
    bench = Bench([user(1)], [backend(1, 1), backend(2, 1)])
    lease = bench.serve(1)
    other = 3 - lease.backend_id
    bench.observe(other, reachable=False)
    bench.core.retry(lease, bench.now, exclude=frozenset({lease.backend_id}))
    assert bench.pump() == [lease.ticket]
    assert lease_of(lease.ticket).backend_id == lease.backend_id


def test_a_retry_waits_for_the_other_backend_rather_than_take_the_excluded_one() -> None:
    bench = Bench([user(1)], [backend(1, 1), backend(2, 1)])
    first, second = bench.serve(1), bench.serve(1)
    bench.core.retry(first, bench.now, exclude=frozenset({first.backend_id}))
    assert bench.pump() == []
    bench.settle(second)
    assert bench.pump() == [first.ticket]
    assert lease_of(first.ticket).backend_id == second.backend_id


def test_only_time_in_the_queue_counts_as_waiting() -> None:
    bench = Bench([user(1)], [backend(1, 1)], max_wait=10.0)
    lease = bench.serve(1)
    bench.now += 600.0  # the attempt itself took long
    bench.core.mark_busy(1, bench.now, 60.0)
    bench.core.retry(lease, bench.now)
    bench.now += 9.9
    assert bench.pump() == []
    bench.now += 0.2
    assert bench.pump() == [lease.ticket]
    assert lease.ticket.state == "evicted"


def test_retrying_an_ended_lease_does_nothing() -> None:
    bench = Bench([user(1)], [backend(1, 1)])
    lease = bench.serve(1)
    bench.settle(lease)
    bench.core.retry(lease, bench.now)
    assert bench.pump() == []
    assert lease.ticket.state == "settled"


def test_a_refused_retry_surfaces_as_evicted() -> None:
    bench = Bench([user(1)], [backend(1, 1)])
    lease = bench.serve(1)
    bench.backends = [backend(2, 1, ["other"])]
    bench.configure()
    bench.core.retry(lease, bench.now)
    assert bench.pump() == [lease.ticket]
    assert lease.ticket.error is not None
    assert lease.ticket.error.reason == "model_not_found"
