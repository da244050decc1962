"""A scheduler that takes over from another: what ran runs on, what waited keeps its place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from scheduler.core.errors import Rejected
from scheduler.core.jobs import Usage
from scheduler.core.parts import PART_ITEMS
from scheduler.core.scheduler import Scheduler, Ticket
from tests.core.building import Bench, backend, job, user


def successor(old: Bench) -> Bench:
    """Another scheduler with the same configuration, and the old one's checkpoint."""
    new = Bench(list(old.users.values()), old.backends)
    new.core.restore(old.core.checkpoint(old.now), new.now)
    return new


def resume(new: Bench, tickets: list[Ticket]) -> dict[str, Ticket]:
    """What the gateways tell the new scheduler of these jobs."""
    taken = {}
    for old in sorted(tickets, key=lambda ticket: new.core.standing(ticket.job)):
        running = (old.lease.backend_id, old.lease.dispatched_at) if old.lease else None
        taken[old.job.request_id] = new.core.resume(
            old.job, new.now, enqueued_at=old.enqueued_at, attempts=old.attempts, running=running
        )
    return taken


def in_flight(core: Scheduler, now: float) -> list[int]:
    return [one.in_flight for one in core.backend_states(now)]


def test_running_jobs_keep_their_slots_and_nothing_is_granted_beside_them() -> None:
    old = Bench([user(1), user(2)], [backend(1, slots=2)])
    tickets = [old.submit(1), old.submit(2), old.submit(1)]
    old.pump()
    new = successor(old)
    taken = resume(new, tickets)
    assert in_flight(new.core, new.now) == [2]
    assert [taken[t.job.request_id].state for t in tickets] == ["leased", "leased", "queued"]
    assert new.pump() == []
    first = taken[tickets[0].job.request_id]
    assert first.lease is not None
    assert first.attempts == 1
    new.core.settle(first.lease, Usage(prompt_tokens=1, completion_tokens=1), new.now)
    assert [t.job for t in new.pump()] == [tickets[2].job]


def test_a_slot_too_many_is_counted_and_keeps_newcomers_out() -> None:
    bench = Bench([user(1)], [backend(1, slots=1)])
    taken = [
        bench.core.resume(job(1), bench.now, enqueued_at=0.0, attempts=1, running=(1, 990.0))
        for _ in range(3)
    ]
    bench.submit(1)
    for left, ticket in zip((2, 1), taken, strict=False):
        assert ticket.lease is not None
        bench.core.settle(ticket.lease, Usage(prompt_tokens=1, completion_tokens=1), bench.now)
        assert bench.pump() == []
        assert in_flight(bench.core, bench.now) == [left]
    assert taken[2].lease is not None
    bench.core.settle(taken[2].lease, Usage(prompt_tokens=1, completion_tokens=1), bench.now)
    assert len(bench.pump()) == 1


def test_what_was_charged_before_and_after_a_change_of_leader_adds_up() -> None:
    old = Bench([user(1), user(2)], [backend(1, slots=4)])
    tickets = [old.submit(1, prompt=100), old.submit(2, prompt=100)]
    old.pump()
    new = successor(old)
    taken = resume(new, tickets)
    for ticket in taken.values():
        assert ticket.lease is not None
        new.core.settle(ticket.lease, Usage(prompt_tokens=100, completion_tokens=50), new.now)
    charged = {share.user_id: share.charged_tokens for share in new.core.shares(new.now)}
    assert charged == {1: 150.0, 2: 150.0}


def test_whoever_has_had_least_is_still_served_first_after_a_change_of_leader() -> None:
    old = Bench([user(1), user(2), user(3)], [backend(1, slots=3)])
    spent = {1: 3000, 2: 100, 3: 1500}
    running = {user_id: old.serve(user_id, prompt=tokens) for user_id, tokens in spent.items()}
    waits = [old.submit(user_id, prompt=10) for user_id in spent]
    old.pump()
    for user_id, tokens in spent.items():
        old.core.settle(running[user_id], Usage(prompt_tokens=tokens, completion_tokens=0), old.now)
    new = Bench(list(old.users.values()), [backend(1, slots=0)])
    new.core.restore(old.core.checkpoint(old.now), new.now)
    resume(new, waits)
    assert [view.user_id for view in new.core.queue(new.now)] == [2, 3, 1]


def test_bounds_do_not_apply_to_what_was_let_in_before() -> None:
    bench = Bench([user(1, max_concurrent=1, max_queued=1)], [backend(1, slots=1, max_queue=1)])
    for _ in range(5):
        bench.core.resume(job(1), bench.now, enqueued_at=900.0, attempts=0)
    assert bench.core.stats(bench.now).queue_total == 5


