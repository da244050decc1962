"""Waiting: bounds, positions, keep-alive comments, limits, and the order of service."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import httpx
import pytest

from accounts.models import Group, Quota, User
from tests.running import RunningRouter, body, events, said, until
from tests.stubs.openai_stub import Call, OpenAIStub, held, refuse

FULL = {"max_concurrent": 1}


@pytest.fixture
def go_on() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def busy(router: RunningRouter, stub: OpenAIStub, go_on: asyncio.Event) -> Any:
    """One slot, two places in the queue; all calls are held until `go_on`. Gives a task of
    another user, which has the slot."""
    await router.backend(stub, "a", max_concurrent=1, max_queue=2)
    other = await router.user("other")
    stub.behaviour = held(go_on)
    task = asyncio.create_task(router.chat(key=other))
    await stub.until_calls(1)
    yield task
    go_on.set()
    await task


def error(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    assert found["code"] == code
    assert re.fullmatch(r"[1-9]|[1-5]\d|60", response.headers["retry-after"])
    return found


async def until_done(
    tasks: list[asyncio.Task[httpx.Response]], count: int
) -> tuple[set[asyncio.Task[httpx.Response]], set[asyncio.Task[httpx.Response]]]:
    """Wait until so many are done, and no more than these; those done, and the others."""
    await until(lambda: sum(task.done() for task in tasks) >= count)
    done, others = await asyncio.wait(tasks, timeout=0.2)
    assert len(done) == count
    return done, others


# ---- B30, D2: bounds


async def test_what_fits_waits_and_the_rest_is_refused_at_once(
    router: RunningRouter, stub: OpenAIStub, go_on: asyncio.Event, busy: asyncio.Task[Any]
) -> None:
    tasks = [asyncio.create_task(router.chat()) for _ in range(4)]
    done, waiting = await until_done(tasks, 2)
    for task in done:
        error(task.result(), 429, "queue_full")
    assert (router.in_flight, router.waiting) == (1, 2)
    assert len(stub.calls) == 1
    go_on.set()
    assert [t.result().status_code for t in (await asyncio.wait(waiting))[0]] == [200, 200]
    assert (await busy).status_code == 200
    assert stub.most_running == 1
    refused = [r for r in await router.records() if r.outcome == "refused"]
    assert [(r.reason, r.status, r.charged_tokens) for r in refused] == [("queue_full", 429, 0)] * 2
    assert (await router.chat()).status_code == 200


async def test_refused_requests_change_nobodys_share(
    router: RunningRouter, busy: asyncio.Task[Any]
) -> None:
    ada = await router.ask(User.objects.get, username="ada")

    def deficit() -> Any:
        shares = router.runtime.scheduler.shares(time.monotonic())
        return next((s.deficit for s in shares if s.user_id == ada.pk), None)

    tasks = [asyncio.create_task(router.chat()) for _ in range(2)]
    await router.until_waiting(2)
    before = deficit()
    for _ in range(10):
        error(await router.chat(), 429, "queue_full")
    assert deficit() == pytest.approx(before, abs=1.0)  # the wait itself is worth a little
    for task in tasks:
        task.cancel()
    await router.until_waiting(0)


async def test_one_user_cannot_keep_the_queue_full_against_another(
    router: RunningRouter, go_on: asyncio.Event, busy: asyncio.Task[Any]
) -> None:
    newcomer = await router.user("newcomer")
    greedy = [asyncio.create_task(router.chat()) for _ in range(2)]
    await router.until_waiting(2)
    waits = asyncio.create_task(router.chat(key=newcomer))
    (evicted,), _ = await asyncio.wait(greedy, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    error(evicted.result(), 429, "queue_full")
    assert not waits.done()
    assert router.waiting == 2
    go_on.set()
    assert (await waits).status_code == 200


@pytest.mark.parametrize("slots", [1, 3])
async def test_without_a_queue_a_free_slot_serves_and_a_full_backend_refuses(
    router: RunningRouter, stub: OpenAIStub, go_on: asyncio.Event, slots: int
) -> None:
    await router.backend(stub, max_concurrent=slots, max_queue=0)
    stub.behaviour = held(go_on)
    tasks = [asyncio.create_task(router.chat()) for _ in range(slots + 2)]
    done, running = await until_done(tasks, 2)
    assert router.in_flight == len(running) == slots
    for task in done:
        error(task.result(), 429, "queue_full")
    go_on.set()
    assert {t.result().status_code for t in (await asyncio.wait(running))[0]} == {200}
    assert (await router.chat()).status_code == 200


async def test_a_wait_that_is_too_long_ends(
    router: RunningRouter, stub: OpenAIStub, go_on: asyncio.Event, busy: asyncio.Task[Any]
) -> None:
    await router.change(lambda: Group.objects.filter(name="ada").update(max_wait=0.1))
    for streamed in (False, True):
        response = await asyncio.wait_for(router.chat(stream=streamed), 20)
        error(response, 503, "queue_timeout")
    go_on.set()
    refused = [r for r in await router.records() if r.user == "ada"]
    assert [(r.outcome, r.reason, r.charged_tokens) for r in refused] == [
        ("refused", "queue_timeout", 0)
    ] * 2
    assert len(stub.calls) == 1


async def test_what_is_due_at_once_is_done_at_once(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    pumped = []
    monkeypatch.setattr(router.runtime.scheduler, "next_event", lambda now: now)
    monkeypatch.setattr(router.runtime, "_on_timer", lambda: pumped.append(True))
    for _ in range(3):
        router.runtime._arm(0.0)
    await until(lambda: bool(pumped))
    assert pumped == [True]


# ---- limits of a user


@pytest.mark.parametrize("through", ["group", "quota"])
async def test_waiting_and_running_requests_count_against_the_concurrency_limit(
    router: RunningRouter, busy: asyncio.Task[Any], through: str
) -> None:
    def limit() -> None:
        if through == "group":
            Group.objects.filter(name="ada").update(max_concurrent=2)
        else:
            Quota.objects.create(user=User.objects.get(username="ada"), max_concurrent=2)

    await router.change(limit)
    waiting = [asyncio.create_task(router.chat()) for _ in range(2)]
    await router.until_waiting(2)
    error(await router.chat(), 429, "concurrency_limit_exceeded")
    assert router.waiting == 2
    waiting[0].cancel()
    await router.until_waiting(1)
    waiting.append(asyncio.create_task(router.chat()))
    await router.until_waiting(2)
    for task in waiting:
        task.cancel()
    await router.until_waiting(0)


async def test_a_limit_of_nothing_allows_nothing(
    router: RunningRouter, stub: OpenAIStub, backend: int
) -> None:
    await router.change(lambda: Group.objects.update(max_concurrent=0))
    error(await router.chat(), 429, "concurrency_limit_exceeded")
    assert stub.calls == []


async def test_a_finished_request_no_longer_counts(router: RunningRouter, backend: int) -> None:
    await router.change(lambda: Group.objects.update(max_concurrent=1))
    for streamed in (False, True, False):
        assert (await router.chat(stream=streamed)).status_code == 200


# ---- streams that wait


async def test_a_waiting_stream_is_kept_alive_with_its_position(
    router: RunningRouter, settings: Any, go_on: asyncio.Event, busy: asyncio.Task[Any]
) -> None:
    settings.QUEUE_KEEPALIVE_AFTER = 0.05
    await router.reload()
    async with router.client.stream(
        "POST", "/v1/chat/completions", json=body(stream=True)
    ) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = response.aiter_lines()
        assert re.fullmatch(r": queued position=1( estimate=\d+s)?", await anext(lines))
        assert await anext(lines) == ""
        go_on.set()
        rest = "\n".join([line async for line in lines])
    assert said(rest) == "Hello, world"
    assert rest.rstrip().endswith("data: [DONE]")
    mine = [r for r in await router.records() if r.user == "ada"]
    assert [(r.outcome, r.status, r.position_at_arrival) for r in mine] == [("completed", 200, 1)]


async def test_comments_come_again_while_the_wait_lasts(
    router: RunningRouter,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    busy: asyncio.Task[Any],
) -> None:
    settings.QUEUE_KEEPALIVE_AFTER = 0.0
    await router.reload()
    async with router.client.stream(
        "POST", "/v1/chat/completions", json=body(stream=True)
    ) as response:
        lines = response.aiter_lines()
        found = [line async for line in _take(lines, 4)]
    assert [line[:8] for line in found] == [": queued", "", ": queued", ""]
    await router.until_waiting(0)


async def _take(lines: Any, count: int) -> Any:
    for _ in range(count):
        yield await anext(lines)


async def test_a_failure_after_the_comments_is_an_error_event(
    router: RunningRouter,
    stub: OpenAIStub,
    settings: Any,
    go_on: asyncio.Event,
    busy: asyncio.Task[Any],
) -> None:
    settings.QUEUE_KEEPALIVE_AFTER = 0.02
    await router.reload()
    stub.then(refuse(400, "too long for me"))
    async with router.client.stream(
        "POST", "/v1/chat/completions", json=body(stream=True)
    ) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        await anext(lines)
        go_on.set()
        text = "\n".join([line async for line in lines])
    (event,) = events(text)
    assert event["error"]["message"] == "too long for me"
    assert event["error"]["code"] == "invalid_request"
    assert "[DONE]" not in text
    mine = [r for r in await router.records() if r.user == "ada"]
    assert [(r.outcome, r.reason, r.charged_tokens) for r in mine] == [
        ("failed", "invalid_request", 0)
    ]


async def test_a_request_that_is_no_stream_gets_nothing_before_its_answer(
    router: RunningRouter, settings: Any, go_on: asyncio.Event, busy: asyncio.Task[Any]
) -> None:
    settings.QUEUE_KEEPALIVE_AFTER = 0.0
    await router.reload()
    async with await router.raw() as client:
        client.post()
        await router.until_waiting(1)
        with pytest.raises(TimeoutError):
            await client.until(b"\r\n", within=0.1)
        go_on.set()
        assert (await client.response())[0] == 200


async def test_the_wait_is_told_in_the_answer_and_in_the_record(
    router: RunningRouter, go_on: asyncio.Event, busy: asyncio.Task[Any]
) -> None:
    began = time.monotonic()
    task = asyncio.create_task(router.chat())
    await router.until_waiting(1)
    await asyncio.sleep(0.05)
    go_on.set()
    response = await task
    took = (time.monotonic() - began) * 1000
    assert 50 <= int(response.headers["x-mindrouter-queue-ms"]) <= took
    (record,) = [r for r in await router.records() if r.user == "ada"]
    assert record.queued_at is not None
    assert record.dispatched_at is not None
    assert (record.dispatched_at - record.queued_at).total_seconds() >= 0.05
    assert record.wait_reason == "backends_full"


# ---- backends that come and go


async def test_a_disabled_backend_is_waited_for(
    router: RunningRouter, stub: OpenAIStub, backend: int
) -> None:
    from backends.models import Backend

    await router.change(lambda: Backend.objects.update(enabled=False))
    task = asyncio.create_task(router.chat())
    await router.until_waiting(1)
    await router.change(lambda: Backend.objects.update(enabled=True))
    assert (await task).status_code == 200


async def test_a_removed_backend_finishes_what_it_runs(
    router: RunningRouter, stub: OpenAIStub, go_on: asyncio.Event, busy: asyncio.Task[Any]
) -> None:
    from backends.models import Backend

    await router.change(lambda: Backend.objects.all().delete())
    go_on.set()
    assert (await busy).status_code == 200
    response = await router.chat()
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_more_slots_serve_those_who_wait_at_once(
    router: RunningRouter, stub: OpenAIStub, go_on: asyncio.Event, busy: asyncio.Task[Any]
) -> None:
    from backends.models import Backend

    tasks = [asyncio.create_task(router.chat()) for _ in range(2)]
    await router.until_waiting(2)
    await router.change(lambda: Backend.objects.update(max_concurrent=3))
    await stub.until_calls(3)
    assert router.in_flight == 3
    go_on.set()
    assert {(await task).status_code for task in tasks} == {200}


# ---- what would be left if the process died now


async def test_an_open_record_says_whether_its_request_waits_or_where_it_went(
    router: RunningRouter, stub: OpenAIStub, go_on: asyncio.Event, busy: asyncio.Task[Any]
) -> None:
    waiting = asyncio.create_task(router.chat())
    await until(lambda: router.waiting == 1)
    running, queued = router.runtime.spool.open_records()
    assert (running.selected_backend, running.dispatched_at is None) == ("a", False)
    assert (queued.selected_backend, queued.dispatched_at) == ("", None)
    go_on.set()
    await stub.until_calls(2)
    assert (await waiting).status_code == 200


async def test_what_waited_long_leaves_a_second_marker_when_it_is_served(
    router: RunningRouter, stub: OpenAIStub, go_on: asyncio.Event, busy: asyncio.Task[Any]
) -> None:
    waiting = asyncio.create_task(router.chat())
    await until(lambda: router.waiting == 1)
    ended = asyncio.Event()
    stub.then(held(ended))
    go_on.set()
    await stub.until_calls(2)
    spool = router.runtime.spool
    spool.announce()
    spool.announce()
    [file] = spool.directory.glob("*.open")
    request_id = spool.open_records()[0].request_id
    markers = [line for line in file.read_text().splitlines() if '{"open":' in line]
    assert '"selected_backend":"a"' in [line for line in markers if request_id in line][-1]
    ended.set()
    assert (await waiting).status_code == 200


async def test_a_stream_that_waits_again_after_an_answer_that_broke_off_ends_with_an_error(
    router: RunningRouter, settings: Any
) -> None:
    """Its first backend began a document instead of a stream, of which the client saw nothing."""
    settings.QUEUE_KEEPALIVE_AFTER = 0.1
    go_on = asyncio.Event()

    async def begins_a_document(call: Call) -> None:
        await call.connection.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n{"
        )
        call.connection.reset()

    async with await OpenAIStub.start() as busy, await OpenAIStub.start() as broken:
        busy.behaviour, broken.behaviour = held(go_on), begins_a_document
        await router.backend(busy, "busy", max_concurrent=1)
        holding = asyncio.create_task(router.chat())
        await busy.until_calls(1)
        await router.backend(broken, "broken", max_concurrent=1)
        async with await router.raw() as client:
            client.post(stream=True)
            await client.until(b": ")  # a comment, since it waits for the other one
            (waiting,) = router.runtime.scheduler.queue(time.monotonic())
            assert await router.runtime._evict(waiting.request_id)
            end = await client.until(b"0\r\n\r\n")
        go_on.set()
        assert (await holding).status_code == 200
    assert b"data: {" in end
    assert b"permission_denied" in end
