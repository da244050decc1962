"""Who leads, who is refused, and what is told again: schedulers and a gateway on one event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from accounts.limits import Holder
from backends.models import Backend
from scheduler import runtime
from scheduler.admission import Unknown
from scheduler.bus import leader as leadership
from scheduler.bus import redis as places
from scheduler.bus.gateway import RemoteRuntime
from scheduler.bus.leader import SchedulerProcess
from scheduler.bus.messages import VERSION, Outward, Refused, encode
from scheduler.bus.wire import Line, Wire
from scheduler.core.jobs import Job, Usage
from scheduler.core.parts import Parts
from scheduler.core.scheduler import Scheduler
from scheduler.serving import Claim
from tests.cluster.test_contract import prepared, set_limits, with_database
from tests.running import until
from tests.scheduler.redis import RedisServer

_numbers = count(1)
USED = Usage(prompt_tokens=100, completion_tokens=50)


async def broken(*_: Any) -> None:
    raise ConnectionError("cut")


class Cluster:
    """One gateway, and schedulers of which one leads. The backend has two slots."""

    def __init__(self, user_id: int) -> None:
        self.user_id = user_id
        self.schedulers: list[SchedulerProcess] = []
        self.gateway: RemoteRuntime

    async def scheduler(self) -> SchedulerProcess:
        self.schedulers.append(await SchedulerProcess.start())
        return self.schedulers[-1]

    @property
    def leader(self) -> SchedulerProcess:
        return max(self.schedulers, key=lambda one: one.epoch)

    def job(self) -> Job:
        return Job(
            request_id=f"{next(_numbers):032x}",
            user_id=self.user_id,
            unit=self.user_id,
            model_name="m",
            prompt_tokens=100,
        )

    async def submit(self) -> Claim:
        return await self.gateway.submit(self.job())

    def in_flight(self) -> int:
        return sum(one.in_flight for one in self.leader.backends())

    def charged(self) -> float:
        shares = self.leader.scheduler.shares(time.monotonic())
        return sum(share.charged_tokens for share in shares)

    def deficit(self) -> float:
        return self.leader.scheduler.shares(time.monotonic())[0].deficit

    def use_of(self, holder: Holder) -> tuple[float | None, float | None, int]:
        """Of its budget used and reserved, and how many run."""
        [use] = self.leader.admission.use_of([holder])
        return use.budget_used, use.budget_reserved, use.running

    async def until_saved(self, absent: str) -> None:
        """Wait for a checkpoint that knows the gateway to be away."""
        client = self.leader._control
        async with asyncio.timeout(60.0):
            while absent not in json.loads(await client.get(places.SHARES) or "{}").get(  # noqa: ASYNC110
                "absent", {}
            ):
                await asyncio.sleep(0.02)

    async def until_led_after(self, epoch: int) -> None:
        """Wait for another lead, in which the gateway has told what it has."""
        await until(
            lambda: self.leader.epoch > epoch and self.gateway.name in self.leader.peers, 60.0
        )
        await until(lambda: self.gateway._epoch == self.leader.epoch, 60.0)


@pytest.fixture
async def cluster(
    redis: RedisServer, patient_bus: None, transactional_db: None, settings: Any, tmp_path: Path
) -> AsyncIterator[Cluster]:
    settings.SPOOL_DIR = tmp_path / "spool"
    settings.REDIS_URL = redis.url
    users = await asyncio.to_thread(prepared)
    cluster = Cluster(users["ada"])
    await cluster.scheduler()
    cluster.gateway = await RemoteRuntime.start()
    yield cluster
    await until(lambda: cluster.in_flight() == 0, 60.0)
    await cluster.gateway.stop()
    for scheduler in cluster.schedulers:
        if not scheduler.stopping:  # a second time it would close somebody else's files
            await scheduler.stop()


async def test_one_leads_and_another_takes_over_when_it_stops(cluster: Cluster) -> None:
    first, second = cluster.leader, await cluster.scheduler()
    assert (first.epoch > 0, second.epoch) == (True, 0)
    running, also = await cluster.submit(), await cluster.submit()
    waits = await cluster.submit()
    epoch = first.epoch
    await first.stop()
    await cluster.until_led_after(epoch)
    assert cluster.leader is second
    assert (cluster.in_flight(), waits.lease) == (2, None)
    with running, also, waits:
        running.settle(USED)
        assert await asyncio.wait_for(waits.wait(), 60.0) is not None
        also.settle(USED)
        waits.settle(USED)
    await until(lambda: cluster.charged() == 450.0, 60.0)


async def test_a_leader_whose_lease_ran_out_says_nothing_more(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, epoch = cluster.leader, cluster.leader.epoch

    async def unanswered(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(leadership, "LEASE_SECONDS", 1.2)
    await until(lambda: leader._lead_until < time.monotonic() + 1.2, 60.0)
    monkeypatch.setattr(leader._control, "eval", unanswered)  # it renews nothing
    await until(lambda: time.monotonic() >= leader._lead_until, 60.0)
    with await cluster.submit() as claim:  # waits for the next lead
        assert leader.epoch > epoch
        assert claim.lease is not None


async def test_what_an_older_leader_says_is_refused(cluster: Cluster) -> None:
    gateway = cluster.gateway
    running, also = await cluster.submit(), await cluster.submit()
    waits = await gateway.submit(cluster.job())
    refusal = Refused(waits.number, after_queueing=True, reason="x", message="", retry_after=1)

    def say(epoch: int) -> None:
        number = gateway._received + 1
        gateway._take(encode(Outward(VERSION, epoch, gateway._session, number, [refusal])))

    with running, also, waits:
        say(gateway._epoch - 1)
        assert waits.ticket.state == "queued"
        say(gateway._epoch)
        assert waits.ticket.state == "evicted"


async def test_nothing_is_granted_before_all_gateways_have_told_what_runs(
    cluster: Cluster, redis: RedisServer
) -> None:
    client = places.connect(redis.url)
    await client.sadd(places.GATEWAYS, "other")  # type: ignore[misc]
    await client.set(places.GATEWAY + "other", b"", px=60_000)
    second, epoch = await cluster.scheduler(), cluster.leader.epoch
    await asyncio.sleep(0.2)  # it has seen who is there
    await cluster.leader.stop()
    await until(lambda: second.epoch > epoch, 60.0)
    asked = asyncio.create_task(cluster.submit())
    await until(lambda: second._expected == {"other"}, 60.0)
    assert cluster.in_flight() == 0
    assert not asked.done()
    await client.delete(places.GATEWAY + "other")
    await until(lambda: not second._expected, 60.0)
    (claim,) = await asyncio.gather(asked, return_exceptions=True)
    if isinstance(claim, Claim):  # else it waited for too long, on a slow machine
        claim.__exit__(None, None, None)
    await client.aclose()


async def test_a_lost_batch_is_noticed_and_everything_told_again(cluster: Cluster) -> None:
    with await cluster.submit() as first:
        session = cluster.gateway._session
        cluster.gateway._sent += 1  # as if the one before had been trimmed away
        with await cluster.submit() as second:
            assert cluster.gateway._session > session
            await until(lambda: cluster.in_flight() == 2, 60.0)
            first.settle(USED)
            second.settle(USED)
    await until(lambda: cluster.charged() == 300.0, 60.0)


async def test_a_settlement_that_is_told_twice_counts_once(cluster: Cluster) -> None:
    with await cluster.submit() as claim:
        claim.settle(USED)
    await until(lambda: cluster.charged() == 150.0, 60.0)
    cluster.gateway._register_again()
    with await cluster.submit() as claim:
        claim.settle(USED)
    await until(lambda: cluster.charged() == 300.0, 60.0)


async def test_what_was_saved_is_not_charged_again_by_the_next_leader(cluster: Cluster) -> None:
    for _ in range(3):
        with await cluster.submit() as claim:
            claim.settle(USED)
    await until(lambda: cluster.charged() == 450.0, 60.0)
    epoch = cluster.leader.epoch
    await cluster.leader._control.delete(places.LEADER)
    await cluster.until_led_after(epoch)
    await until(lambda: cluster.charged() == 450.0, 60.0)


async def test_emptying_redis_costs_nothing_that_runs(cluster: Cluster, redis: RedisServer) -> None:
    claims = [await cluster.submit() for _ in range(3)]
    epoch = cluster.leader.epoch
    client = places.connect(redis.url)
    await client.flushall()
    await client.aclose()
    await cluster.until_led_after(epoch)
    await until(lambda: cluster.in_flight() == 2, 60.0)
    for claim in claims:
        claim.__exit__(None, None, None)


async def test_an_answer_that_comes_while_a_gateway_looks_where_to_read_on_is_told_again(
    cluster: Cluster, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As happens when it starts, or has heard nothing for long, and a request comes just then."""
    gateway = cluster.gateway
    client = places.connect(redis.url)
    look, asked = places.last_entry, asyncio.Event()
    submitting = asyncio.create_task(after(asked, cluster.submit))

    async def look_late(line: Line, stream: str) -> tuple[bytes, bytes]:
        if stream == gateway._out and not asked.is_set():
            told = await client.xlen(stream)
            asked.set()
            async with asyncio.timeout(20.0):
                while await client.xlen(stream) == told:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
        return await look(line, stream)

    monkeypatch.setattr(places, "last_entry", look_late)
    async with asyncio.timeout(20.0):
        while not asked.is_set():  # it may be looking just now
            gateway._positions = {}  # as ``_give_up`` does
            await asyncio.sleep(0.02)
        with await submitting as claim:
            assert claim.lease is not None
    await client.aclose()


