"""Replayed traffic: what is unchanged comes out as recorded, what is changed as the rules say."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.errors import Rejected
from scheduler.core.jobs import BackendSpec, Job, ModelSpec, Usage, UserSpec
from scheduler.core.scheduler import Scheduler
from scheduler.core.tunables import Tunables
from scheduler.simulation import Arrival, Recorded, Replay, Scenario, difference, recording
from scheduler.tally import Waits

GROUPS = {1: ("faculty", 3.0), 2: ("staff", 2.0), 3: ("student", 1.0)}


def user(user_id: int, group_id: int, weight: float | None = None, **limits) -> UserSpec:
    name, group_weight = GROUPS[group_id]
    return UserSpec(
        user_id=user_id,
        username=f"u{user_id}",
        group_id=group_id,
        group_name=name,
        weight=group_weight if weight is None else weight,
        group_weight=group_weight,
        **limits,
    )


def backend(backend_id: int = 1, slots: int = 4, **fields) -> BackendSpec:
    fields.setdefault("models", {"m": ModelSpec(name="m")})
    return BackendSpec(
        backend_id=backend_id,
        name=f"gpu-{backend_id}",
        address=f"gpu-{backend_id}",
        max_concurrent=slots,
        max_queue=10_000,
        **fields,
    )


def scenario(*, slots: int = 4, users=None, **tunables) -> Scenario:
    users = users or [user(1, 1), user(2, 2), user(3, 3)]
    return Scenario(
        tunables=Tunables(max_wait=float(tunables.pop("max_wait", 1e6)), **tunables),
        users={one.user_id: one for one in users},
        backends=[backend(slots=slots)],
    )


def arrival(at: float, user_id: int = 1, seconds: float | None = 1.0, **fields) -> Arrival:
    values = {
        "unit": user_id,
        "model_name": "m",
        "prompt_tokens": 100,
        "completion_tokens": 100,
        "service_seconds": seconds,
    }
    return Arrival(at=at, user_id=user_id, **(values | fields))


def replayed(one: Scenario, arrivals) -> dict:
    replay = Replay(one)
    list(replay.run(arrivals))
    return replay.result()


def backlogged(requests: int = 1200, seed: int = 1) -> list[Arrival]:
    """All at once: three users who wait until the end, each with a third of the requests."""
    chance = random.Random(seed)
    return [
        arrival(
            n * 1e-6,
            user_id=1 + n % 3,
            seconds=chance.uniform(0.5, 1.5),
            completion_tokens=chance.randrange(50, 150),
        )
        for n in range(requests)
    ]


# ---- exact, by hand


def test_one_slot_serves_one_after_the_other():
    result = replayed(scenario(slots=1), [arrival(0.0), arrival(0.0), arrival(0.0)])
    total = result["total"]
    assert (total["requests"], total["served"], total["tokens"]) == (3, 3, 600)
    assert total["p50"] == pytest.approx(1.0, rel=0.01)
    assert total["p99"] == pytest.approx(2.0, rel=0.01)
    assert result["seconds"] == 3.0
    assert result["utilisation"] == {"gpu-1": 1.0}


def test_more_slots_shorten_the_waits_and_lower_the_utilisation():
    result = replayed(scenario(slots=3), [arrival(0.0), arrival(0.0), arrival(1.0)])
    assert result["total"]["p99"] == 0.0
    assert (result["seconds"], result["utilisation"]["gpu-1"]) == (2.0, 0.5)


def test_the_longest_wait_refuses_at_its_own_moment():
    users = [user(1, 1, max_wait_seconds=0.6)]
    result = replayed(scenario(slots=1, users=users), [arrival(0.0, seconds=5.0), arrival(0.0)])
    assert result["total"]["refused"] == {"queue_timeout": 1}
    assert (result["total"]["served"], result["seconds"]) == (1, 5.0)


def test_an_unknown_model_is_refused_and_an_unknown_user_too():
    result = replayed(scenario(), [arrival(0.0, model_name="n"), arrival(0.0, user_id=9)])
    assert result["total"]["refused"] == {"model_not_found": 1, "permission_denied": 1}
    assert result["users"]["user 9"]["group"] == "(no group)"


def test_a_client_that_left_leaves_again_unless_it_is_served_before():
    patient = [arrival(0.0, seconds=5.0), arrival(0.0, seconds=None, patience_seconds=2.0)]
    one, two = replayed(scenario(slots=1), patient), replayed(scenario(slots=2), patient)
    assert (one["total"]["left"], one["total"]["served"]) == (1, 1)
    assert (two["total"]["left"], two["total"]["served"]) == (0, 2)


def test_what_was_refused_then_is_served_as_the_models_average_request():
    traffic = [arrival(0.0, seconds=2.0), arrival(9.0, seconds=None, completion_tokens=None)]
    result = replayed(scenario(), traffic)
    assert (result["total"]["tokens"], result["seconds"]) == (400, 11.0)


def test_nobody_serves_when_no_backend_is_left_and_the_replay_still_ends():
    one = replace(scenario(max_wait=30.0), backends=[replace(backend(), enabled=False)])
    result = replayed(one, [arrival(0.0), arrival(1.0)])
    assert result["total"]["refused"] == {"queue_timeout": 2}


def test_an_empty_period_has_an_empty_result():
    replay = Replay(scenario())
    assert list(replay.run([])) == [0]
    assert replay.result()["groups"] == {}
    assert replay.result()["total"]["share"] == 0.0


# ---- shares


def test_contended_tokens_follow_the_weights_and_change_with_them():
    traffic = backlogged()
    before = replayed(scenario(), traffic[:])
    half = [one for one in traffic if one.at < 1]
    shares = contended_until(scenario(), half, tokens=60_000)
    assert shares == pytest.approx({"faculty": 1 / 2, "staff": 1 / 3, "student": 1 / 6}, abs=0.02)
    equal = [user(n, n, weight=1.0) for n in (1, 2, 3)]
    assert contended_until(scenario(users=equal), half, tokens=60_000) == pytest.approx(
        dict.fromkeys(("faculty", "staff", "student"), 1 / 3), abs=0.02
    )
    assert before["total"]["served"] == 1200


def contended_until(one: Scenario, traffic: list[Arrival], tokens: int) -> dict[str, float]:
    """Shares while all three still wait: cut off by patience, which all lose at one moment."""
    moment = tokens / (4 * 200.0)  # 4 slots, about 200 tokens a second each
    result = replayed(one, [replace(each, patience_seconds=moment) for each in traffic])
    return {name: group["contended_share"] for name, group in result["groups"].items()}


def test_share_mode_group_counts_a_group_once_however_many_are_busy():
    users = [user(1, 1), user(2, 3), user(3, 3), user(4, 3)]
    traffic = [arrival(n * 1e-6, user_id=1 + n % 4) for n in range(1200)]
    by_user = contended_until(scenario(users=users), traffic, tokens=60_000)
    by_group = contended_until(scenario(users=users, share_mode="group"), traffic, tokens=60_000)
    assert by_user == pytest.approx({"faculty": 0.5, "student": 0.5}, abs=0.02)
    assert by_group == pytest.approx({"faculty": 0.75, "student": 0.25}, abs=0.02)


# ---- recorded traffic, replayed with nothing changed


def simulated_cluster(one: Scenario, requests: int, load: float, seed: int) -> list[Arrival]:
    """Records of a cluster of its own: other code than the replay's, the same core.

    The clients' limits on answers are known here and not in the records, answers take longer the
    more run beside them, and events lie on a grid of milliseconds.
    """
    chance = random.Random(seed)
    scheduler = Scheduler(one.tunables)
    scheduler.configure(
        tunables=one.tunables, users=one.users, backends=one.backends, strategies={}, now=0.0
    )
    slots = sum(spec.max_concurrent for spec in one.backends)
    events: list[tuple[float, int, tuple]] = []
    at = 0.0
    for number in range(requests):
        at = round(at + chance.expovariate(load * slots / 2.0), 3)
        heapq.heappush(events, (at, number, ("come", chance.choice(list(one.users)))))
    records: dict[int, Arrival] = {}
    serial = requests
    while events:
        now, number, (what, subject) = heapq.heappop(events)
        if what == "come":
            prompt = chance.randrange(20, 400)
            limit = chance.choice([None, 300])
            records[number] = arrival(
                now,
                subject,
                None,
                prompt_tokens=prompt,
                completion_tokens=None,
                refused="queue_full",
            )
            job = Job(request_id=str(number), user_id=subject, unit=subject, model_name="m",
                      prompt_tokens=prompt, max_tokens=limit)  # fmt: skip
            try:
                scheduler.submit(job, now)
            except Rejected:
                continue
        else:
            lease, usage = subject
            scheduler.settle(lease, usage, now)
        for ticket in scheduler.pump(now):
            known = int(ticket.job.request_id)
            if ticket.lease is None:
                records[known] = replace(records[known], refused=ticket.error.reason)
                continue
            output = chance.randrange(10, 300)
            running = sum(view.in_flight for view in scheduler.backend_states(now))
            seconds = round(2.0 * (output / 155) * (0.75 + 0.25 * running / slots), 3)
            records[known] = replace(
                records[known], refused="", completion_tokens=output, service_seconds=seconds,
                waited_seconds=now - records[known].at, backend_id=ticket.lease.backend_id,
            )  # fmt: skip
            usage = Usage(prompt_tokens=ticket.job.prompt_tokens, completion_tokens=output)
            serial += 1
            heapq.heappush(events, (now + seconds, serial, ("end", (ticket.lease, usage))))
    return [records[number] for number in sorted(records)]


@pytest.mark.parametrize(("load", "seed"), [(0.8, 1), (1.0, 2), (1.2, 3)])
def test_with_nothing_changed_recorded_shares_and_waits_come_out_again(load, seed):
    one = scenario(slots=8, users=[user(n, 1 + n % 3) for n in range(12)])
    traffic = simulated_cluster(one, 3000, load, seed)
    recorded, replay = Recorded(one), Replay(one)
    list(replay.run(recording(traffic, recorded)))
    was, now = recorded.result(), replay.result()
    apart = difference(was, now)
    assert apart["share"] <= 0.005
    assert apart["p50"] <= 0.05 * max(1.0, was["total"]["p50"])
    assert apart["p95"] <= 0.05 * max(1.0, was["total"]["p95"])
    for name, group in was["groups"].items():
        assert now["groups"][name]["contended_share"] == pytest.approx(
            group["contended_share"], abs=0.02
        )
        assert now["groups"][name]["p95"] == pytest.approx(group["p95"], rel=0.1, abs=0.5)
    assert now["utilisation"]["gpu-1"] == pytest.approx(was["utilisation"]["gpu-1"], abs=0.01)


# ---- invariants


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 2), st.integers(1, 3), st.floats(0.01, 20), st.none() | st.floats(0, 5)
        ),
        max_size=60,
    ),
    st.integers(1, 3),
)
def test_every_request_is_served_refused_or_gone_and_no_slot_is_used_twice(steps, slots):
    at, traffic = 0.0, []
    for gap, user_id, seconds, patience in steps:
        at += gap
        traffic.append(arrival(at, user_id, seconds, patience_seconds=patience))
    result = replayed(scenario(slots=slots, max_wait=15.0), traffic)
    total = result["total"]
    assert total["requests"] == len(steps)
    assert total["served"] + total["left"] + sum(total["refused"].values()) == len(steps)
    assert result["utilisation"].get("gpu-1", 0.0) <= 1.0 + 1e-9
    assert total["tokens"] == 200 * total["served"]


def test_replaying_twice_gives_the_same():
    traffic = backlogged(300)
    assert replayed(scenario(), traffic) == replayed(scenario(), traffic)


def test_memory_does_not_grow_with_the_length_of_the_record():
    replay = Replay(scenario())
    peak = 0
    for _ in replay.run(arrival(float(n), 1 + n % 3, 2.0) for n in range(6000)):
        peak = max(peak, len(replay._ends))
    assert peak <= 4
    assert replay.result()["total"]["served"] == 6000


def test_progress_is_told_every_two_thousand_requests_and_at_the_end():
    replay = Replay(scenario(slots=50))
    assert list(replay.run(arrival(float(n)) for n in range(4500))) == [2000, 4000, 4500]


# ---- percentiles


@given(st.lists(st.floats(0.001, 5000), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 1]))
@settings(max_examples=60, deadline=None)
def test_percentiles_are_within_a_hundredth(values, part):
    waits = Waits()
    for value in values:
        waits.add(value)
    exact = sorted(values)[max(0, -(-int(part * 100) * len(values) // 100) - 1)]
    assert waits.percentile(part) == pytest.approx(exact, rel=0.011)


def test_short_waits_count_as_none_and_no_waits_as_zero():
    waits = Waits()
    assert waits.percentile(0.99) == 0.0
    waits.add(0.0004)
    assert waits.percentile(0.99) == 0.0
