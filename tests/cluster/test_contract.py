"""The gateway's way to the scheduler: the same in process and over the bus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from accounts.limits import Holder
from accounts.models import ApiKey, User
from scheduler.bus.gateway import RemoteRuntime
from scheduler.bus.leader import SchedulerProcess
from scheduler.captures import CAPTURES, Captured
from scheduler.core.errors import Evicted, Rejected
from scheduler.core.jobs import Job, Needs, Usage
from scheduler.runtime import Runtime
from scheduler.serving import Claim, Serving
from tests.factories import make_api_key, make_backend, make_group, make_quota, make_user
from tests.running import until

_numbers = count(1)
USED = Usage(prompt_tokens=100, completion_tokens=50)


class Both:
    """What serves, what schedules for it, and the users ada and bob."""

    def __init__(self, serving: Serving, scheduling: Runtime) -> None:
        self.serving = serving
        self.scheduling = scheduling
        self.users: dict[str, int] = {}

    def job(self, username: str = "ada", **values: Any) -> Job:
        user_id = self.users[username]
        defaults = {"request_id": f"{next(_numbers):032x}", "unit": user_id, "model_name": "m"}
        return Job(user_id=user_id, prompt_tokens=100, **(defaults | values))

    async def submit(self, username: str = "ada", **values: Any) -> Claim:
        return await self.serving.submit(self.job(username, **values))

    async def ask(self, method: str, *arguments: Any) -> Any:
        """As Django's threads ask."""
        return await asyncio.to_thread(getattr(self.serving, method), *arguments)

    async def until_in_flight(self, number: int) -> None:
        await until(lambda: self._in_flight() == number, 60.0)

    def _in_flight(self) -> int:
        return sum(one.in_flight for one in self.scheduling.backends())


def _prepare() -> dict[str, int]:
    User.objects.all().delete()
    group = make_group("people", scheduler_weight=1)
    make_backend("a", models=("m",), max_concurrent=2, max_queue=3)
    return {name: make_user(name, group=group).pk for name in ("ada", "bob")}


@pytest.fixture(params=["in process", "over the bus"])
async def both(
    request: pytest.FixtureRequest,
    transactional_db: None,
    settings: Any,
    tmp_path: Path,
) -> AsyncIterator[Both]:
    settings.SPOOL_DIR = tmp_path / "spool"
    users = await asyncio.to_thread(prepared)
    if request.param == "in process":
        runtime = await Runtime.start()
        both = Both(runtime, runtime)
    else:
        request.getfixturevalue("patient_bus")
        settings.REDIS_URL = request.getfixturevalue("redis").url
        scheduler = await SchedulerProcess.start()
        serving = await RemoteRuntime.start()
        assert serving.in_touch
        both = Both(serving, scheduler)
    both.users = users
    yield both
    await both.until_in_flight(0)
    assert both.scheduling._claims == {}
    await both.serving.stop()
    if both.scheduling is not both.serving:
        await both.scheduling.stop()


def prepared() -> dict[str, int]:
    try:
        return _prepare()
    finally:
        connection.close()


async def test_a_free_slot_is_leased_at_once_and_settled(both: Both) -> None:
    with await both.submit() as claim:
        lease = claim.lease
        assert lease is not None
        assert (lease.backend_name, lease.model_name) == ("a", "m")
        assert lease.decision.candidate_backends == (lease.backend_id,)
        assert lease.decision.backend_names == {lease.backend_id: "a"}
        assert claim.ticket.position_at_arrival == 1
        claim.first_byte()
        both.serving.mark_ok(lease.backend_id)
        settlement = claim.settle(USED)
    assert settlement.charged_tokens == 150.0
    assert claim.lease is None
    assert claim.ticket.lease is None or claim.ticket.lease is lease
    await both.until_in_flight(0)
    view = await both.ask("view")
    assert [share.charged_tokens for share in view.shares] == [150.0]
    assert view.stats.global_recent_tokens == 150.0


