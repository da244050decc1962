"""Decisions are determined: by the traffic as a whole, and each by what its record says."""

from __future__ import annotations

import random
from typing import Any

import pytest

from scheduler.core.decisions import Decision
from scheduler.core.jobs import Usage
from scheduler.core.placement import TIE_POINTS
from scheduler.core.scheduler import Lease, Scheduler
from scheduler.core.tunables import Tunables
from scheduler.spool import Record, decode, encode
from tests.core.building import backend, job, user

MODELS = ("m", "n")


def traffic(seed: int) -> list[Decision]:
    """The decisions on 400 random requests of six users over four backends."""
    chance = random.Random(seed)
    core = Scheduler(Tunables())
    core.configure(
        tunables=Tunables(),
        users={n: user(n, weight=1.0 + n % 3, group=f"g{n % 3}") for n in range(6)},
        backends=[
            backend(n, slots=1 + n % 3, models=MODELS[: 1 + n % 2], priority=n % 2)
            for n in range(1, 5)
        ],
        strategies={},
        now=0.0,
    )
    now, running, decisions = 0.0, list[Lease](), list[Decision]()
    for number in range(400):
        now += chance.expovariate(2.0)
        values: dict[str, Any] = {"prompt": chance.randrange(10, 2000)}
        if chance.random() < 0.4:
            values["cache_key"] = f"conversation-{chance.randrange(9)}"
        core.submit(
            job(chance.randrange(6), chance.choice(MODELS), request_id=f"r{number}", **values), now
        )
        while len(running) > chance.randrange(9):
            lease = running.pop(chance.randrange(len(running)))
            core.first_byte(lease, now)
            usage = Usage(prompt_tokens=50, completion_tokens=chance.randrange(400))
            core.settle(lease, usage, now)
        leases = [ticket.lease for ticket in core.pump(now) if ticket.lease is not None]
        running += leases
        decisions += [lease.decision for lease in leases]
    return decisions


def recorded(decision: Decision) -> Decision:
    """As it comes back from the spool."""
    line = encode(Record(request_id="r", arrived_at=0.0, decision=decision))
    found = decode(line).decision
    assert found is not None
    return found


def choices(decision: Decision) -> set[int]:
    """The backends that the recorded points allow to be chosen."""
    enough = max(decision.scores.values()) - TIE_POINTS
    return {one for one, total in decision.scores.items() if total >= enough}


@pytest.mark.parametrize("seed", range(5))
def test_the_same_traffic_is_decided_the_same_again(seed: int) -> None:
    first, again = traffic(seed), traffic(seed)
    assert len(first) > 200
    assert first == again


@pytest.mark.parametrize("seed", range(5))
def test_deciding_again_from_the_record_gives_the_same_choice_and_priority(seed: int) -> None:
    kinds = set()
    for decision in map(recorded, traffic(seed)):
        kinds.add(decision.reason)
        assert decision.selected_backend_id in choices(decision)
        if decision.reason == "only_candidate":
            assert decision.candidate_backends == (decision.selected_backend_id,)
        elif decision.reason == "round_robin":
            assert len(choices(decision)) > 1  # in turn, among those that are as good
        else:
            assert choices(decision) == {decision.selected_backend_id}
        assert not set(decision.constraints) & set(decision.candidate_backends)
        base = (decision.user_deficit + decision.burst_credits) / decision.user_weight
        factor = decision.factor if base >= 0 else 1 / decision.factor
        assert decision.priority == pytest.approx(base * factor + decision.wait_bonus)
    assert {"score", "only_candidate"} <= kinds
