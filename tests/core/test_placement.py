"""Where a job goes: constraints, scores, affinity and ties (P1–P4; B44)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from scheduler.core.affinity import rendezvous
from scheduler.core.errors import Rejected
from scheduler.core.jobs import CAPABILITIES, ModelSpec
from tests.core.building import Bench, backend, lease_of, needs, user

USERS = [user(i) for i in range(1, 5)]


def refusal(bench: Bench, *args: Any, **values: Any) -> Rejected:
    with pytest.raises(Rejected) as caught:
        bench.submit(*args, **values)
    return caught.value


# ---- P1: what can never be served is refused


def test_an_unknown_model_is_refused() -> None:
    bench = Bench(USERS, [backend(1)])
    assert refusal(bench, 1, "nope").reason == "model_not_found"


def test_an_unknown_user_is_refused() -> None:
    assert refusal(Bench(USERS, [backend(1)]), 99).reason == "permission_denied"


@pytest.mark.parametrize(
    ("need", "word"),
    [
        ("vision", "images"),
        ("tools", "tools"),
        ("json", "JSON"),
        ("embeddings", "embeddings"),
        ("rerank", "rerank"),
        ("transcription", "transcribe"),
        ("speech", "speak"),
        ("images", "make images"),
        ("moderation", "moderate"),
    ],
)
def test_a_need_that_no_backend_meets_is_refused_by_name(need: str, word: str) -> None:
    models = {"m": ModelSpec(name="m", **{need: False})}
    error = refusal(Bench(USERS, [backend(1, models=models)]), 1, needs=needs(**{need: True}))
    assert error.reason == "capability_missing"
    assert word in error.message


@pytest.mark.parametrize("need", CAPABILITIES)
def test_a_need_selects_the_backends_that_meet_it_or_may_meet_it(need: str) -> None:
    bench = Bench(
        USERS,
        [
            backend(1, 9, {"m": ModelSpec(name="m", **{need: False})}),
            backend(2, 9, {"m": ModelSpec(name="m", **{need: True})}),
            backend(3, 9, {"m": ModelSpec(name="m")}),
        ],
    )
    leases = [bench.serve(1, needs=needs(**{need: True})) for _ in range(6)]
    assert {lease.backend_id for lease in leases} == {2, 3}
    assert len(leases[0].decision.constraints[1]) == 1


def test_the_record_says_which_constraint_failed_for_which_request() -> None:
    bench = Bench(
        USERS,
        [
            backend(1, 9, {"m": ModelSpec(name="m", vision=False, json=False)}),
            backend(2, 9, {"m": ModelSpec(name="m")}),
            backend(3, 9, ["other"]),
        ],
    )
    seeing = bench.serve(1, needs=needs(vision=True))
    structured = bench.serve(1, needs=needs(json=True))
    absent = {"model_available": "does not have m"}
    assert seeing.decision.constraints == {1: {"modality": "does not read images"}, 3: absent}
    assert structured.decision.constraints == {
        1: {"structured_output": "has no JSON mode"},
        3: absent,
    }


def test_a_prompt_longer_than_every_context_is_refused() -> None:
    models = {"m": ModelSpec(name="m", context_length=4096)}
    bench = Bench(USERS, [backend(1, models=models)])
    error = refusal(bench, 1, prompt=5000)
    assert error.reason == "context_length_exceeded"
    assert "5000" in error.message
    assert "4096" in error.message


def test_a_long_job_goes_where_prompt_and_answer_fit() -> None:
    bench = Bench(
        USERS,
        [
            backend(1, 9, {"m": ModelSpec(name="m", context_length=4096)}),
            backend(2, 9, {"m": ModelSpec(name="m", context_length=32768)}),
        ],
    )
    assert {bench.serve(1, prompt=3000).backend_id for _ in range(4)} == {1, 2}
    assert {bench.serve(1, prompt=3000, max_tokens=2000).backend_id for _ in range(4)} == {2}


def test_of_many_inputs_the_longest_has_to_fit_the_context() -> None:
    models = {"m": ModelSpec(name="m", context_length=512)}
    bench = Bench(USERS, [backend(1, models=models)])
    assert bench.serve(1, prompt=9000, context_tokens=512).backend_id == 1
    error = refusal(bench, 1, prompt=9000, context_tokens=513)
    assert error.reason == "context_length_exceeded"
    assert "about 513 tokens" in error.message


def test_a_limit_on_the_answer_beyond_the_context_is_left_to_the_backend() -> None:
    models = {"m": ModelSpec(name="m", context_length=4096)}
    bench = Bench(USERS, [backend(1, models=models)])
    assert bench.serve(1, prompt=3000, max_tokens=4096).backend_id == 1


def test_a_backend_for_other_groups_is_refused() -> None:
    bench = Bench(USERS, [backend(1, allowed_group_ids=frozenset({77}))])
    assert refusal(bench, 1).reason == "permission_denied"


def test_a_group_may_use_only_the_backends_that_are_open_to_it() -> None:
    chosen = user(1, group="chosen")
    bench = Bench(
        [chosen, user(2)],
        [backend(1, 9, allowed_group_ids=frozenset({chosen.group_id or 0})), backend(2, 9)],
    )
    assert {bench.serve(1).backend_id for _ in range(4)} == {1, 2}
    assert {bench.serve(2).backend_id for _ in range(4)} == {2}


def test_the_model_is_sent_under_the_name_that_the_backend_knows() -> None:
    bench = Bench(USERS, [backend(1, models={"llama3.2": ModelSpec(name="llama3.2:latest")})])
    assert bench.serve(1, "llama3.2").model_name == "llama3.2:latest"


# ---- P1: memory


def needing(vram_mib: float | None) -> dict[str, ModelSpec]:
    return {"m": ModelSpec(name="m", vram_mib=vram_mib)}


def test_a_model_that_does_not_fit_now_goes_elsewhere() -> None:
    bench = Bench(USERS, [backend(1, 9, needing(9000)), backend(2, 9, needing(9000))])
    bench.observe(1, vram_free_mib=8000.0, vram_total_mib=16000.0, loaded_models=frozenset())
    leases = [bench.serve(1) for _ in range(4)]
    assert {lease.backend_id for lease in leases} == {2}
    assert leases[0].decision.constraints == {
        1: {"memory_fit": "needs 9000 MiB, 8000 MiB are free"}
    }


@pytest.mark.parametrize(
    "telemetry",
    [
        {"loaded_models": frozenset({"m"}), "vram_free_mib": 0.0},
        {"loaded_models": None, "vram_free_mib": 0.0},
        {"loaded_models": frozenset(), "vram_free_mib": None},
        {"loaded_models": frozenset(), "vram_free_mib": 9000.0},
    ],
    ids=["loaded", "loaded unknown", "memory unknown", "fits exactly"],
)
def test_memory_that_is_unknown_or_enough_stands_in_no_way(telemetry: dict[str, Any]) -> None:
    bench = Bench(USERS, [backend(1, 9, needing(9000))])
    bench.observe(1, **telemetry)
    assert bench.serve(1).backend_id == 1


def test_a_model_of_unknown_size_stays_eligible() -> None:
    bench = Bench(USERS, [backend(1, 9, needing(None))])
    bench.observe(1, vram_free_mib=1.0, vram_total_mib=1.0, loaded_models=frozenset())
    assert bench.serve(1).backend_id == 1


def test_a_job_waits_for_memory_that_may_become_free() -> None:
    bench = Bench(USERS, [backend(1, 9, needing(9000))])
    bench.observe(1, vram_free_mib=8000.0, vram_total_mib=16000.0, loaded_models=frozenset())
    ticket = bench.submit(1)
    assert bench.pump() == []
    assert ticket.wait_reason == "no_memory"
    bench.now += 5.0
    bench.observe(1, vram_free_mib=12000.0, vram_total_mib=16000.0, loaded_models=frozenset())
    assert bench.pump() == [ticket]


def test_a_model_larger_than_every_memory_is_refused() -> None:
    bench = Bench(USERS, [backend(1, 9, needing(20000))])
    bench.observe(1, vram_free_mib=8000.0, vram_total_mib=16000.0, loaded_models=frozenset())
    assert refusal(bench, 1).reason == "no_backend_available"


def test_stale_memory_and_loaded_models_are_neutral() -> None:
    bench = Bench(USERS, [backend(1, 9, needing(9000))])
    bench.observe(1, vram_free_mib=8000.0, vram_total_mib=16000.0, loaded_models=frozenset())
    ticket = bench.submit(1)
    assert bench.pump() == []
    assert bench.core.next_event(bench.now) == bench.now + 30.0
    bench.now += 30.0
    assert bench.pump() == [ticket]
    assert lease_of(ticket).decision.score_parts[1]["model_loaded"] == 50.0


# ---- P1: capacity, ours and others'


def test_load_of_others_takes_slots() -> None:
    bench = Bench(USERS, [backend(1, 4)])
    bench.observe(1, running=2, waiting=1)
    tickets = [bench.submit(1) for _ in range(3)]
    assert bench.pump() == [tickets[0]]
    assert bench.state_of(1).foreign == 3


def test_our_own_requests_are_not_counted_as_load_of_others() -> None:
    bench = Bench(USERS, [backend(1, 4)])
    for _ in range(3):
        bench.serve(1)
    bench.now += 1.0
    bench.observe(1, running=3, waiting=0)
    assert bench.state_of(1).foreign == 0
    assert bench.serve(1).backend_id == 1


def test_what_we_had_in_flight_when_polled_counts_and_not_what_we_have_now() -> None:
    bench = Bench(USERS, [backend(1, 4)])
    leases = [bench.serve(1) for _ in range(3)]
    polled_at = bench.now = bench.now + 5.0
    bench.now += 2.0
    for lease in leases:
        bench.settle(lease)
    bench.observe(1, observed_at=polled_at, running=3)
    assert bench.state_of(1).foreign == 0


def test_an_older_poll_never_overwrites_a_younger_one() -> None:
    bench = Bench(USERS, [backend(1, 4)])
    bench.observe(1, running=1)
    bench.observe(1, observed_at=bench.now - 1.0, running=4)
    assert bench.state_of(1).foreign == 1


def test_load_of_others_is_forgotten_when_the_poll_is_stale() -> None:
    bench = Bench(USERS, [backend(1, 1)])
    bench.observe(1, running=1)
    ticket = bench.submit(1)
    assert bench.pump() == []
    bench.now += 30.0
    assert bench.pump() == [ticket]


def test_slots_in_use_are_put_into_words() -> None:
    bench = Bench(USERS, [backend(1, 2, priority=9.0), backend(2, 9)])
    bench.observe(1, running=1)
    assert bench.serve(1).backend_id == 1
    assert bench.serve(1).decision.constraints == {1: {"capacity": "1 + 1 of 2 slots in use"}}


# ---- P2


def parts(bench: Bench, **values: Any) -> dict[int, dict[str, float]]:
    return bench.serve(1, **values).decision.score_parts


def test_nothing_known_scores_one_half_of_the_points() -> None:
    assert parts(Bench(USERS, [backend(1, 4)]))[1] == {
        "model_loaded": 50.0,
        "low_utilization": 50.0,
        "latency": 20.0,
        "short_queue": 30.0,
        "high_throughput": 10.0,
        "priority": 0.0,
        "cache_affinity": 0.0,
    }


def test_everything_known_scores_by_the_documented_formulas() -> None:
    bench = Bench(USERS, [backend(1, 4, priority=2.0)])
    lease = bench.serve(1)
    bench.now += 3.0
    bench.core.first_byte(lease, bench.now)
    bench.now += 1.0
    bench.settle(lease, 100, 200)  # 200 tokens in 4 s
    bench.now += 5.0
    bench.observe(1, running=1, waiting=1, utilization=0.5, loaded_models=frozenset({"m"}))
    assert parts(bench)[1] == pytest.approx(
        {
            "model_loaded": 100.0,
            "low_utilization": 50.0 * (1 - (2 / 4 + 0.5) / 2),
            "latency": 40.0 / (1 + 3),
            "short_queue": 30.0 / (1 + 2 + 1),
            "high_throughput": 20.0 * 50 / (50 + 50),
            "priority": 20.0,
            "cache_affinity": 0.0,
        }
    )


def test_points_come_from_the_settings() -> None:
    bench = Bench(USERS, [backend(1, 4)], score_model_loaded=7.0, score_latency=0.0)
    assert parts(bench)[1]["model_loaded"] == 3.5
    assert parts(bench)[1]["latency"] == 0.0


def test_scores_are_the_sums_of_their_parts() -> None:
    decision = Bench(USERS, [backend(1, 4), backend(2, 4)]).serve(1).decision
    assert decision.candidate_backends == (1, 2)
    assert decision.scores == {i: sum(p.values()) for i, p in decision.score_parts.items()}


def test_a_decision_keeps_the_names_of_backends_that_are_deleted_afterwards() -> None:
    bench = Bench(USERS, [backend(1, 4), backend(2, 4), backend(3, 4, ["other"])])
    lease = bench.serve(1)
    bench.backends = []
    bench.configure()
    names = {1: "backend1", 2: "backend2", 3: "backend3"}
    assert lease.decision.backend_names == names


def test_a_loaded_model_outweighs_a_busy_backend() -> None:
    bench = Bench(USERS, [backend(1, 4), backend(2, 4)])
    bench.observe(1, loaded_models=frozenset({"m"}), running=0)
    bench.observe(2, loaded_models=frozenset(), running=0)
    leases = [bench.serve(1) for _ in range(4)]
    assert [lease.backend_id for lease in leases] == [1, 1, 1, 1]
    assert leases[0].decision.reason == "score"
    assert bench.serve(1).decision.reason == "only_candidate"


def test_an_idle_backend_comes_before_one_that_is_as_good_but_used() -> None:
    bench = Bench(USERS, [backend(1, 4), backend(2, 4)])
    bench.observe(1, utilization=0.9)
    bench.observe(2, utilization=0.1)
    assert bench.serve(1).backend_id == 2


def test_the_backends_own_priority_decides_among_equals() -> None:
    bench = Bench(USERS, [backend(1, 4), backend(2, 4, priority=9.0)])
    assert [bench.serve(1).backend_id for _ in range(3)] == [2, 2, 2]


def test_a_backend_never_measured_is_not_shunned_for_a_fast_one() -> None:
    bench = Bench(USERS, [backend(1, 9), backend(2, 9)])
    first = bench.serve(1)
    bench.now += 0.01
    bench.core.first_byte(first, bench.now)
    bench.settle(first, 100, 50)
    assert bench.serve(1).backend_id != first.backend_id


def test_a_slow_backend_gets_less_once_both_are_measured() -> None:
    bench = Bench(USERS, [backend(1, 9), backend(2, 9)])
    for _ in range(2):
        lease = bench.serve(1)
        bench.now += 5.0 if lease.backend_id == 1 else 0.05
        bench.core.first_byte(lease, bench.now)
        bench.settle(lease, 100, 0)
    assert [bench.serve(1).backend_id for _ in range(2)] == [2, 2]


# ---- P4


def test_twenty_requests_split_10_to_10_over_two_equal_backends() -> None:
    bench = Bench(USERS, [backend(1, 16), backend(2, 16)])
    tickets = [bench.submit(1 + i % 4) for i in range(20)]
    bench.pump()
    assert Counter(lease_of(t).backend_id for t in tickets) == {1: 10, 2: 10}


def test_twenty_requests_one_by_one_split_10_to_10_as_well() -> None:
    bench = Bench(USERS, [backend(1, 16), backend(2, 16)])
    counts: Counter[int] = Counter()
    for i in range(20):
        lease = bench.serve(1)
        counts[lease.backend_id] += 1
        bench.now += 0.1 + i % 3 / 1000  # measurements differ a little
        bench.core.first_byte(lease, bench.now)
        bench.settle(lease, 100, 20)
    assert counts == {1: 10, 2: 10}


def test_round_robin_goes_around_whatever_the_scores() -> None:
    bench = Bench(
        USERS,
        [backend(1, 9, priority=50.0), backend(2, 9), backend(3, 9)],
        strategies={"m": "round_robin"},
    )
    leases = [bench.serve(1) for _ in range(9)]
    assert Counter(lease.backend_id for lease in leases) == {1: 3, 2: 3, 3: 3}
    assert {lease.decision.reason for lease in leases} == {"round_robin"}


# ---- P3

PORTS = [f"127.0.0.1:{port}" for port in range(8001, 8005)]
KEYS = [f"session-{i}" for i in range(20_000)]


def home(key: str, weights: dict[str, float]) -> str:
    return max(weights, key=lambda address: rendezvous(key, address, weights[address]))


def test_keys_spread_evenly_over_addresses_that_differ_in_one_digit() -> None:
    homes = Counter(home(key, dict.fromkeys(PORTS, 1.0)) for key in KEYS)
    assert all(0.22 <= homes[port] / len(KEYS) <= 0.28 for port in PORTS)


def test_keys_spread_by_the_number_of_slots() -> None:
    weights = dict(zip(PORTS, (1.0, 1.0, 2.0, 4.0), strict=True))
    homes = Counter(home(key, weights) for key in KEYS)
    for port, weight in weights.items():
        assert homes[port] / len(KEYS) == pytest.approx(weight / 8, abs=0.015)


def test_removing_a_backend_moves_only_its_own_keys() -> None:
    four = dict.fromkeys(PORTS, 1.0)
    three = dict.fromkeys(PORTS[:3], 1.0)
    for key in KEYS[:4000]:
        before = home(key, four)
        if before != PORTS[3]:
            assert home(key, three) == before


def test_rendezvous_is_blake2b_of_key_and_address() -> None:
    """By hand: blake2b-64 of "k:a" as a big-endian number h; −1/ln((h + ½)/2⁶⁴)."""
    import hashlib
    import math

    number = int.from_bytes(hashlib.blake2b(b"k:a", digest_size=8).digest(), "big")
    assert rendezvous("k", "a", 1.0) == pytest.approx(-1 / math.log((number + 0.5) / 2**64))


@pytest.mark.parametrize("strategy", ["affinity", "score"])
def test_a_key_keeps_its_backend(strategy: Any) -> None:
    bench = Bench(USERS, [backend(i, 32) for i in (1, 2, 3)], strategies={"m": strategy})
    for key in ("a", "b", "c", "d"):
        leases = [bench.serve(1, cache_key=key) for _ in range(3)]
        assert len({lease.backend_id for lease in leases}) == 1
        if strategy == "affinity":
            assert {lease.decision.reason for lease in leases} == {"affinity"}


def test_a_key_falls_to_the_next_backend_while_its_own_is_full_and_comes_back() -> None:
    bench = Bench(USERS, [backend(i, 1) for i in (1, 2, 3)], strategies={"m": "affinity"})
    first = bench.serve(1, cache_key="k")
    second = bench.serve(1, cache_key="k")
    assert second.backend_id != first.backend_id
    bench.settle(second)
    assert bench.serve(1, cache_key="k").backend_id == second.backend_id
    bench.settle(first)
    assert bench.serve(1, cache_key="k").backend_id == first.backend_id


def test_a_key_falls_to_the_next_backend_while_its_own_has_failed() -> None:
    bench = Bench(USERS, [backend(i, 9) for i in (1, 2, 3)], strategies={"m": "affinity"})
    own = bench.serve(1, cache_key="k").backend_id
    bench.core.mark_failed(own, bench.now)
    elsewhere = {bench.serve(1, cache_key="k").backend_id for _ in range(3)}
    assert len(elsewhere) == 1
    assert elsewhere != {own}
    bench.core.mark_ok(own, bench.now)
    assert bench.serve(1, cache_key="k").backend_id == own


def test_affinity_is_worth_its_points_and_no_more() -> None:
    """With 60 points the home wins until its load costs more than that."""
    bench = Bench(USERS, [backend(1, 4), backend(2, 4)])
    leases = [bench.serve(1, cache_key="k") for _ in range(5)]
    homes = [lease.backend_id for lease in leases]
    assert homes[:2] == [homes[0]] * 2
    assert len(set(homes)) == 2
    assert leases[0].decision.score_parts[homes[0]]["cache_affinity"] == 60.0


def test_without_a_key_affinity_goes_by_score() -> None:
    bench = Bench(USERS, [backend(1, 16), backend(2, 16)], strategies={"m": "affinity"})
    leases = [bench.serve(1) for _ in range(20)]
    assert Counter(lease.backend_id for lease in leases) == {1: 10, 2: 10}
