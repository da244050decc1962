"""What the owner of a key can ask about the own requests, and nobody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from accounts.models import Group
from tests.running import RunningRouter
from tests.stubs.openai_stub import OpenAIStub, held


async def get(router: RunningRouter, path: str, key: str = "") -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return (await router.client.get(path, headers=headers)).json()


async def test_a_waiting_and_a_running_request_are_told_to_their_owner(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, "a", max_concurrent=1)
    eve = await router.user("eve")
    ended = asyncio.Event()
    stub.then(held(ended))
    running = asyncio.create_task(router.chat())
    await stub.until_calls(1)
    others = asyncio.create_task(router.chat(key=eve))
    await router.until_waiting(1)
    mine = asyncio.create_task(router.chat())
    await router.until_waiting(2)

    queue = await get(router, "/v1/queue/me")
    (one,) = queue["running"]
    assert (one["state"], one["model"], one["backend"]) == ("running", "m", "a")
    (two,) = queue["waiting"]
    assert (two["position"], two["ahead_by_group"]) == (2, {"eve": 1})
    assert await get(router, f"/v1/requests/{one['request_id']}") == one
    alone = await get(router, f"/v1/requests/{two['request_id']}")
    assert (alone["state"], alone["position"]) == ("waiting", 2)
    assert alone["waited_seconds"] > 0

    assert (await get(router, "/v1/queue/me", eve))["running"] == []
    for request_id in (one["request_id"], two["request_id"]):
        refused = await get(router, f"/v1/requests/{request_id}", eve)
        assert refused["error"]["code"] == "not_found"
    ended.set()
    await asyncio.gather(running, others, mine)


@pytest.mark.usefixtures("backend")
async def test_an_ended_request_is_explained_to_its_owner(router: RunningRouter) -> None:
    request_id = (await router.chat()).headers["x-request-id"]
    path = f"/v1/requests/{request_id}"
    assert (await router.client.get(path)).headers["retry-after"] == "3"  # not stored yet
    await router.records()
    told = await get(router, path)
    assert (told["state"], told["outcome"], told["completion_tokens"]) == ("ended", "completed", 3)
    assert "a" in told["explanation"]
    eve = await router.user("eve")
    assert (await get(router, path, eve))["error"]["code"] == "not_found"


async def test_a_key_is_needed(router: RunningRouter) -> None:
    for path in ("/v1/queue/me", "/v1/usage/me", "/v1/requests/x"):
        response = await router.client.get(path, headers={"Authorization": "Bearer x"})
        assert response.status_code == 401
        assert (await router.client.post(path)).status_code == 405


@pytest.mark.usefixtures("backend")
async def test_usage_is_what_was_charged_in_the_period(router: RunningRouter) -> None:
    await router.chat()
    await router.records()
    told = await get(router, "/v1/usage/me")
    assert (told["token_budget"], told["used"], told["remaining"]) == (None, 10, None)
    await router.change(lambda: Group.objects.update(token_budget=12, budget_period="month"))
    told = await get(router, "/v1/usage/me")
    assert (told["token_budget"], told["reserved"], told["remaining"]) == (12, 0, 2)
    assert told["resets_at"][8:10] == "01"


@pytest.mark.parametrize("wanted", ["%00", "a%00b"])
async def test_a_number_with_a_nul_is_nobodys(
    router: RunningRouter, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindrouter.gateway.mine._ended", None)  # PostgreSQL would refuse to look
    assert (await router.client.get(f"/v1/requests/{wanted}")).status_code == 404
