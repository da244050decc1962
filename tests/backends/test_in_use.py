"""What is edited, disabled, drained or deleted while requests run and wait, through the router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from django.db import connection
from django.db.models import ProtectedError

from accounts.models import Group, User
from backends.draining import disable_drained
from backends.models import Alias, Backend, BackendModel
from scheduler.runtime import Runtime
from tests.running import RunningRouter, body, until
from tests.stubs.openai_stub import OpenAIStub, held


@pytest.fixture
def go_on() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def second() -> Any:
    async with await OpenAIStub.start() as stub:
        yield stub


async def streaming(router: RunningRouter, stub: OpenAIStub, go_on: asyncio.Event) -> Any:
    """A stream on the stub that has begun and is held until `go_on`."""

    async def behave(call: Any) -> None:
        await call.start_stream()
        await call.role()
        await call.say("before")
        await go_on.wait()
        await call.say("after")
        await call.finish()
        await call.usage(output=2)
        await call.end()

    stub.then(behave)
    task = asyncio.create_task(router.chat(stream=True))
    await stub.until_calls(1)
    return task


def ended_well(response: httpx.Response) -> bool:
    text = response.text
    return "before" in text and "after" in text and text.rstrip().endswith("data: [DONE]")


def of(backend_id: int) -> Any:
    return Backend.objects.filter(pk=backend_id)


def changed(change: Callable[[], Any]) -> None:
    """Make a change in a thread of its own, which has a connection of its own."""
    try:
        change()
    finally:
        connection.close()


async def row(router: RunningRouter, backend_id: int) -> Backend:
    return await router.ask(lambda: Backend.objects.get(pk=backend_id))


# ---- drain, disable, pause


async def test_a_drained_backend_finishes_what_runs_and_then_disables_itself_once(
    router: RunningRouter, stub: OpenAIStub, backend: int, go_on: asyncio.Event
) -> None:
    task = await streaming(router, stub, go_on)
    await router.change(lambda: of(backend).update(draining=True))
    await router.runtime._end_drains()
    assert (await row(router, backend)).enabled  # it still has something to finish
    waiting = asyncio.create_task(router.chat())
    await router.until_waiting(1)
    assert len(stub.calls) == 1  # nothing new
    go_on.set()
    assert ended_well(await task)
    await until(lambda: router.state_of(backend) == "disabled", 5.0)
    drained = await row(router, backend)
    assert (drained.enabled, drained.draining) == (False, False)
    reasons = await router.ask(
        lambda: list(drained.history.values_list("history_change_reason", flat=True))
    )
    assert reasons.count("drained: nothing runs on it any more") == 1
    assert len(stub.calls) == 1
    await router.change(lambda: of(backend).update(enabled=True))
    assert (await waiting).status_code == 200  # it waited for the backend to come back


async def test_a_restart_ends_the_drain_of_what_the_old_process_served(
    router: RunningRouter, stub: OpenAIStub, backend: int
) -> None:
    await router.runtime.stop()
    await asyncio.to_thread(changed, lambda: of(backend).update(draining=True))
    router.runtime = router.scheduling = await Runtime.start()
    await until(lambda: router.state_of(backend) == "disabled", 5.0)
    drained = await row(router, backend)
    assert (drained.enabled, drained.draining) == (False, False)


@pytest.mark.django_db
def test_a_drain_ends_once_and_not_after_it_was_called_off() -> None:
    rows = [Backend(name=n, base_url="http://x", draining=True) for n in ("a", "b", "c")]
    for one in rows:
        one.save()
    of(rows[1].pk).update(draining=False)
    of(rows[2].pk).update(enabled=False)
    ids = [one.pk for one in rows]
    assert [disable_drained(ids), disable_drained(ids)] == [["a"], []]
    assert rows[0].history.count() == 2
    assert [Backend.objects.get(pk=pk).enabled for pk in ids] == [False, True, False]


async def test_paused_backends_get_nothing_until_they_are_resumed_and_stay_enabled(
    router: RunningRouter, stub: OpenAIStub, backend: int, go_on: asyncio.Event
) -> None:
    task = await streaming(router, stub, go_on)
    await router.change(lambda: Backend.objects.update(paused=True))
    waiting = asyncio.create_task(router.chat())
    await router.until_waiting(1)
    go_on.set()
    assert ended_well(await task)
    await router.runtime._end_drains()
    assert (await row(router, backend)).enabled
    assert len(stub.calls) == 1
    await router.change(lambda: Backend.objects.update(paused=False))
    assert (await waiting).status_code == 200


# ---- deleted and changed


async def test_a_stream_on_a_deleted_backend_ends_well_and_its_record_keeps_the_names(
    router: RunningRouter, stub: OpenAIStub, backend: int, go_on: asyncio.Event
) -> None:
    task = await streaming(router, stub, go_on)
    await router.change(lambda: of(backend).delete())
    go_on.set()
    assert ended_well(await task)
    record = await router.record()
    assert (record.outcome, record.selected_backend, record.selected_backend_id) == (
        "completed",
        "a",
        backend,
    )
    assert (record.user, record.group, record.completion_tokens) == ("ada", "ada", 2)
    assert (await router.chat()).status_code == 404


CHANGES: dict[str, Callable[[int], Any]] = {
    "deleted": lambda pk: of(pk).delete(),
    "without the model": lambda pk: BackendModel.objects.filter(backend=pk).delete(),
    "disabled": lambda pk: of(pk).update(enabled=False),
    "draining": lambda pk: of(pk).update(draining=True),
    "paused": lambda pk: of(pk).update(paused=True),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_what_waits_for_a_backend_goes_to_another_that_can_serve_it(
    router: RunningRouter,
    stub: OpenAIStub,
    second: OpenAIStub,
    go_on: asyncio.Event,
    change: str,
) -> None:
    first = await router.backend(stub, "a", max_concurrent=1)
    other = await router.backend(second, "b", max_concurrent=1)
    stub.behaviour = second.behaviour = held(go_on)
    running = [asyncio.create_task(router.chat()) for _ in range(2)]
    await stub.until_calls(1)
    await second.until_calls(1)
    waiting = [asyncio.create_task(router.chat()) for _ in range(2)]
    await router.until_waiting(2)
    await router.change(CHANGES[change], first)
    assert router.waiting == 2
    go_on.set()
    answers = await asyncio.gather(*running, *waiting)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert (len(stub.calls), len(second.calls)) == (1, 3)
    records = await router.records()
    assert {record.selected_backend_id for record in records[2:]} == {other}


@pytest.mark.parametrize("change", ["deleted", "without the model"])
async def test_what_waits_for_a_model_that_is_gone_is_told_so(
    router: RunningRouter, stub: OpenAIStub, go_on: asyncio.Event, change: str
) -> None:
    only = await router.backend(stub, "a", max_concurrent=1)
    stub.behaviour = held(go_on)
    running = asyncio.create_task(router.chat())
    await stub.until_calls(1)
    waiting = asyncio.create_task(router.chat())
    await router.until_waiting(1)
    await router.change(CHANGES[change], only)
    refused = await waiting
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    go_on.set()
    assert (await running).status_code == 200
    ended, dropped = await router.records()
    assert (ended.outcome, ended.selected_backend) == ("completed", "a")
    assert (dropped.outcome, dropped.reason, dropped.charged_tokens) == (
        "refused",
        "model_not_found",
        0,
    )


async def test_fewer_slots_end_nothing_that_runs(
    router: RunningRouter, stub: OpenAIStub, backend: int, go_on: asyncio.Event
) -> None:
    stub.behaviour = held(go_on)
    running = [asyncio.create_task(router.chat()) for _ in range(3)]
    await stub.until_calls(3)
    await router.change(lambda: of(backend).update(max_concurrent=1, name="renamed"))
    running.append(asyncio.create_task(router.chat()))
    await router.until_waiting(1)
    go_on.set()
    assert [r.status_code for r in await asyncio.gather(*running)] == [200] * 4
    assert router.in_flight == 0


async def test_an_address_edited_under_a_stream_counts_from_the_next_request(
    router: RunningRouter,
    stub: OpenAIStub,
    second: OpenAIStub,
    backend: int,
    go_on: asyncio.Event,
) -> None:
    task = await streaming(router, stub, go_on)
    await router.change(lambda: of(backend).update(base_url=second.url))
    assert (await router.chat()).status_code == 200
    assert len(second.calls) == 1
    go_on.set()
    assert ended_well(await task)


# ---- aliases


async def test_a_request_by_an_alias_that_is_deleted_goes_on(
    router: RunningRouter, stub: OpenAIStub, go_on: asyncio.Event
) -> None:
    await router.backend(stub, "a", max_concurrent=1)
    await router.change(Alias.objects.create, name="small", targets=["m"])
    stub.behaviour = held(go_on)
    both = [asyncio.create_task(router.chat(model="small")) for _ in range(2)]
    await stub.until_calls(1)
    await router.until_waiting(1)
    await router.change(lambda: Alias.objects.all().delete())
    go_on.set()
    assert [r.status_code for r in await asyncio.gather(*both)] == [200, 200]
    assert (await router.chat(model="small")).json()["error"]["code"] == "model_not_found"
    records = await router.records()
    assert [(r.model_requested, r.model_served) for r in records[:2]] == [("small", "m")] * 2


# ---- users and groups


USER_CHANGES: dict[str, Callable[[], Any]] = {
    "deleted": lambda: User.objects.filter(username="ada").delete(),
    "disabled": lambda: User.objects.filter(username="ada").update(is_active=False),
}


@pytest.mark.parametrize("change", USER_CHANGES)
async def test_requests_of_a_user_who_is_gone_end_well_and_new_ones_are_refused(
    router: RunningRouter, stub: OpenAIStub, go_on: asyncio.Event, change: str
) -> None:
    await router.backend(stub, "a", max_concurrent=1)
    task = await streaming(router, stub, go_on)
    waiting = asyncio.create_task(router.chat())
    await router.until_waiting(1)
    await router.change(USER_CHANGES[change])
    assert (await router.chat()).status_code == 401
    go_on.set()
    assert ended_well(await task)
    assert (await waiting).status_code == 200
    records = await router.records()
    assert [(r.user, r.group, r.outcome) for r in records] == [
        ("ada", "ada", "completed"),
        ("ada", "ada", "completed"),
        ("", "", "refused"),
    ]
    assert (router.in_flight, router.waiting) == (0, 0)


async def test_a_group_in_use_cannot_be_deleted_and_nothing_stops(
    router: RunningRouter, stub: OpenAIStub, backend: int, go_on: asyncio.Event
) -> None:
    task = await streaming(router, stub, go_on)
    with pytest.raises(ProtectedError):
        await router.change(lambda: Group.objects.get(name="ada").delete())
    go_on.set()
    assert ended_well(await task)
    assert (await router.client.post("/v1/chat/completions", json=body())).status_code == 200