async def test_who_waits_is_served_when_a_slot_is_freed(both: Both) -> None:
    first, second = await both.submit(), await both.submit()
    third = await both.submit("bob")
    assert (third.lease, third.ticket.state) == (None, "queued")
    assert third.ticket.wait_reason == "backends_full"
    assert await third.wait(0.01) is None
    waiting = asyncio.create_task(third.wait())
    with first, second, third:
        first.settle(USED)
        lease = await asyncio.wait_for(waiting, 60.0)
        assert lease is third.lease is not None
        second.settle(USED)
        third.settle(USED)


async def test_a_refusal_says_why(both: Both) -> None:
    with pytest.raises(Rejected) as unknown:
        await both.submit(model_name="nope")
    assert (unknown.value.reason, unknown.value.retry_after) == ("model_not_found", None)
    claims = [await both.submit() for _ in range(5)]  # two run, three wait
    with pytest.raises(Rejected) as full:
        await both.submit()
    assert full.value.reason == "queue_full"
    assert full.value.retry_after is not None
    for claim in claims:
        claim.__exit__(None, None, None)


async def test_leaving_the_queue_and_giving_a_slot_back_cost_nothing(both: Both) -> None:
    claims = [await both.submit() for _ in range(3)]
    for claim in reversed(claims):
        with claim:
            pass
    await both.until_in_flight(0)
    view = await both.ask("view")
    assert view.stats.queue_total == 0
    assert view.stats.global_recent_tokens == 0.0