def test_the_time_waited_under_the_old_leader_counts() -> None:
    bench = Bench([user(1)], [backend(1, slots=1)], max_wait=300.0)
    bench.core.resume(job(1), bench.now, enqueued_at=990.0, attempts=1, running=(1, 995.0))
    waits = bench.core.resume(job(1), bench.now, enqueued_at=bench.now - 299.0, attempts=0)
    assert bench.pump() == []
    bench.now += 1.0
    assert bench.pump() == [waits]
    assert waits.error is not None
    assert waits.error.reason == "queue_timeout"


def charged(bench: Bench) -> dict[int, float]:
    return {share.user_id: share.charged_tokens for share in bench.core.shares(bench.now)}


def test_a_job_that_waits_for_a_model_that_is_gone_is_refused() -> None:
    bench = Bench([user(1)], [backend(1)])
    with pytest.raises(Rejected):
        bench.core.resume(job(1, "gone"), bench.now, enqueued_at=0.0, attempts=0)


@pytest.mark.parametrize("model_name", ["m", "gone"])
def test_what_runs_on_a_backend_that_was_removed_is_charged_when_it_ends(model_name: str) -> None:
    bench = Bench([user(1)], [backend(1)])
    for _ in range(2):  # the second one finds what the first one's configuration has left
        ticket = bench.core.resume(
            job(1, model_name), bench.now, enqueued_at=0.0, attempts=1, running=(7, 990.0)
        )
        assert in_flight(bench.core, bench.now) == [0]
        bench.configure()
        lease = ticket.lease
        assert lease is not None
        bench.core.settle(lease, Usage(prompt_tokens=100, completion_tokens=50), bench.now)
    assert charged(bench) == {1: 300.0}
    bench.backends = [backend(1, slots=2)]
    bench.configure()
    assert list(bench.core._cluster.by_id) == [1]


@pytest.mark.parametrize(
    "changed",
    [
        {"backends": [backend(1, models=("other",))]},
        {"backends": [backend(1, allowed_group_ids=frozenset())]},
        {"users": {}},
    ],
    ids=["without the model", "not for the group any more", "the user is gone"],
)
def test_what_runs_keeps_its_slot_whatever_the_configuration_says_of_it_now(
    changed: dict[str, Any],
) -> None:
    bench = Bench([user(1)], [backend(1, slots=1)])
    vars(bench).update(changed)
    bench.configure()
    ticket = bench.core.resume(job(1), bench.now, enqueued_at=0.0, attempts=1, running=(1, 990.0))
    assert in_flight(bench.core, bench.now) == [1]
    assert ticket.lease is not None
    bench.core.settle(ticket.lease, Usage(prompt_tokens=100, completion_tokens=50), bench.now)
    assert (in_flight(bench.core, bench.now), charged(bench)) == ([0], {1: 150.0})


def books(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint whatever the order of its units."""
    keys = [unit[0] for unit in state["units"]]
    return state | {
        "units": {unit[0]: unit for unit in state["units"] if unit[5]},
        "window": [
            (bucket["age"], {keys[number]: spent for number, spent in bucket["tokens"]})
            for bucket in state["window"]
        ],
    }


def test_a_checkpoint_is_of_one_moment_whoever_is_charged_while_it_is_written() -> None:
    people = range(1, 5 * PART_ITEMS // 2)
    bench = Bench([user(one) for one in people], [backend(1, slots=9 * PART_ITEMS)])
    for one in people[:-3]:
        bench.settle(bench.serve(one), 100, one)
        bench.now += 0.5  # over several buckets of the window
    running = [bench.serve(one, max_tokens=50) for one in people]
    then = bench.core.checkpoint(bench.now)

    def charge_one_more() -> None:
        for lease in (running.pop(0), running.pop()):  # one that is written, one that is not
            bench.core.settle(lease, Usage(prompt_tokens=100, completion_tokens=50), bench.now)

    parts = bench.core.checkpoint_in_parts(bench.now)
    assert next(parts) is None
    pauses = 1
    while True:
        charge_one_more()
        try:
            next(parts)
        except StopIteration as end:
            written = msgspec.json.decode(msgspec.json.encode(end.value))
            break
        pauses += 1
    assert pauses > 5
    assert books(written) == books(then)
    later = books(bench.core.checkpoint(bench.now))
    assert later != books(then)
    assert sum(unit[5] for unit in later["units"].values()) == sum(
        [100 + one for one in people[:-3]] + [150.0] * 2 * (pauses)
    )
