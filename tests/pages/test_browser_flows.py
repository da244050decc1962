"""Whole ways through the pages in a real browser, over the running router."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from playwright.sync_api import Page, expect

from accounts.models import Boost, Group
from backends.models import Backend
from scheduler import tasks
from scheduler.models import WhatIf
from scheduler.pages import what_if as what_if_page
from tests.backends.test_telemetry_in_decisions import telling
from tests.factories import make_admin, make_boost
from tests.running import RunningRouter, until
from tests.stubs.openai_stub import Call, OpenAIStub, ordinary

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume"),  # whitenoise's files
]
MINUTE = 60_000  # ms

Visit = Callable[[Callable[[Page], Any]], Any]


@pytest.fixture
async def visit(router: RunningRouter, chromium: Any) -> AsyncIterator[Visit]:
    """Does something on a page of the router, signed in as a superuser."""

    def sign_in() -> str:
        client = Client()
        client.force_login(make_admin("root"))
        return client.cookies["sessionid"].value

    session = await router.ask(sign_in)
    tab = await asyncio.to_thread(lambda: chromium.open(base_url=router.url))
    cookie = {"name": "sessionid", "value": session, "url": router.url}
    await asyncio.to_thread(tab, lambda page: page.context.add_cookies([cookie]))
    yield lambda step: asyncio.to_thread(tab, step)
    await asyncio.to_thread(tab.close)


@pytest.fixture
async def held(stub: OpenAIStub) -> AsyncIterator[asyncio.Event]:
    """Until it is set the stub answers nothing."""
    event = asyncio.Event()

    async def hold(call: Call) -> None:
        await event.wait()
        await ordinary(call)

    stub.behaviour = hold
    yield event
    event.set()


async def test_a_weight_is_edited_tried_saved_and_the_live_shares_move(
    router: RunningRouter, stub: OpenAIStub, held: asyncio.Event, visit: Visit, monkeypatch: Any
) -> None:
    monkeypatch.setattr(what_if_page.replay, "delay", tasks.replay)  # no worker runs here
    await router.backend(stub, "gpu-1", max_concurrent=1)
    bob = await router.user("bob", weight=1)
    stub.then(*[ordinary] * 6)
    for _ in range(3):
        assert (await router.chat()).status_code == 200
        assert (await router.chat(key=bob)).status_code == 200
    assert len(await router.records()) == 6
    waiting = [asyncio.create_task(router.chat(key=key)) for key in (router.key, bob) * 2]
    await router.until_waiting(3, within=60)

    def try_and_save(page: Page) -> None:
        page.goto("/admin/groups/")
        group = page.get_by_label("Weight of bob").get_attribute("name")
        number = re.search(r"\d+", group or "")
        assert number is not None
        share = page.locator(f"#now-{number[0]}")
        expect(share).to_have_text("50\xa0%", timeout=MINUTE)
        page.get_by_label("Weight of bob").fill("3")
        page.get_by_role("button", name="Try before saving").click()
        page.wait_for_url("**/admin/what-if/?**", timeout=MINUTE)
        assert page.get_by_label("bob", exact=True).first.input_value() == "3"
        page.get_by_label("Name").fill("more for bob")
        page.get_by_role("button", name="Replay").click()
        page.wait_for_url(re.compile(r"/admin/what-if/\d+/"), timeout=MINUTE)
        expect(page.get_by_text("Replayed with nothing changed")).to_be_visible(timeout=MINUTE)
        page.get_by_role("button", name="Save these weights").click()
        expect(page.get_by_text("Saved: bob → 3.")).to_be_visible(timeout=MINUTE)
        page.goto("/admin/groups/")
        expect(share).to_have_text("75\xa0%", timeout=MINUTE)
        page.goto("/admin/history/")
        expect(page.get_by_role("link", name="more for bob")).to_be_visible(timeout=MINUTE)

    await visit(try_and_save)
    row = await router.ask(WhatIf.objects.get)
    assert (row.result["requests"], row.saved_at is not None) == (6, True)
    assert (await router.ask(Group.objects.get, name="bob")).scheduler_weight == 3
    held.set()
    assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}


async def test_a_queued_request_is_removed_and_its_client_is_told(
    router: RunningRouter, stub: OpenAIStub, held: asyncio.Event, visit: Visit
) -> None:
    await router.backend(stub, "gpu-1", max_concurrent=1)
    running = asyncio.create_task(router.chat())
    await stub.until_calls(1, within=60)
    waiting = asyncio.create_task(router.chat(stream=True))
    await router.until_waiting(1, within=60)

    def remove(page: Page) -> None:
        page.goto("/admin/queue/")
        page.get_by_role("button", name="Remove").first.click()
        expect(page.get_by_text("Nothing waits").first).to_be_visible(timeout=MINUTE)

    await visit(remove)
    refused = await waiting
    assert refused.status_code == 403
    assert "administrator" in refused.json()["error"]["message"]
    held.set()
    assert (await running).status_code == 200
    assert [one.reason for one in await router.records()] == ["", "permission_denied"]


async def test_a_backend_is_drained_under_load_and_disables_itself(
    router: RunningRouter, stub: OpenAIStub, held: asyncio.Event, visit: Visit
) -> None:
    drained = await router.backend(stub, "gpu-1", max_concurrent=2)
    running = [asyncio.create_task(router.chat()) for _ in range(2)]
    await stub.until_calls(2, within=60)
    address = f"/admin/backends/backend/{drained}/change/"

    def drain(page: Page) -> None:
        page.goto(address)
        page.get_by_role("button", name="Drain", exact=True).click()
        expect(page.get_by_text("Drain: gpu-1.")).to_be_visible(timeout=MINUTE)

    def is_disabled(page: Page) -> None:
        page.goto("/admin/")
        expect(page.get_by_label("Table of backends")).to_contain_text("disabled", timeout=MINUTE)

    await visit(drain)
    await router.backend(stub, "gpu-2")
    newcomer = asyncio.create_task(router.chat())
    await stub.until_calls(3, within=60)
    held.set()
    answers = await asyncio.gather(newcomer, *running)
    assert [one.status_code for one in answers] == [200] * 3
    assert [one.headers["x-mindrouter-backend"] for one in answers] == ["gpu-2", "gpu-1", "gpu-1"]
    await visit(is_disabled)
    assert not (await router.ask(Backend.objects.get, pk=drained)).enabled


async def test_a_decision_says_that_a_model_did_not_fit_into_a_nodes_memory(
    router: RunningRouter, stub: OpenAIStub, visit: Visit
) -> None:
    small, large = [await router.backend(stub, name) for name in ("small", "large")]
    await telling(router, small, 8192.0)
    await telling(router, large, 32768.0)
    assert (await router.chat()).headers["x-mindrouter-backend"] == "large"
    record = await router.record()

    def read(page: Page) -> None:
        page.goto(f"/admin/decisions/{record.request_id}/")
        expect(page.get_by_text("needs 16384 MiB, 8192 MiB are free").first).to_be_visible(
            timeout=MINUTE
        )

    await visit(read)


async def test_a_boost_ends_by_itself_and_the_open_page_shows_it(
    router: RunningRouter, visit: Visit
) -> None:
    await router.user("bob", weight=3)
    bob = await router.ask(Group.objects.get, name="bob")
    boost = await router.ask(make_boost, group=bob, starts_at=timezone.now() - timedelta(minutes=1))
    await router.reload()
    note = f"#boost-{bob.pk}"

    def is_boosted(page: Page) -> None:
        page.goto("/admin/groups/")
        expect(page.locator(note)).to_contain_text("in force: 6", timeout=MINUTE)

    def is_over(page: Page) -> None:
        expect(page.locator(note)).not_to_contain_text("in force", timeout=MINUTE)

    def ends_now() -> None:
        Boost.objects.filter(pk=boost.pk).update(ends_at=timezone.now() + timedelta(seconds=1))

    await visit(is_boosted)
    await router.change(ends_now)
    await visit(is_over)  # nobody has loaded it anew

    def weights() -> dict[str, float]:
        users = router.runtime.snapshot.users.values()
        return {user.group_name: user.weight for user in users}

    # The page reads the clock itself, the scheduler each second.
    await until(lambda: weights()["bob"] == 3)