async def test_a_client_that_leaves_before_it_is_let_in_leaves_nothing(both: Both) -> None:
    tasks = [asyncio.create_task(both.submit()) for _ in range(4)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    for claim in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(claim, Claim):
            claim.__exit__(None, None, None)


async def test_a_retry_avoids_the_backend_that_failed(both: Both) -> None:
    other = await asyncio.to_thread(with_database, make_backend, "b", models=("m",))
    await until(lambda: len(both.scheduling.snapshot.backends) == 2, 60.0)
    await until(lambda: len(both.serving.snapshot.backends) == 2, 60.0)
    with await both.submit() as claim:
        assert claim.lease is not None
        tried = claim.lease.backend_id
        both.serving.mark_failed(tried)
        claim.retry(frozenset({tried}))
        lease = await asyncio.wait_for(claim.wait(), 60.0)
        assert lease is not None
        assert lease.backend_id != tried
        assert {lease.backend_id, tried} >= {other.pk}
        claim.settle(USED)
    states = {one.id: one.state for one in both.scheduling.backends()}
    assert states[tried] == "failed"


def with_database(question: Any, *args: Any, **fields: Any) -> Any:
    try:
        return question(*args, **fields)
    finally:
        connection.close()


async def test_an_administrator_removes_a_waiting_job_and_no_running_one(both: Both) -> None:
    claims = [await both.submit() for _ in range(3)]
    running, waits = claims[0].ticket.job, claims[2].ticket.job
    waiting = asyncio.create_task(claims[2].wait())
    assert await both.ask("evict", running.request_id) is False
    assert await both.ask("evict", waits.request_id) is True
    with pytest.raises(Evicted) as evicted:
        await asyncio.wait_for(waiting, 60.0)
    assert evicted.value.reason == "permission_denied"
    for claim in claims:
        claim.__exit__(None, None, None)


async def test_the_queue_can_be_looked_at(both: Both) -> None:
    claims = [await both.submit() for _ in range(2)]
    claims += [await both.submit("ada"), await both.submit("bob", unit=(both.users["bob"], "x"))]
    # ada has two slots already, so that bob comes first
    assert [(await claim.position())[0] for claim in claims[2:]] == [2, 1]
    picture = await both.ask("queue_picture")
    jobs = {job[2]: flow for flow in picture.flows for job in flow.jobs}
    assert set(jobs) == {claim.ticket.job.request_id for claim in claims[2:]}
    assert {flow.unit for flow in picture.flows} == {both.users["ada"], (both.users["bob"], "x")}
    listed = await both.ask("waiting")
    assert sorted(view.position for view in listed) == [1, 2]
    for view in listed:
        ticket = next(c.ticket for c in claims if c.ticket.job.request_id == view.request_id)
        assert view.enqueued_at == pytest.approx(ticket.enqueued_at, abs=1.0)
    for claim in claims:
        claim.__exit__(None, None, None)


async def test_what_exceeds_the_hold_is_charged_while_it_runs(both: Both) -> None:
    with await both.submit(max_tokens=10) as claim:
        claim.progress(100, 5000)
        await until(lambda: _deficit(both) < -4000.0, 60.0)
        claim.settle(Usage(prompt_tokens=100, completion_tokens=5000))
    await both.until_in_flight(0)
    view = await both.ask("view")
    assert [share.charged_tokens for share in view.shares] == [5100.0]


def _deficit(both: Both) -> float:
    return both.scheduling.scheduler.shares(time.monotonic())[0].deficit


async def test_needs_and_cache_keys_reach_the_scheduler(both: Both) -> None:
    job = both.job(needs=Needs(tools=True, vision=True), cache_key="k", max_tokens=7)
    with await both.serving.submit(job):
        (claim,) = both.scheduling._claims.values()
        assert claim.ticket.job == job


async def test_a_name_stands_for_a_model_that_can_be_served(both: Both) -> None:
    assert both.serving.resolve_alias("m") == "m"
    await until(lambda: bool(both.serving._served_models()), 60.0)
    assert both.serving._served_models() == {"m"}


def set_limits(username: str, **limits: Any) -> None:
    make_quota(User.objects.get(username=username), **limits)


async def test_limits_hold_and_are_told_of(both: Both) -> None:
    limits = {"requests_per_minute": 3, "max_concurrent": 2, "token_budget": 1000}
    await asyncio.to_thread(with_database, set_limits, "ada", **limits)
    ada = Holder("user", both.users["ada"])
    await until(lambda: ada in both.scheduling.snapshot.limits, 60.0)
    with await both.submit(max_tokens=100) as first, await both.submit(max_tokens=100):
        assert first.limited is not None
        requests, tokens = first.limited.requests, first.limited.tokens
        assert requests is not None
        assert tokens is not None
        assert (requests.limit, requests.remaining) == (3, 2)
        assert (tokens.limit, tokens.remaining) == (1000, 800)
        with pytest.raises(Rejected) as at_once:
            await both.submit(max_tokens=100)
        assert (at_once.value.reason, at_once.value.hopeless) == (
            "concurrency_limit_exceeded", False,
        )  # fmt: skip
        [use] = await both.ask("limits_of", [ada])
        assert (use.running, use.budget_reserved, use.requests_in_minute) == (2, 400, 2)
        first.settle(USED)
    await both.until_in_flight(0)
    with pytest.raises(Rejected) as too_dear:
        await both.submit(max_tokens=900)
    assert (too_dear.value.reason, too_dear.value.hopeless) == ("quota_exceeded", True)
    [use] = await both.ask("limits_of", [ada])
    assert (use.running, use.budget_reserved, use.budget_used) == (0, 0, 150)


async def test_a_gateway_learns_that_a_key_is_captured_and_writes_what_it_is_given(
    both: Both, settings: Any
) -> None:
    def switch() -> int:
        try:
            make_api_key(User.objects.get(username="ada"))
            key = ApiKey.objects.get()
            key.capture_until = timezone.now() + timedelta(hours=1)
            key.capture_reason, key.capture_days = "a bug", 7
            key.save()
            return key.pk
        finally:
            connection.close()

    pk = await asyncio.to_thread(switch)
    serving, folder = both.serving, settings.SPOOL_DIR / CAPTURES
    await until(lambda: any(key.capturing for key in serving.snapshot.keys.values()), 60.0)
    now = time.time()
    serving.captures.put(
        Captured(
            request_id="r1",
            key_id=pk,
            at=now,
            delete_at=now + 60.0,
            request=b"canary",
            request_bytes=6,
            answer=b"",
            answer_bytes=0,
        )
    )
    await until(lambda: bool(list(folder.glob("*.sealed"))), 60.0)