async def test_without_a_scheduler_a_gateway_that_looks_for_one_tells_nothing(
    cluster: Cluster,
) -> None:
    """All that it has would go into Redis twice a second."""
    gateway = cluster.gateway
    await until(lambda: gateway._registered, 60.0)
    await cluster.leader.stop()
    session = gateway._session
    for _ in range(3):
        gateway._positions = {}  # as ``_give_up`` does
        await until(lambda: bool(gateway._positions), 60.0)
        await until(lambda: gateway._registered, 60.0)
    assert gateway._session == session


async def after(event: asyncio.Event, act: Callable[[], Awaitable[Claim]]) -> Claim:
    await event.wait()
    return await act()


async def test_what_was_counted_is_not_charged_again_when_a_silent_gateway_comes_back(
    cluster: Cluster,
) -> None:
    gateway, leader = cluster.gateway, cluster.leader
    with await cluster.submit() as claim:
        claim.settle(USED)
    ended = gateway._unsaved[0]
    await until(lambda: cluster.charged() == 150.0, 60.0)
    leader.peers[gateway.name].heard_at = float("-inf")
    await leader._look_for_silent_gateways()
    if ended not in gateway._unsaved:  # as if it had not heard that it is saved
        gateway._unsaved.appendleft(ended)
    gateway._register_again()
    with await cluster.submit() as claim:
        claim.settle(USED)
    await until(lambda: leader.peers[gateway.name].applied == ended.settle.serial + 1, 60.0)
    assert cluster.charged() == 300.0


