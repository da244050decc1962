"""Clients that leave, in every phase: noticed at once, never served on, slots free again."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable

import pytest

from tests.running import RawClient, RunningRouter, body, until
from tests.stubs.openai_stub import Call, OpenAIStub, drip, held, ordinary, refuse, silent

#: Seconds; milliseconds in fact. Each of what is left goes on for thirty, or for ever.
NOTICED = 10.0
LEAVE: dict[str, Callable[[RawClient], None]] = {"FIN": RawClient.close, "RST": RawClient.reset}

leaving = pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE.keys())
pytestmark = pytest.mark.parametrize("mode", ["embedded", "cluster"])


@pytest.fixture
async def slot(router: RunningRouter, stub: OpenAIStub) -> int:
    """A backend with one slot."""
    return await router.backend(stub, "a", max_concurrent=1)


# ---- B12: in the middle of a stream


@leaving
async def test_a_client_that_leaves_mid_stream_frees_its_slot_at_once(
    router: RunningRouter,
    stub: OpenAIStub,
    slot: int,
    leave: Callable[[RawClient], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    stub.then(drip(0.1, 300))
    async with await router.raw() as client:
        client.post(stream=True)
        for _ in range(5):
            await client.until(b"\n\n")
        waits = asyncio.create_task(router.chat())
        await router.until_waiting(1)
        leave(client)
        left = time.monotonic()
        assert (await waits).status_code == 200
        assert time.monotonic() - left < NOTICED
    call = stub.calls[0]
    assert call.connection.gone_at is not None
    assert call.connection.gone_at - left < NOTICED
    first, second = await router.records()
    assert (first.outcome, first.reason, first.status) == ("cancelled", "client_disconnected", 499)
    assert first.usage_estimated
    assert first.completion_tokens in (4, 5, 6)
    assert first.charged_tokens == first.prompt_tokens + first.completion_tokens
    assert first.attempts[0]["reason"] == "client_disconnected"
    assert second.outcome == "completed"
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


# ---- before anything has come


@leaving
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_before_the_answer_ends_the_attempt(
    router: RunningRouter,
    stub: OpenAIStub,
    slot: int,
    leave: Callable[[RawClient], None],
    streamed: bool,
) -> None:
    stub.then(silent)
    async with await router.raw() as client:
        client.post(stream=streamed)
        call = await stub.until_calls(1)
        leave(client)
        await asyncio.wait_for(call.connection.gone.wait(), NOTICED)
    record = await router.record()
    assert (record.outcome, record.reason) == ("cancelled", "client_disconnected")
    assert record.dispatched_at is not None
    assert record.charged_tokens >= record.prompt_tokens > 0  # leaving is not free
    assert len(stub.calls) == 1
    assert router.state_of(slot) != "failed"


@leaving
async def test_a_client_that_leaves_within_a_whole_answer_ends_it(
    router: RunningRouter, stub: OpenAIStub, slot: int, leave: Callable[[RawClient], None]
) -> None:
    async def half(call: Call) -> None:
        document = json.dumps(call.document()).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        await call.connection.write(head % len(document), document[:20])
        await call.connection.stall()

    stub.then(half)
    async with await router.raw() as client:
        client.post()
        call = await stub.until_calls(1)
        await asyncio.sleep(0.02)  # the head and the part are being read
        leave(client)
        await asyncio.wait_for(call.connection.gone.wait(), NOTICED)
    record = await router.record()
    assert record.outcome == "cancelled"
    assert record.charged_tokens > 0


# ---- in the queue


@leaving
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("keepalive", [0.0, 10.0])
async def test_a_client_that_leaves_the_queue_is_never_served_or_charged(
    router: RunningRouter,
    stub: OpenAIStub,
    slot: int,
    settings: pytest.FixtureRequest,
    leave: Callable[[RawClient], None],
    streamed: bool,
    keepalive: float,
) -> None:
    settings.QUEUE_KEEPALIVE_AFTER = keepalive  # type: ignore[attr-defined]
    await router.reload()
    go_on = asyncio.Event()
    stub.then(held(go_on))
    other = await router.user("other")
    first = asyncio.create_task(router.chat(key=other))
    await stub.until_calls(1)
    async with await router.raw() as client:
        client.post(stream=streamed)
        await router.until_waiting(1)
        if streamed and keepalive == 0.0:
            await client.until(b": queued")
        leave(client)
        await router.until_waiting(0, within=NOTICED)
    go_on.set()
    assert (await first).status_code == 200
    (record,) = [r for r in await router.records() if r.user == "ada"]
    assert (record.outcome, record.reason) == ("cancelled", "client_disconnected")
    assert record.dispatched_at is None
    assert record.attempts == []
    assert record.charged_tokens == 0
    assert len(stub.calls) == 1


async def test_a_client_that_leaves_between_two_attempts_is_not_tried_again(
    router: RunningRouter, stub: OpenAIStub, slot: int
) -> None:
    stub.then(refuse(503, "full"))
    async with await router.raw() as client:
        client.post()
        await stub.until_calls(1)
        await router.until_waiting(1)  # the backend is left alone for a moment
        client.close()
        await router.until_waiting(0, within=NOTICED)
    record = await router.record()
    assert record.outcome == "cancelled"
    assert record.charged_tokens == 0
    assert len(stub.calls) == 1


# ---- while it still sends its request


@leaving
async def test_a_client_that_leaves_within_its_body_is_recorded(
    router: RunningRouter, stub: OpenAIStub, slot: int, leave: Callable[[RawClient], None]
) -> None:
    async with await router.raw() as client:
        client.send("POST /v1/chat/completions", {"Content-Length": "1000"}, b'{"model"')
        await until(lambda: bool(router.runtime.serving))
        leave(client)
        await router.idle(NOTICED)
    record = await router.record()
    assert (record.outcome, record.reason) == ("cancelled", "client_disconnected")
    assert (record.prompt_tokens, record.charged_tokens) == (None, 0)
    assert stub.calls == []


# ---- B17, D3: races


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    """Each of 600 requests is cut after another number of loop turns."""
    await router.backend(stub, "a", max_concurrent=3, max_queue=64)
    dice = random.Random(17)

    async def leave_after(turns: int) -> None:
        async with await router.raw() as client:
            client.post(stream=bool(turns % 2))
            for _ in range(turns):
                await asyncio.sleep(0)
            if dice.random() < 0.5:
                client.reset()

    for burst in range(100):
        await asyncio.gather(*(leave_after(burst % 40 + n) for n in range(6)))
    await router.idle()
    assert (router.in_flight, router.waiting) == (0, 0)
    began = time.monotonic()
    assert (await router.chat()).status_code == 200
    assert time.monotonic() - began < NOTICED
    records = await router.records()
    assert len({r.request_id for r in records}) == len(records)
    assert {r.outcome for r in records} <= {"completed", "cancelled"}
    assert (
        router.runtime.upstream.open_count(
            next(iter(router.runtime.snapshot.endpoints.values())).origin
        )
        <= 3
    )
    await until(lambda: stub.running == 0)


async def test_a_slot_and_a_leaving_client_at_the_same_moment_leak_no_slot(
    router: RunningRouter, stub: OpenAIStub, slot: int
) -> None:
    """10,000 jobs, over the bus 300, wait for a slot that comes free in the very turn of the loop
    in which some of them leave."""
    from scheduler.core.jobs import Job, Usage

    runtime = router.runtime
    user = next(iter(runtime.snapshot.users))
    usage = Usage(prompt_tokens=1, completion_tokens=1)

    def job(n: int) -> Job:
        return Job(request_id=str(n), user_id=user, unit=user, model_name="m", prompt_tokens=1)

    async def wait(n: int) -> None:
        with await runtime.submit(job(n)) as claim:
            await claim.wait()
            await asyncio.sleep(0)
            claim.settle(usage)

    for n in range(150 if router.in_cluster else 5000):
        with await runtime.submit(job(n)) as holder:
            tasks = [asyncio.create_task(wait(n)) for _ in range(2)]
            await asyncio.sleep(0)
            if n % 2:
                tasks[0].cancel()
            holder.settle(usage)
            tasks[0].cancel()
            if n % 3 == 0:
                tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await router.told()
    assert (router.in_flight, router.waiting) == (0, 0)


async def test_no_pool_entry_is_lost_however_a_request_is_cut(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    """300 bursts of six requests, cut after 0 to 11 turns of the loop; then all is as before."""
    await router.backend(stub, "a", max_concurrent=6)
    async with await OpenAIStub.start("n") as other:
        await router.backend(other, "b")
        data = json.dumps(body()).encode()
        for burst in range(300):
            tasks = [asyncio.create_task(_send(router, data)) for _ in range(6)]
            for _ in range(burst % 12):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        began = time.monotonic()
        assert (await router.chat()).status_code == 200
        assert (await router.chat(model="n")).status_code == 200
        assert time.monotonic() - began < NOTICED
    for endpoint in router.runtime.snapshot.endpoints.values():
        assert router.runtime.upstream.open_count(
            endpoint.origin
        ) == router.runtime.upstream.idle_count(endpoint.origin)
        assert router.state_of(endpoint.backend_id) != "failed"


async def _send(router: RunningRouter, data: bytes) -> None:
    endpoint = next(iter(router.runtime.snapshot.endpoints.values()))
    response = await router.runtime.upstream.send(
        endpoint.origin,
        method=b"POST",
        path=b"/v1/chat/completions",
        headers=endpoint.headers,
        body=data,
        connect_timeout=1.0,
        first_byte_timeout=5.0,
        chunk_timeout=5.0,
    )
    with response:
        await response.read()


async def test_a_client_that_stays_is_served_though_all_others_leave(
    router: RunningRouter, stub: OpenAIStub, slot: int
) -> None:
    go_on = asyncio.Event()
    stub.then(held(go_on))
    first = asyncio.create_task(router.chat())
    await stub.until_calls(1)
    clients = [await router.raw() for _ in range(5)]
    for client in clients:
        client.post(stream=True)
    await router.until_waiting(5)
    stays = asyncio.create_task(router.chat())
    await router.until_waiting(6)
    for client in clients:
        client.reset()
    await router.until_waiting(1, within=NOTICED)
    stub.behaviour = ordinary
    go_on.set()
    assert (await first).status_code == (await stays).status_code == 200
    assert len(stub.calls) == 2
