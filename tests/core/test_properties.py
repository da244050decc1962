"""What holds whatever happens: T3, T4, slots, the order of decisions, and no job lost (hypothesis).

A machine submits, serves, cancels, fails and retries jobs at random, changes weights and backends,
and after every step compares the scheduler with what the test itself keeps account of.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.core.errors import Evicted, Rejected
from scheduler.core.jobs import Usage
from scheduler.core.queue import Flow, JobClass
from scheduler.core.scheduler import Lease, Ticket
from tests.core.building import Bench, backend, job, user

MODELS = ("a", "b", "c")
USERS = range(1, 6)
WEIGHTS = st.sampled_from([0.0, 0.05, 1.0, 1.0, 2.0, 3.0, 10.0, 1e9])
TOKENS = st.integers(0, 3000)


def oracle(bench: Bench) -> list[tuple[float, Ticket]]:
    """Every first job that could be served now with its priority, straight from the rules: a
    rescan of all users of all classes. Positive weights alone, if there are any."""
    core = bench.core
    share, cluster = core._share, core._cluster
    ready = [cls for cls in core._waiting.classes if usable_by_rescan(bench, cls)]
    flows = {
        background: [
            f for cls in ready for f in waiting_flows(bench, cls) if f.unit.background is background
        ]
        for background in (False, True)
    }
    candidates = flows[False] or flows[True]
    if not candidates:
        return []
    rate = bench.tunables.wait_bonus_rate
    firsts: dict[JobClass, Flow] = {}
    for flow in candidates:
        best = firsts.get(flow.cls)
        if best is None or plain_key(flow, rate) < plain_key(best, rate):
            firsts[flow.cls] = flow
    reference = (
        min(f.unit.tag + f.standing.offset for f in firsts.values()) + bench.tunables.quantum
    )
    assert cluster is not None
    total = sum(unit.recent for unit in core._roster.units.values())
    scored = []
    for flow in candidates:
        head = flow.waiting()[0]
        recent = flow.unit.recent
        used = recent / total if total > 0 else 0.0
        factor = max(0.1, 1 - 2 * (used - 0.5)) if used > 0.5 else 1.0
        base = reference - (flow.unit.tag + flow.standing.offset) + share.burst.beta
        base = base * factor if base >= 0 else base / factor
        since = max(head.enqueued_at, flow.last_dispatch)
        scored.append((base + rate * (bench.now - since), head))
    return scored


def plain_key(flow: Flow, rate: float) -> tuple[float, int]:
    head = flow.waiting()[0]
    key = flow.unit.tag + flow.standing.offset + rate * max(head.enqueued_at, flow.last_dispatch)
    return key, head.number


def waiting_flows(bench: Bench, cls: JobClass) -> list[Flow]:
    units = bench.core._roster.units.values()
    return [f for unit in units for k, f in unit.flows.items() if k is cls and f.waiting()]


def usable_by_rescan(bench: Bench, cls: JobClass) -> list[int]:
    """The backends that could take a job of the class, from their plain state."""
    now = bench.now
    preferred, avoided, failed = [], [], []
    for offer in cls.offers:
        b = offer.backend
        if not (b.configured and b.spec.enabled and not b.spec.draining):
            continue
        room = b.in_flight < b.spec.max_concurrent and now >= b.busy_until
        if now < b.failed_until:
            failed.append((b, room))
        elif b.bit & cls.mask:
            preferred.append((b, room and (not b.suspect or b.probe is None)))
        else:
            avoided.append((b, room and (not b.suspect or b.probe is None)))
    for group in (preferred, avoided, failed):
        if group:
            return [b.spec.backend_id for b, room in group if room]
    return []


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(
            [user(i, float(i % 3)) for i in USERS],
            [backend(1, 2, ["a", "b"], max_queue=4), backend(2, 3, ["b", "c"], max_queue=4)],
            max_wait=200.0,
        )
        self.tickets: list[Ticket] = []
        self.told: dict[int, list[str]] = {}
        self.slots = {1: 2, 2: 3}

    # ---- helpers

    @property
    def core(self) -> Any:
        return self.bench.core

    def leases(self) -> list[Lease]:
        return [t.lease for t in self.tickets if t.state == "leased" and t.lease is not None]

    def waiting(self) -> list[Ticket]:
        return [t for t in self.tickets if t.state == "queued"]

    def note(self, changed: list[Ticket]) -> None:
        for ticket in changed:
            self.told.setdefault(ticket.number, []).append(ticket.state)

    # ---- what may happen

    @rule(
        user_id=st.sampled_from(USERS),
        model_name=st.sampled_from(MODELS),
        prompt=TOKENS,
        max_tokens=st.none() | TOKENS,
        key=st.none() | st.sampled_from("xyz"),
        count=st.integers(1, 6),
    )
    def submit(
        self, user_id: int, model_name: str, prompt: int, max_tokens: Any, key: Any, count: int
    ) -> None:
        for _ in range(count):
            one = job(user_id, model_name, prompt, max_tokens=max_tokens, cache_key=key)
            try:
                self.tickets.append(self.core.submit(one, self.bench.now))
            except Rejected:
                continue

    @rule()
    def pump(self) -> None:
        self.note(self.core.pump(self.bench.now))
        for ticket in self.waiting():  # T3
            assert not usable_by_rescan(self.bench, ticket.flow.cls)

    @rule(limit=st.integers(1, 8))
    def decide_one_by_one(self, limit: int) -> None:
        """Each decision is the one that a rescan of everything finds best."""
        self.note(self.core.pump(self.bench.now))
        if self.leases():
            self.core.settle(
                self.leases()[0], Usage(prompt_tokens=10, completion_tokens=10), self.bench.now
            )
        self.core._waiting.let_in(self.bench.now)
        self.core._share.window.expire(self.bench.now)
        for _ in range(limit):
            expected = oracle(self.bench)
            ticket = self.core.dispatch_one(self.bench.now, MODELS)
            if not expected:
                assert ticket is None
                break
            assert ticket is not None
            priorities = {t.number: priority for priority, t in expected}
            best = max(priorities.values())
            assert priorities[ticket.number] == pytest.approx(best, rel=1e-9, abs=1e-6)
            self.note([ticket])
            assert ticket.lease.decision.priority == pytest.approx(best, rel=1e-9, abs=1e-6)

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 11.0, 31.0, 90.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.bench.now += seconds

    @precondition(lambda self: self.leases())
    @rule(pick=st.integers(0, 99), prompt=TOKENS, completion=TOKENS, cached=TOKENS)
    def settle(self, pick: int, prompt: int, completion: int, cached: int) -> None:
        lease = self.leases()[pick % len(self.leases())]
        usage = Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)
        assert self.core.settle(lease, usage, self.bench.now).charged_tokens == prompt + completion
        assert self.core.settle(lease, usage, self.bench.now).charged_tokens == 0.0

    @precondition(lambda self: self.leases())
    @rule(pick=st.integers(0, 99), completion=st.integers(0, 9000))
    def stream(self, pick: int, completion: int) -> None:
        self.core.progress(
            self.leases()[pick % len(self.leases())], 100, completion, self.bench.now
        )

    @precondition(lambda self: self.leases())
    @rule(pick=st.integers(0, 99), exclude=st.booleans(), failed=st.booleans())
    def retry(self, pick: int, exclude: bool, failed: bool) -> None:
        lease = self.leases()[pick % len(self.leases())]
        if failed:
            self.core.mark_failed(lease.backend_id, self.bench.now)
        excluded = frozenset({lease.backend_id}) if exclude else frozenset()
        self.core.retry(lease, self.bench.now, exclude=excluded)

    @precondition(lambda self: self.leases())
    @rule(pick=st.integers(0, 99))
    def refund(self, pick: int) -> None:
        self.core.refund(self.leases()[pick % len(self.leases())], self.bench.now)

    @precondition(lambda self: self.tickets)
    @rule(pick=st.integers(0, 999))
    def cancel(self, pick: int) -> None:
        self.core.cancel(self.tickets[-1 - pick % len(self.tickets)], self.bench.now)

    @precondition(lambda self: self.waiting())
    @rule(pick=st.integers(0, 99))
    def evict(self, pick: int) -> None:
        ticket = self.waiting()[pick % len(self.waiting())]
        self.core.evict(ticket, Evicted("queue_full", "by an admin"), self.bench.now)
        assert ticket.state == "evicted"

    @rule(backend_id=st.sampled_from([1, 2]), verdict=st.sampled_from(["failed", "busy", "ok"]))
    def hear_of_a_backend(self, backend_id: int, verdict: str) -> None:
        getattr(self.core, f"mark_{verdict}")(backend_id, self.bench.now)

    @rule(user_id=st.sampled_from(USERS), weight=WEIGHTS, mode=st.sampled_from(["user", "group"]))
    def change_a_weight(self, user_id: int, weight: float, mode: str) -> None:
        before = {
            unit.key: (unit.background, unit.tag, unit.other_tag)
            for unit in self.core._roster.units.values()
            if not unit.waiting_pools
        }
        self.bench.users[user_id] = user(user_id, weight, group_weight=2.0)
        self.bench.configure(share_mode=mode, max_wait=200.0)
        for unit in self.core._roster.units.values():
            if unit.key in before:  # a change of weight moves nobody's tag
                background, tag, other = before[unit.key]
                same = unit.background is background
                assert (unit.tag, unit.other_tag) == ((tag, other) if same else (other, tag))

    @rule(
        first=st.none() | st.integers(0, 3),
        second=st.none() | st.integers(0, 3),
        draining=st.booleans(),
        models=st.sampled_from([("b", "c"), ("a", "b", "c"), ("c",)]),
    )
    def change_backends(self, first: Any, second: Any, draining: bool, models: Any) -> None:
        specs = []
        if first is not None:
            specs.append(backend(1, first, ["a", "b"], max_queue=4, draining=draining))
        if second is not None:
            specs.append(backend(2, second, models, max_queue=4))
        self.bench.backends = specs
        self.bench.configure(max_wait=200.0)

    # ---- what must hold

    @invariant()
    def every_job_is_in_exactly_one_place(self) -> None:
        self.core._waiting.let_in(self.bench.now)
        waiting = self.waiting()
        assert self.core._waiting.queued == len(waiting)
        assert {t.number for t in self.core._waiting.all_tickets()} == {t.number for t in waiting}
        assert self.core._dispatcher.running == len(self.leases())
        for classes in (self.core._catalogue.classes.values(),):
            for cls in classes:
                assert cls.queued == sum(lane.queued for lane in cls.lanes)
                assert cls.queued == len([t for t in waiting if t.flow.cls is cls])
                assert cls.running == len([x for x in self.leases() if x.flow.cls is cls])

    @invariant()
    def slots_are_exact_and_within_limits(self) -> None:
        for backend_id, state in self.core._cluster.by_id.items():
            ours = [x for x in self.leases() if x.backend is state]
            assert state.in_flight == len(ours) >= 0
            limit = max(state.spec.max_concurrent, self.slots.get(backend_id, 0))
            assert state.in_flight <= limit
            # a lowered limit is kept to as soon as there is room again
            self.slots[backend_id] = max(state.spec.max_concurrent, state.in_flight)

    @invariant()
    def holds_are_those_of_the_running_jobs(self) -> None:
        for unit in self.core._roster.units.values():
            leases = [x for x in self.leases() if x.flow.unit is unit]
            assert unit.held == pytest.approx(sum(x.charged for x in leases), abs=1e-6)
            assert unit.running == len(leases)
            assert not math.isnan(unit.tag)

    @invariant()
    def what_is_told_is_told_once(self) -> None:
        for states in self.told.values():
            assert all(state in ("leased", "evicted") for state in states)
            assert states.count("evicted") <= 1
            assert "evicted" not in states[:-1]

    @invariant()
    def views_can_be_taken_at_any_time(self) -> None:
        now = self.bench.now
        queue = self.core.queue(now)
        assert len(queue) == len(self.waiting())
        assert self.core.stats(now).queue_total == len(queue)
        assert all(math.isfinite(view.deficit) for view in self.core.shares(now))
        for ticket in self.waiting()[:3]:
            assert 1 <= self.core.position(ticket, now)[0] <= len(queue)

    def teardown(self) -> None:
        """Everything ends: nothing is left behind."""
        bench = self.bench
        bench.backends = [backend(1, 2, MODELS), backend(2, 3, MODELS)]
        bench.configure()
        for backend_id in (1, 2):
            self.core.mark_ok(backend_id, bench.now)
        for _ in range(len(self.tickets) + 1):
            bench.now += 1.1  # no backend is busy any more
            self.note(self.core.pump(bench.now))
            for lease in self.leases():
                self.core.settle(lease, Usage(prompt_tokens=1, completion_tokens=1), bench.now)
        assert {t.state for t in self.tickets} <= {"settled", "cancelled", "evicted"}
        assert bench.in_flight() == 0
        assert not self.core._waiting.classes
        assert all(not active for active in self.core._share.active)
        for account in self.core._roster.accounts.values():
            assert (account.queued, account.running, account.active_units) == (0, 0, 0)
        for group in self.core._roster.groups.values():
            assert (group.queued, group.active_units, group.active_weight) == (0, 0, 0.0)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