async def test_what_is_charged_while_a_checkpoint_is_written_is_not_in_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, gateway = cluster.leader, cluster.gateway
    write = Scheduler.checkpoint_in_parts
    written: list[int] = []
    with await cluster.submit() as first, await cluster.submit() as second:
        first.settle(USED)
        await until(lambda: cluster.charged() == 150.0, 60.0)

        def with_a_charge(core: Scheduler, now: float) -> Parts[dict[str, Any]]:
            parts = write(core, now)
            next(parts)
            if not written:
                peer = leader.peers[gateway.name]
                written.append(peer.applied)
                second.settle(USED)
                leader._settle(peer, gateway._unsaved[-1].settle)
            return parts

        monkeypatch.setattr(Scheduler, "checkpoint_in_parts", with_a_charge)
        leader._settled = True
        await until(lambda: bool(written), 60.0)
        epoch = leader.epoch
        await leader._control.delete(places.LEADER)  # at once, before the next one
        await cluster.until_led_after(epoch)
    await until(lambda: cluster.charged() == 300.0, 60.0)
    assert written == [1]


async def test_a_take_over_that_fails_half_way_leaves_the_checkpoint_as_it_was(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with await cluster.submit() as claim:
        claim.settle(USED)
    await until(lambda: cluster.charged() == 150.0 and not cluster.leader._settled, 60.0)
    await until(lambda: not cluster.gateway._unsaved, 60.0)  # it counts on the checkpoint alone
    failed: list[int] = []

    def fail(core: Scheduler, state: dict[str, Any], now: float) -> Parts[None]:
        failed.append(1)
        cluster.leader._settled = True
        yield
        raise RuntimeError("forced")

    epoch = cluster.leader.epoch
    with monkeypatch.context() as fault:
        fault.setattr(Scheduler, "restore_in_parts", fail)
        await cluster.leader._control.delete(places.LEADER)
        await until(lambda: bool(failed), 60.0)
    await cluster.until_led_after(epoch)
    await until(lambda: cluster.charged() == 150.0, 60.0)


async def test_nothing_is_dispatched_or_forgotten_while_a_checkpoint_is_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with await cluster.submit() as claim:
        claim.settle(USED)
    await until(lambda: not cluster.gateway._unsaved, 60.0)
    restore, pump, look = Scheduler.restore_in_parts, Scheduler.pump, SchedulerProcess._polled
    reading: list[Scheduler] = []
    pumped, looked = [], asyncio.Event()

    def until_looked(core: Scheduler, state: dict[str, Any], now: float) -> Parts[None]:
        reading.append(core)
        while not looked.is_set():
            yield
        yield from restore(core, state, now)
        reading.clear()

    def noted(core: Scheduler, now: float) -> Any:
        pumped.extend(one for one in reading if one is core)
        return pump(core, now)

    async def polled(process: SchedulerProcess, now: float) -> None:
        await look(process, now)
        if reading:
            looked.set()

    monkeypatch.setattr(Scheduler, "restore_in_parts", until_looked)
    monkeypatch.setattr(Scheduler, "pump", noted)
    monkeypatch.setattr(SchedulerProcess, "_polled", polled)
    epoch = cluster.leader.epoch
    await cluster.leader._control.delete(places.LEADER)
    await cluster.until_led_after(epoch)
    assert looked.is_set()
    assert pumped == []
    assert cluster.charged() == 150.0


@pytest.mark.parametrize("ends", ["while it is away", "after it is back"])
@pytest.mark.parametrize("heir", ["the same leader", "another one"])
async def test_a_gateway_that_was_given_up_and_comes_back_is_charged_once_for_all_it_did(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, ends: str, heir: str
) -> None:
    gateway = cluster.gateway
    await asyncio.to_thread(with_database, set_limits, "ada", token_budget=1_000_000)
    ada = Holder("user", cluster.user_id)
    await until(lambda: ada in cluster.leader.snapshot.limits, 60.0)
    await until(lambda: not cluster.leader.admission.unknown, 60.0)
    with await cluster.submit() as claim:
        claim.settle(USED)
    counted = gateway._unsaved[0]
    await until(lambda: cluster.charged() == 150.0, 60.0)

    with await cluster.submit() as claim:
        claim.progress(100, 5_000)  # beyond what was held
        await until(lambda: cluster.deficit() < -500.0, 60.0)
        with monkeypatch.context() as wire:
            wire.setattr(gateway._writer, "execute", broken)
            await until(lambda: not gateway._registered, 60.0)
            cluster.leader.peers[gateway.name].heard_at = float("-inf")
            await cluster.leader._look_for_silent_gateways()
            assert (cluster.in_flight(), cluster.use_of(ada)) == (0, (150.0, 0.0, 0))
            if counted not in gateway._unsaved:  # as if it had not heard that it is saved
                gateway._unsaved.appendleft(counted)
            if heir == "another one":
                await cluster.until_saved(gateway.name)
                epoch = cluster.leader.epoch
                await cluster.leader._control.delete(places.LEADER)
                await until(lambda: gateway._epoch > epoch and cluster.leader.epoch > epoch, 60.0)
            if ends == "while it is away":
                claim.settle(Usage(prompt_tokens=100, completion_tokens=5_000))
        if ends == "after it is back":
            await until(lambda: cluster.in_flight() == 1, 60.0)
            used, reserved, running = cluster.use_of(ada)
            assert (used, reserved > 0, running) == (150.0, True, 1)
            claim.settle(Usage(prompt_tokens=100, completion_tokens=5_000))
    await until(lambda: cluster.charged() == 5_250.0, 60.0)
    assert (cluster.in_flight(), cluster.use_of(ada)) == (0, (5_250.0, 0.0, 0))


async def test_what_runs_on_a_backend_that_is_deleted_before_a_failover_is_charged(
    cluster: Cluster,
) -> None:
    await asyncio.to_thread(with_database, set_limits, "ada", token_budget=1_000_000)
    ada = Holder("user", cluster.user_id)
    await until(lambda: ada in cluster.leader.snapshot.limits, 60.0)
    await until(lambda: not cluster.leader.admission.unknown, 60.0)
    with await cluster.submit() as running, await cluster.submit() as also:
        await asyncio.to_thread(with_database, Backend.objects.all().delete)
        await until(lambda: cluster.leader.snapshot.backends == (), 60.0)
        epoch = cluster.leader.epoch
        await cluster.leader._control.delete(places.LEADER)
        await cluster.until_led_after(epoch)
        running.settle(USED)
        also.settle(USED)
    await until(lambda: cluster.charged() == 300.0, 60.0)
    assert cluster.use_of(ada) == (300.0, 0.0, 0)


async def test_a_new_leader_reads_no_use_from_the_database_that_it_counts_itself(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of budgets that no checkpoint knows."""
    gateway = cluster.gateway
    await asyncio.to_thread(with_database, set_limits, "ada", token_budget=1_000_000)
    ada = Holder("user", cluster.user_id)
    await until(lambda: ada in cluster.leader.snapshot.limits, 60.0)
    asked: list[frozenset[str]] = []

    def load(unknown: list[Unknown], spool: Path) -> list[Any]:
        asked.extend(one.under_way for one in unknown)
        return []

    async def nothing(_: SchedulerProcess) -> None:
        return None

    with await cluster.submit() as ended, await cluster.submit() as runs:
        waits = await cluster.submit()
        with waits:
            monkeypatch.setattr(SchedulerProcess, "_last_checkpoint", nothing)
            monkeypatch.setattr(runtime, "load_unknown", load)
            monkeypatch.setattr(gateway, "_hear", heard_without_saved(gateway))
            ended.settle(USED)
            epoch = cluster.leader.epoch
            await cluster.leader._control.delete(places.LEADER)
            await cluster.until_led_after(epoch)
            asked.clear()
            await until(lambda: bool(asked), 60.0)
            ids = {one.ticket.job.request_id for one in (ended, runs, waits)}
            assert asked[0] == ids


def heard_without_saved(gateway: RemoteRuntime) -> Callable[[bytes], None]:
    """A gateway's ear that misses what is safe by now."""
    hear = gateway._hear

    def heard(data: bytes) -> None:
        unsaved = deque(gateway._unsaved)
        hear(data)
        gateway._unsaved = unsaved

    return heard


async def test_a_slot_is_not_taken_by_a_gateway_that_may_have_been_given_up_since(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = cluster.gateway
    beat_at = gateway._beaten_at
    await until(lambda: gateway._beaten_at > beat_at, 60.0)
    taken: list[bytes] = []
    take = gateway._take

    def late(data: bytes) -> None:
        taken.append(data)
        if len(taken) == 1:
            assert not gateway._registered
        take(data)
        assert gateway._registered or not gateway._claims or claim_of(gateway).lease is None

    def claim_of(gateway: RemoteRuntime) -> Claim:
        return next(iter(gateway._claims.values()))

    monkeypatch.setattr(gateway, "_take", late)
    session = gateway._session
    gateway._beaten_at = float("-inf")  # as after a long halt
    with await cluster.submit() as claim:
        assert claim.lease is not None
        assert gateway._session > session
        await until(lambda: cluster.in_flight() == 1, 60.0)
        claim.settle(USED)
    await until(lambda: cluster.charged() == 150.0, 60.0)


async def test_what_was_held_back_is_heeded_before_anything_else_once_none_is_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = cluster.leader
    leader._led_since = time.monotonic() + 60.0  # not yet
    leader._expected = {"one that never comes"}
    cluster.gateway._register_again()
    await until(lambda: bool(leader._held_back), 60.0)
    held_back: list[int] = []

    async def srem(*_: Any) -> None:
        held_back.append(len(leader._held_back))

    monkeypatch.setattr(leader._control, "srem", srem)
    leader._led_since = float("-inf")
    await leader._look_for_silent_gateways()
    assert held_back == [0]
    monkeypatch.undo()


async def test_a_submission_whose_answer_was_lost_is_not_let_in_a_second_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, gateway = cluster.leader, cluster.gateway
    submitted: list[Job] = []
    submit = leader.submit

    async def noted(job: Job) -> Any:
        if not submitted:
            gateway._received += 1  # as if the batch with its answer had been lost
        submitted.append(job)
        return await submit(job)

    monkeypatch.setattr(leader, "submit", noted)
    with await cluster.submit() as claim:
        assert claim.lease is not None
        assert submitted == [claim.ticket.job]
        assert cluster.in_flight() == 1


async def test_no_drain_ends_before_all_gateways_have_told_what_runs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, (backend,) = cluster.leader, cluster.leader.backends()
    ended: list[set[int]] = []

    def disable(idle: set[int]) -> list[str]:
        ended.append(set(idle))
        return []

    monkeypatch.setattr(runtime, "disable_drained", disable)
    leader._led_since = time.monotonic() + 60.0
    leader._expected = {"one that has not told yet"}
    leader.snapshot = replace(leader.snapshot, draining=frozenset({backend.id}))
    await leader._polled(time.monotonic())
    assert ended == []
    leader._expected.clear()
    await leader._begin_if_complete()
    await leader._polled(time.monotonic())
    assert ended[0] == {backend.id}


async def test_a_connection_that_redis_does_not_let_in_is_not_left_open(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wires: list[Wire] = []
    made = Wire.connection_made

    def note(wire: Wire, transport: asyncio.BaseTransport) -> None:
        wires.append(wire)
        made(wire, transport)

    monkeypatch.setattr(Wire, "connection_made", note)
    line = Line(redis.url.replace("//", "//:wrong@"))
    with pytest.raises(places.ERRORS):
        await line.execute(("PING",))
    await until(lambda: not wires[0].is_open, 60.0)


@pytest.mark.parametrize(
    "in_redis",
    [
        b"\xffgarbage",
        b"[1]",
        b'{"version":1,"units":7}',
        b'{"version":1,"bus":null}',
        b'{"version":1,"absent":[1]}',
        b'{"version":1,"budgets":[[1]]}',
    ],
)
@pytest.mark.parametrize("in_database", ["whole", "broken"])
async def test_a_new_leader_takes_the_newest_checkpoint_that_can_be_read(
    cluster: Cluster, redis: RedisServer, in_redis: bytes, in_database: str
) -> None:
    with await cluster.submit() as claim:
        claim.settle(USED)
    await until(lambda: cluster.charged() == 150.0, 60.0)
    await cluster.leader.stop()  # which saves the shares
    client = places.connect(redis.url)
    await client.set(places.SHARES, in_redis)
    await client.aclose()
    if in_database == "broken":
        await asyncio.to_thread(with_database, runtime.save_state, {"version": 1, "units": 7})
    await cluster.scheduler()
    epoch = cluster.schedulers[0].epoch
    await cluster.until_led_after(epoch)
    known = cluster.charged()  # without any, what the gateway itself still tells
    assert in_database == "broken" or known == 150.0
    with await cluster.submit() as claim:
        claim.settle(USED)
    await until(lambda: cluster.charged() == known + 150.0, 60.0)
