"""How much may wait, how long, and who has to make room (R16; B30, D2)."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.core import bounds
from scheduler.core.drain import DrainRate, retry_after
from scheduler.core.errors import Evicted, Rejected
from scheduler.core.scheduler import Ticket
from tests.core.building import Bench, backend, lease_of, user


def refusal(bench: Bench, *args: Any, **values: Any) -> Rejected:
    with pytest.raises(Rejected) as caught:
        bench.submit(*args, **values)
    error = caught.value
    assert error.retry_after is None or 1 <= error.retry_after <= 60
    return error


def state(tickets: list[Ticket]) -> list[str]:
    return [ticket.state for ticket in tickets]


# ---- the shared bound


def test_five_requests_of_two_users_on_one_slot_and_two_places() -> None:
    """One runs, two wait, two are told to come back; neither user is shut out."""
    bench = Bench([user(1), user(2)], [backend(1, 1, max_queue=2)])
    first = [bench.submit(1) for _ in range(3)]
    second = bench.submit(2)
    refused = refusal(bench, 2)
    changed = bench.pump()
    assert state(first) == ["leased", "queued", "evicted"]
    assert second.state == "queued"
    assert first[2] in changed
    error = first[2].error
    assert isinstance(error, Evicted)
    assert (error.reason, refused.reason) == ("queue_full", "queue_full")
    assert error.retry_after is not None
    assert error.retry_after >= 1
    assert bench.share(1).charged_tokens == bench.share(2).charged_tokens == 0.0


def test_new_jobs_are_taken_when_the_queue_has_drained() -> None:
    bench = Bench([user(1)], [backend(1, 1, max_queue=1)])
    lease = bench.serve(1)
    waiting = bench.submit(1)
    bench.pump()
    assert refusal(bench, 1).reason == "queue_full"
    bench.settle(lease)
    assert bench.pump() == [waiting]
    assert bench.submit(1).state == "queued"


def test_a_queue_of_0_serves_while_a_slot_is_free_and_else_refuses() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 2, max_queue=0)])
    first, second = bench.submit(1), bench.submit(2)
    assert refusal(bench, 1).reason == "queue_full"
    assert set(bench.pump()) == {first, second}
    bench.settle(lease_of(first))
    assert bench.serve(1).backend_id == 1


def test_a_burst_larger_than_the_queue_is_taken_while_slots_are_free() -> None:
    bench = Bench([user(1)], [backend(1, 8, max_queue=2)])
    tickets = [bench.submit(1) for _ in range(10)]
    assert refusal(bench, 1).reason == "queue_full"
    bench.pump()
    assert state(tickets) == ["leased"] * 8 + ["queued"] * 2


def test_a_user_at_the_fair_part_does_not_push_others_out() -> None:
    bench = Bench([user(i) for i in (1, 2, 3)], [backend(1, 1, max_queue=4)])
    bench.serve(3)
    waiting = [bench.submit(i) for i in (1, 1, 2, 2)]
    bench.pump()
    assert refusal(bench, 1).reason == "queue_full"
    assert refusal(bench, 2).reason == "queue_full"
    newcomer = bench.submit(3)  # fair part now 4/3: both others are above it
    assert bench.pump() == [waiting[3]]  # the newest of theirs
    assert newcomer.state == "queued"


def test_who_floods_a_full_queue_is_refused_without_a_look_at_everybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench([user(i) for i in range(1, 10)], [backend(1, 1, max_queue=16)])
    bench.serve(9)
    for user_id in [*range(1, 9)] * 2:
        bench.submit(user_id)
    bench.pump()
    looked: list[object] = []
    monkeypatch.setattr(bounds, "Counter", looked.append)
    assert refusal(bench, 3).reason == "queue_full"
    assert looked == []


def test_the_newest_job_of_the_one_who_waits_most_makes_room() -> None:
    bench = Bench([user(i) for i in (1, 2, 3)], [backend(1, 1, max_queue=6)])
    bench.serve(3)
    many = [bench.submit(1) for _ in range(4)]
    bench.now += 1.0
    few = [bench.submit(2) for _ in range(2)]
    bench.pump()
    bench.submit(3)
    assert bench.pump() == [many[3]]
    assert state(few) == ["queued", "queued"]


def test_more_users_than_places_have_one_place_each() -> None:
    bench = Bench([user(i) for i in range(1, 6)], [backend(1, 1, max_queue=2)])
    bench.serve(5)
    bench.submit(1)
    bench.submit(2)
    bench.pump()
    assert refusal(bench, 3).reason == "queue_full"
    assert refusal(bench, 4).reason == "queue_full"


def test_a_flood_never_keeps_another_user_out() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1, max_queue=8)])
    bench.serve(1)
    for _ in range(200):
        try:
            bench.submit(1)
        except Rejected:
            break
    assert [bench.submit(2).state for _ in range(4)] == ["queued"] * 4
    assert bench.core.stats(bench.now).queue_by_user == {1: 4, 2: 4}
    assert refusal(bench, 2).reason == "queue_full"


# ---- overlapping classes


def overlapping() -> Bench:
    """Model m on both backends, n only on the first; two places each."""
    return Bench(
        [user(1), user(2)],
        [backend(1, 1, ["m", "n"], max_queue=2), backend(2, 1, ["m"], max_queue=2)],
    )


def test_jobs_with_fewer_backends_find_room_only_in_theirs() -> None:
    bench = overlapping()
    bench.serve(1, "n")
    bench.serve(1, "m")
    for _ in range(2):
        bench.submit(1, "n")
    assert refusal(bench, 1, "n").reason == "queue_full"
    for _ in range(2):
        bench.submit(1, "m")
    assert refusal(bench, 1, "m").reason == "queue_full"
    assert bench.core.stats(bench.now).queue_by_model == {"n": 2, "m": 2}


def test_no_backends_bound_is_exceeded_through_a_larger_class() -> None:
    """Four jobs for either backend fill both queues; one for the first has no place either."""
    bench = overlapping()
    bench.serve(1, "n")
    bench.serve(1, "m")
    for _ in range(4):
        bench.submit(1, "m")
    assert refusal(bench, 1, "n").reason == "queue_full"
    bench.submit(2, "n")  # but another user gets one, at the first user's cost
    assert bench.core.stats(bench.now).queue_by_model == {"n": 1, "m": 3}


def test_a_separate_backend_has_a_queue_of_its_own() -> None:
    bench = Bench([user(1)], [backend(1, 1, ["m"], max_queue=1), backend(2, 1, ["n"], max_queue=1)])
    for model_name in ("m", "n"):
        bench.serve(1, model_name)
        bench.submit(1, model_name)
    assert bench.core.stats(bench.now).queue_by_model == {"m": 1, "n": 1}


def test_the_queue_of_a_disabled_backend_does_not_count_beside_one_in_service() -> None:
    bench = Bench(
        [user(1)], [backend(1, 1, max_queue=2), backend(2, 1, max_queue=50, enabled=False)]
    )
    bench.serve(1)
    for _ in range(2):
        bench.submit(1)
    assert refusal(bench, 1).reason == "queue_full"


def test_the_queue_of_a_disabled_backend_counts_when_there_is_no_other() -> None:
    bench = Bench([user(1)], [backend(1, 1, max_queue=2, enabled=False)])
    assert [bench.submit(1).state for _ in range(2)] == ["queued", "queued"]
    assert refusal(bench, 1).reason == "queue_full"


# ---- limits of user, group and site


def test_the_concurrency_limit_counts_waiting_and_running() -> None:
    bench = Bench([user(1, max_concurrent=2)], [backend(1, 1)])
    lease = bench.serve(1)
    bench.submit(1)
    assert refusal(bench, 1).reason == "concurrency_limit_exceeded"
    bench.settle(lease)
    assert bench.submit(1).state == "queued"


def test_a_job_not_pumped_yet_counts_for_the_concurrency_limit() -> None:
    bench = Bench([user(1, max_concurrent=1)], [backend(1, 4)])
    bench.submit(1)
    assert refusal(bench, 1).reason == "concurrency_limit_exceeded"


def test_a_concurrency_limit_of_0_lets_nothing_through() -> None:
    bench = Bench([user(1, max_concurrent=0)], [backend(1, 4)])
    assert refusal(bench, 1).reason == "concurrency_limit_exceeded"


def test_end_users_behind_one_key_share_its_owners_limit() -> None:
    bench = Bench([user(1, max_concurrent=2)], [backend(1, 4)])
    for name in ("ada", "bob"):
        bench.serve(1, unit=(1, name))
    assert refusal(bench, 1, unit=(1, "eve")).reason == "concurrency_limit_exceeded"


def test_a_users_own_queue_bound_refuses_and_evicts_nobody() -> None:
    bench = Bench([user(1, max_queued=1), user(2)], [backend(1, 1)])
    bench.serve(2)
    bench.submit(1)
    assert refusal(bench, 1).reason == "queue_full"
    assert bench.submit(2).state == "queued"


def test_the_sites_bound_per_user_holds_unless_the_user_has_an_own() -> None:
    bench = Bench([user(1), user(2, max_queued=3)], [backend(1, 1)], max_queued_per_user=1)
    bench.serve(1)
    bench.submit(1)
    assert refusal(bench, 1).reason == "queue_full"
    assert [bench.submit(2).state for _ in range(3)] == ["queued"] * 3


def test_a_users_queue_bound_of_0_still_serves_from_free_slots() -> None:
    bench = Bench([user(1, max_queued=0)], [backend(1, 1)])
    assert bench.serve(1).backend_id == 1
    assert refusal(bench, 1).reason == "queue_full"


def test_a_groups_queue_bound_counts_all_its_members() -> None:
    bench = Bench([user(i, group_max_queued=2) for i in (1, 2, 3)], [backend(1, 1)])
    bench.serve(3)
    bench.submit(1)
    bench.submit(2)
    assert refusal(bench, 3).reason == "queue_full"


def test_the_total_bound_counts_every_model() -> None:
    bench = Bench([user(1)], [backend(1, 1, ["a"]), backend(2, 1, ["b"])], max_queued=2)
    for model_name in ("a", "b"):
        bench.serve(1, model_name)
        bench.submit(1, model_name)
    assert refusal(bench, 1, "a").reason == "queue_full"


def test_the_total_bound_makes_room_for_a_user_below_the_fair_part() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1, ["a"]), backend(2, 1, ["b"])], max_queued=2)
    bench.serve(1, "a")
    bench.serve(1, "b")
    waiting = [bench.submit(1, "a") for _ in range(2)]
    other = bench.submit(2, "b")
    assert bench.pump() == [waiting[1]]
    assert other.state == "queued"


def test_refused_jobs_leave_no_trace_in_the_shares() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1, max_queue=0)])
    bench.serve(1)
    refusal(bench, 2)
    assert [view.user_id for view in bench.core.shares(bench.now)] == [1]


# ---- the longest wait


def test_a_job_that_waits_too_long_is_evicted() -> None:
    bench = Bench([user(1)], [backend(1, 1)], max_wait=300.0)
    bench.serve(1)
    ticket = bench.submit(1)
    bench.pump()
    assert bench.core.next_event(bench.now) in (bench.now + 300.0, bench.now + 30.0)
    bench.now += 299.9
    assert bench.pump() == []
    bench.now += 0.1
    assert bench.pump() == [ticket]
    assert ticket.state == "evicted"
    assert ticket.error is not None
    assert ticket.error.reason == "queue_timeout"
    assert 1 <= (ticket.error.retry_after or 0) <= 60


def test_a_users_own_longest_wait_counts_before_the_sites() -> None:
    bench = Bench([user(1, max_wait_seconds=5.0), user(2)], [backend(1, 1)], max_wait=10.0)
    bench.serve(1)
    impatient, patient = bench.submit(1), bench.submit(2)
    bench.pump()
    bench.now += 5.0
    assert bench.pump() == [impatient]
    bench.now += 5.0
    assert bench.pump() == [patient]


def test_a_slot_that_becomes_free_in_the_last_moment_is_used() -> None:
    bench = Bench([user(1)], [backend(1, 1)], max_wait=10.0)
    lease = bench.serve(1)
    ticket = bench.submit(1)
    bench.pump()
    bench.now += 10.0
    bench.settle(lease)
    assert bench.pump() == [ticket]
    assert ticket.state == "leased"


def test_a_new_longest_wait_acts_on_waiting_jobs() -> None:
    bench = Bench([user(1)], [backend(1, 1)], max_wait=300.0)
    bench.serve(1)
    ticket = bench.submit(1)
    bench.pump()
    bench.now += 20.0
    bench.configure(max_wait=10.0)
    assert bench.pump() == [ticket]


def test_a_job_submitted_again_keeps_its_first_arrival() -> None:
    bench = Bench([user(1)], [backend(1, 1)], max_wait=300.0)
    bench.serve(1)
    ticket = bench.submit(1)
    again = bench.core.submit(ticket.job, bench.now, enqueued_at=bench.now - 200.0)
    bench.pump()
    assert bench.core.position(again, bench.now)[0] == 1
    bench.now += 100.0
    assert bench.pump() == [again]


# ---- Retry-After


def test_the_drain_rate_is_measured_over_half_a_minute() -> None:
    drain = DrainRate()
    assert drain.per_second(0.0) is None
    for i in range(600):
        drain.note(i / 10)
    assert drain.per_second(60.0) == pytest.approx(10.0, rel=0.05)
    assert drain.seconds_for(20, 60.0) == pytest.approx(2.0, rel=0.05)
    assert drain.per_second(60.0 + 151.0) is None


@pytest.mark.parametrize(
    ("seconds", "expected"), [(None, 5), (0.0, 1), (0.2, 1), (1.2, 2), (59.5, 60), (1e9, 60)]
)
def test_retry_after_is_a_whole_number_from_1_to_60(seconds: float | None, expected: int) -> None:
    assert retry_after(seconds) == expected


def test_a_refusal_says_when_to_come_back() -> None:
    bench = Bench([user(1)], [backend(1, 1, max_queue=9)])
    lease = bench.serve(1)
    for _ in range(60):  # one dispatch every 2 s
        bench.now += 2.0
        bench.submit(1)
        bench.settle(lease)
        lease = lease_of(bench.pump()[0])
    for _ in range(9):
        bench.submit(1)
    bench.pump()
    error = refusal(bench, 1)
    assert error.retry_after == pytest.approx(20, abs=2)
