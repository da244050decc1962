"""The bounds that must hold whatever the load: T1, T2, T4, refunds and races (D3)."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.scheduler import Lease, Ticket
from tests.core.building import Bench, backend, lease_of, user


@dataclass
class User:
    weight: float
    largest: int  # tokens of the dearest answer
    served: float = 0.0  # true tokens of what was dispatched
    in_flight: float = 0.0
    peak: float = 0.0  # most true tokens in flight
    hold: float = 0.0  # largest
    history: list[float] = field(default_factory=list)  # served / weight at each dispatch


class Backlog:
    """Users who always have jobs waiting; answers of random length, one token per millisecond."""

    def __init__(self, users: dict[int, User], slots: int, seed: int) -> None:
        self.users = users
        self.random = random.Random(seed)
        self.bench = Bench(
            [user(i, u.weight, f"g{i}") for i, u in users.items()], [backend(1, slots)]
        )
        self.ends: list[tuple[float, int, Ticket, int]] = []
        self.longest_wait = 0.0

    def fill(self, depth: int = 5) -> None:
        for user_id in self.users:
            for _ in range(depth):
                self.submit(user_id)
        self.dispatched(self.bench.pump())

    def submit(self, user_id: int) -> None:
        prompt = self.random.randint(1, 500)
        self.bench.submit(user_id, prompt=prompt, max_tokens=None)

    def step(self) -> None:
        """One job ends, another of the same user comes, and the slot is given away."""
        end, _, ticket, answer = heapq.heappop(self.ends)
        self.bench.now = max(self.bench.now, end)
        one = self.users[ticket.job.user_id]
        one.in_flight -= ticket.job.prompt_tokens + answer
        self.bench.settle(lease_of(ticket), ticket.job.prompt_tokens, answer)
        self.dispatched(self.bench.pump())

    def dispatched(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            lease = lease_of(ticket)
            one = self.users[ticket.job.user_id]
            answer = self.random.randint(0, one.largest)
            cost = ticket.job.prompt_tokens + answer
            one.served += cost
            one.in_flight += cost
            one.peak = max(one.peak, one.in_flight)
            one.hold = max(one.hold, lease.hold)
            rate = self.bench.tunables.wait_bonus_rate
            self.longest_wait = max(self.longest_wait, lease.decision.wait_bonus / rate)
            heapq.heappush(
                self.ends, (self.bench.now + answer / 1000, ticket.number, ticket, answer)
            )
            self.submit(ticket.job.user_id)
        for one in self.users.values():
            one.history.append(one.served / one.weight)

    def bound(self, u: User, v: User) -> float:
        """T1: (G_u+2H_u)/w_u + (G_v+2H_v)/w_v + 2ωT + 0.9(Q+C)"""
        tunables = self.bench.tunables
        return (
            (u.peak + 2 * u.hold) / u.weight
            + (v.peak + 2 * v.hold) / v.weight
            + 2 * tunables.wait_bonus_rate * self.longest_wait
            + 0.9 * (tunables.quantum + tunables.burst_credit_cap)
        )


def largest_gap(u: User, v: User) -> float:
    """max over all intervals of |S_u/w_u − S_v/w_v|"""
    differences = [a - b for a, b in zip(u.history, v.history, strict=True)]
    return max(differences) - min(differences)


people = st.dictionaries(
    st.integers(1, 5),
    st.builds(
        User, weight=st.sampled_from([0.05, 0.5, 1.0, 2.0, 3.0, 10.0]), largest=st.integers(1, 4000)
    ),
    min_size=2,
)


@settings(max_examples=15, deadline=None)
@given(users=people, slots=st.integers(1, 12), seed=st.integers(0, 1000))
def test_t1_the_gap_between_backlogged_users_stays_within_the_bound(
    users: dict[int, User], slots: int, seed: int
) -> None:
    backlog = Backlog(users, slots, seed)
    backlog.fill()
    for step in range(200):
        backlog.step()
        if step % 5 == 0:
            measured, bound = backlog.bench.core.service_gap(backlog.bench.now)
            assert measured <= bound
    everybody = list(users.values())
    for i, u in enumerate(everybody):
        for v in everybody[i + 1 :]:
            assert largest_gap(u, v) <= backlog.bound(u, v)


@settings(max_examples=15, deadline=None)
@given(users=people, slots=st.integers(1, 12), seed=st.integers(0, 1000), steps=st.integers(0, 300))
def test_t2_a_newcomer_without_debt_is_overtaken_by_no_more_than_the_bound(
    users: dict[int, User], slots: int, seed: int, steps: int
) -> None:
    backlog = Backlog(users, slots, seed)
    backlog.bench.users[99] = user(99)
    backlog.bench.configure()
    backlog.fill()
    for _ in range(steps):
        backlog.step()
    before = {i: one.served for i, one in users.items()}
    came_at = backlog.bench.now
    newcomer = backlog.bench.submit(99)
    backlog.users[99] = User(1.0, 0, history=[0.0] * len(next(iter(users.values())).history))
    while newcomer.state == "queued":
        backlog.step()
    rate = backlog.bench.tunables.wait_bonus_rate
    waited = max(backlog.longest_wait, backlog.bench.now - came_at)
    for i, one in users.items():
        if i != 99:
            dearest = 500 + one.largest
            # c + H + w·ωT, and for one who has just stopped being heavy w·0.9(Q+C)
            bound = dearest + one.hold + one.weight * (rate * waited + 0.9 * 2000)
            assert one.served - before[i] <= bound


def test_shares_converge_to_the_weights() -> None:
    users = {1: User(3.0, 800), 2: User(2.0, 800), 3: User(1.0, 800)}
    backlog = Backlog(users, 8, 1)
    backlog.fill(12)
    for _ in range(3000):
        backlog.step()
    total = sum(one.served for one in users.values())
    assert [users[i].served / total for i in (1, 2, 3)] == pytest.approx(
        [1 / 2, 1 / 3, 1 / 6], abs=0.01
    )


def test_wild_estimates_do_not_move_the_shares() -> None:
    """User 1's answers are always ten times what they are expected to be; user 2's a tenth."""
    bench = Bench([user(1), user(2)], [backend(1, 4)], deprioritize_threshold=1.0)
    used = {1: 0, 2: 0}
    running: list[Lease] = []
    for user_id in (1, 2):
        for _ in range(10):
            bench.submit(user_id, max_tokens=None)
    running += [lease_of(t) for t in bench.pump()]
    for _ in range(1000):
        lease = running.pop(0)
        user_id = lease.ticket.job.user_id
        expected = lease.hold - 100
        answer = min(4000, int(expected * 10)) if user_id == 1 else max(1, int(expected / 10))
        used[user_id] += 100 + answer
        bench.settle(lease, 100, answer)
        bench.submit(user_id, max_tokens=None)
        running += [lease_of(t) for t in bench.pump()]
    assert used[1] / sum(used.values()) == pytest.approx(0.5, abs=0.02)


def test_ten_thousand_races_of_grant_and_cancel_leave_nothing_in_flight() -> None:
    """D3: whichever comes first, a cancelled job holds no slot and an ended one is free."""
    bench = Bench([user(1), user(2)], [backend(1, 3), backend(2, 2)])
    choice = random.Random(7)
    alive: list[Ticket] = []
    for _ in range(10_000):
        alive.append(bench.submit(choice.choice((1, 2))))
        if choice.random() < 0.7:
            bench.pump()
        victim = alive.pop(choice.randrange(len(alive)))
        if choice.random() < 0.5 and victim.lease is not None and victim.lease.open:
            bench.settle(victim.lease)
        bench.core.cancel(victim, bench.now)
        if choice.random() < 0.2:
            bench.core.cancel(victim, bench.now)
        bench.now += 0.001
    for ticket in alive:
        bench.core.cancel(ticket, bench.now)
    assert bench.pump() == []
    assert bench.in_flight() == 0
    assert bench.core.stats(bench.now).queue_total == 0


def test_giving_away_a_cancelled_jobs_slot_takes_one_pump() -> None:
    bench = Bench([user(1), user(2)], [backend(1, 1)])
    lease = bench.serve(1)
    waiting = bench.submit(2)
    bench.pump()
    bench.core.cancel(lease.ticket, bench.now)
    assert bench.pump() == [waiting]
