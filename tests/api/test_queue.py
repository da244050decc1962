"""``/api/admin/queue``: what waits, and removing one of it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from audit.models import Deed
from tests.factories import make_admin, make_api_key, make_user
from tests.running import RunningRouter, until
from tests.stubs.openai_stub import OpenAIStub


@pytest.fixture
async def full(router: RunningRouter, stub: OpenAIStub, backend: int) -> RunningRouter:
    """A router whose one backend takes no request at all, so that everything waits."""
    from backends.models import Backend

    await router.change(Backend.objects.filter(pk=backend).update, paused=True)
    return router


def make_root() -> str:
    return make_api_key(make_admin("root"))


async def ask(
    router: RunningRouter, key: str, method: str, path: str, **options: Any
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return await router.client.request(method, f"/api/admin/{path}", headers=headers, **options)


async def test_a_removed_request_is_answered_with_an_error_and_recorded(
    full: RunningRouter,
) -> None:
    root = await full.ask(make_root)
    request = asyncio.create_task(full.chat())
    await full.until_waiting(1)
    waiting = (await ask(full, root, "GET", "queue")).json()
    assert waiting["count"] == 1
    (job,) = waiting["results"]
    assert (job["username"], job["group"], job["model_name"]) == ("ada", "ada", "m")
    assert (job["position"], job["weight"]) == (1, 1)

    gone = await ask(full, root, "DELETE", f"queue/{job['request_id']}")
    assert (gone.status_code, gone.content) == (204, b"")
    answer = await request
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "permission_denied"
    assert answer.headers["x-should-retry"] == "false"
    assert full.waiting == 0
    record = await full.record()
    assert (record.request_id, record.reason) == (job["request_id"], "permission_denied")
    assert record.message == "An administrator removed this request from the queue."
    assert (record.dispatched_at, record.charged_tokens) == (None, 0)
    deed = await full.ask(Deed.history.get)
    assert (deed.subject, deed.action) == (f"request {record.request_id}", "removed")
    assert (deed.history_actor, deed.history_address) == ("root", "127.0.0.1")
    assert deed.history_via.startswith(f"DELETE /api/admin/queue/{record.request_id} with key mr-")


async def test_what_does_not_wait_cannot_be_removed(full: RunningRouter) -> None:
    root = await full.ask(make_root)
    answer = await ask(full, root, "DELETE", "queue/none-such")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert not await full.ask(Deed.history.exists)


async def test_a_running_request_is_left_alone(
    router: RunningRouter, stub: OpenAIStub, backend: int
) -> None:
    root = await router.ask(make_root)
    answer = await router.chat()
    assert answer.status_code == 200
    request_id = answer.headers["x-request-id"]
    gone = await ask(router, root, "DELETE", f"queue/{request_id}")
    assert gone.status_code == 404


@pytest.mark.parametrize(("role", "status"), [("operator", 204), ("auditor", 403)])
async def test_operators_remove_requests_and_auditors_only_look(
    full: RunningRouter, role: str, status: int
) -> None:
    key = await full.ask(lambda: make_api_key(make_user("somebody", role=role)))
    request = asyncio.create_task(full.chat())
    await full.until_waiting(1)
    (job,) = (await ask(full, key, "GET", "queue")).json()["results"]
    gone = await ask(full, key, "DELETE", f"queue/{job['request_id']}")
    assert gone.status_code == status
    if status == 403:
        assert await full.runtime._evict(job["request_id"])
    await request


async def test_the_queue_comes_in_pages(full: RunningRouter) -> None:
    root = await full.ask(make_root)
    requests = [asyncio.create_task(full.chat()) for _ in range(3)]
    await full.until_waiting(3)
    first = (await ask(full, root, "GET", "queue", params={"limit": 2})).json()
    assert (first["count"], len(first["results"]), first["previous"]) == (3, 2, None)
    second = (
        await full.client.get(first["next"], headers={"Authorization": f"Bearer {root}"})
    ).json()
    ids = [job["request_id"] for job in first["results"] + second["results"]]
    assert len(set(ids)) == 3
    for request_id in ids:
        assert await full.runtime._evict(request_id)
    assert [answer.status_code for answer in await asyncio.gather(*requests)] == [403] * 3
    await until(lambda: full.runtime._claims == {})
