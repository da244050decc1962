"""End users behind one trusted key are fairness units of their own (R15)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from accounts.models import ApiKey
from backends.models import Backend
from scheduler.models import SiteSettings
from tests.gateway.dialect_requests import REQUESTS
from tests.running import RunningRouter, body
from tests.stubs.openai_stub import OpenAIStub, held

pytestmark = pytest.mark.usefixtures("backend")


async def trust(router: RunningRouter) -> None:
    await router.change(lambda: ApiKey.objects.update(may_name_end_user=True))


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"X-OpenWebUI-User-Id": "7", "X-OpenWebUI-User-Email": "eve@x.org"}, "7"),
        ({"X-OpenWebUI-User-Email": "eve@x.org", "X-OpenWebUI-User-Name": "Eve"}, "eve@x.org"),
        ({"X-OpenWebUI-User-Name": "Ev%C3%A9"}, "Evé"),
        ({}, ""),
    ],
)
async def test_open_webuis_headers_name_the_end_user(
    router: RunningRouter, headers: dict[str, str], name: str
) -> None:
    await trust(router)
    await router.client.post("/v1/chat/completions", json=body(), headers=headers)
    record = await router.record()
    assert (record.user, record.end_user) == ("ada", name)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"user": "eve"}),
        ("/v1/chat/completions", {"safety_identifier": "eve", "user": "other"}),
        ("/v1/responses", {"safety_identifier": "eve"}),
        ("/v1/messages", {"metadata": {"user_id": "eve"}}),
    ],
)
async def test_bodies_name_the_end_user_in_their_own_ways(
    router: RunningRouter, path: str, fields: dict[str, Any]
) -> None:
    await trust(router)
    await router.client.post(path, json=REQUESTS.get(path, body()) | fields)
    assert (await router.record()).end_user == "eve"


async def test_a_header_wins_over_the_body(router: RunningRouter) -> None:
    await trust(router)
    headers = {"X-OpenWebUI-User-Id": "header"}
    await router.client.post("/v1/chat/completions", json=body(user="body"), headers=headers)
    assert (await router.record()).end_user == "header"


async def test_an_untrusted_key_names_nobody(router: RunningRouter, stub: OpenAIStub) -> None:
    headers = {"X-OpenWebUI-User-Id": "7"}
    await router.client.post("/v1/chat/completions", json=body(user="eve"), headers=headers)
    assert (await router.record()).end_user == ""
    assert stub.calls[0].body["user"] == "eve"  # passed on like any other field
    assert "x-openwebui-user-id" not in stub.calls[0].headers


async def test_the_headers_names_are_configurable(router: RunningRouter, settings: Any) -> None:
    settings.END_USER_HEADERS = ["X-Who"]
    await trust(router)
    headers = {"X-OpenWebUI-User-Id": "7", "X-Who": "eve"}
    await router.client.post("/v1/chat/completions", json=body(), headers=headers)
    assert (await router.record()).end_user == "eve"


async def test_a_name_of_another_type_is_refused(router: RunningRouter) -> None:
    await trust(router)
    response = await router.chat(user=7)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "user")


# ---- background calls

TASK = {"X-OpenWebUI-User-Id": "eve", "X-OpenWebUI-Task": "title_generation"}


async def weigh_background_calls(router: RunningRouter, weight: float, **settings: float) -> None:
    await router.change(SiteSettings.objects.create, pk=1, background_weight=weight, **settings)


async def test_a_background_call_has_its_part_of_the_weight_and_says_so(
    router: RunningRouter,
) -> None:
    await trust(router)
    await weigh_background_calls(router, 0.25)
    for headers in (TASK, TASK | {"X-OpenWebUI-Task": ""}):
        await router.client.post("/v1/chat/completions", json=body(), headers=headers)
    told = [(r.end_user, r.task, r.user_weight) for r in await router.records()]
    assert told == [("eve", "title_generation", 0.25), ("eve", "", 1.0)]


async def test_background_calls_without_an_end_user_weigh_less_too(router: RunningRouter) -> None:
    await trust(router)
    await weigh_background_calls(router, 0)
    headers = {"X-OpenWebUI-Task": "tags_generation"}
    await router.client.post("/api/chat", json=REQUESTS["/api/chat"], headers=headers)
    record = await router.record()
    assert (record.end_user, record.task, record.user_weight) == ("", "tags_generation", 0.0)


async def test_background_calls_are_like_others_unless_they_are_to_weigh_less(
    router: RunningRouter,
) -> None:
    await trust(router)
    await router.client.post("/v1/chat/completions", json=body(), headers=TASK)
    record = await router.record()
    assert (record.task, record.user_weight) == ("title_generation", 1.0)
    (share,) = router.runtime.scheduler.shares(time.monotonic())
    assert share.unit == (share.user_id, "eve")


async def test_an_untrusted_key_marks_nothing(router: RunningRouter) -> None:
    await weigh_background_calls(router, 0.25)
    await router.client.post("/v1/chat/completions", json=body(), headers=TASK)
    record = await router.record()
    assert (record.task, record.user_weight) == ("", 1.0)


async def test_the_background_headers_name_is_configurable(
    router: RunningRouter, settings: Any
) -> None:
    settings.BACKGROUND_HEADER = "X-What-For"
    await trust(router)
    headers = TASK | {"X-What-For": "x" * 60}
    await router.client.post("/v1/chat/completions", json=body(), headers=headers)
    assert (await router.record()).task == "x" * 40


async def test_chats_and_background_calls_get_exactly_their_shares(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    """One slot, each call counts 10 tokens: of 50 calls of Eve's chats and titles, 40 and 10."""
    await trust(router)
    await weigh_background_calls(router, 0.25, deprioritize_threshold=1, wait_bonus_rate=0)
    await router.change(Backend.objects.update, max_concurrent=1, max_queue=200)
    ended = asyncio.Event()
    stub.then(held(ended))
    first = asyncio.create_task(router.chat())
    await stub.until_calls(1)
    chat = {"X-OpenWebUI-User-Id": "eve"}
    async with asyncio.TaskGroup() as tasks:
        for _ in range(60):
            for what, headers in (("chat", chat), ("title", TASK)):
                request = body(max_tokens=3, metadata={"what": what})
                tasks.create_task(
                    router.client.post("/v1/chat/completions", json=request, headers=headers)
                )
        await router.until_waiting(120, within=60)
        ended.set()
        await first
    served = [call.body["metadata"]["what"] for call in stub.calls[1:51]]
    assert abs(served.count("title") - 10) <= 1


async def test_two_end_users_share_and_the_statistics_tell_them_apart(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    """Eve's backlog of three does not hold up Bob, who came last behind the same key."""
    await trust(router)
    ended = asyncio.Event()
    stub.then(*[held(ended)] * 4)
    running = [asyncio.create_task(router.chat(user="eve")) for _ in range(4)]
    await stub.until_calls(4)
    waiting = [asyncio.create_task(router.chat(user="eve")) for _ in range(3)]
    await router.until_waiting(3)
    waiting.append(asyncio.create_task(router.chat(user="bob")))
    await router.until_waiting(4)
    shares = router.runtime.scheduler.shares(time.monotonic())
    ada = shares[0].user_id
    assert {share.unit: share.queued for share in shares} == {(ada, "eve"): 3, (ada, "bob"): 1}
    queue = router.runtime.scheduler.queue(time.monotonic())
    assert queue[0].unit == (ada, "bob")
    ended.set()
    await asyncio.gather(*running, *waiting)
