"""End users behind one trusted key are fairness units of their own (R15)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from accounts.models import ApiKey
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
