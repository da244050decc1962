"""Each cause of a slow request, staged with a stub: its explanation must name that cause."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from playwright.sync_api import Page, expect

from backends.models import BackendStatus
from scheduler import causes
from scheduler.models import Decision
from tests.factories import make_admin
from tests.running import RunningRouter, until
from tests.stubs.openai_stub import Call, OpenAIStub, ordinary

Staged = Callable[[RunningRouter, OpenAIStub], Awaitable[None]]

#: Slow, here: so that a test need not wait for long, and yet for longer than a busy machine takes.
SLOW_SECONDS = 0.1
LATE_SECONDS = 1.2

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _soon_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "SLOW_SECONDS", SLOW_SECONDS)


async def late(call: Call) -> None:
    await asyncio.sleep(LATE_SECONDS)
    await ordinary(call)


async def one_slot(router: RunningRouter, stub: OpenAIStub, *loaded: str) -> None:
    """A backend with one slot, whose last poll said which models are in its memory."""
    backend = await router.backend(stub, "gpu-1", max_concurrent=1)
    await router.ask(
        BackendStatus.objects.update_or_create,
        backend_id=backend,
        defaults={
            "observed_at": timezone.now(),
            "answered_at": timezone.now(),
            "reachable": True,
            "loaded_models": dict.fromkeys(loaded),
        },
    )
    await until(lambda: backend in router.runtime._telemetry, within=60)


async def behind(router: RunningRouter, stub: OpenAIStub, *keys: str) -> None:
    """Fill the slot, let one request of each key wait in turn, and release the slot late."""
    held = asyncio.Event()

    async def hold(call: Call) -> None:
        await held.wait()
        await ordinary(call)

    stub.then(hold)
    tasks = [asyncio.create_task(router.chat(stream=True))]
    await stub.until_calls(1, within=60)
    for number, key in enumerate(keys, start=1):
        tasks.append(asyncio.create_task(router.chat(stream=True, key=key)))
        await router.until_waiting(number, within=60)
    await asyncio.sleep(LATE_SECONDS)
    held.set()
    await asyncio.gather(*tasks)


async def nobody_has_it(router: RunningRouter, stub: OpenAIStub) -> None:
    await one_slot(router, stub, "m")
    await router.chat(model="nobody-has-this")


async def own_backlog(router: RunningRouter, stub: OpenAIStub) -> None:
    await one_slot(router, stub, "m")
    await behind(router, stub, router.key, router.key)


async def others_ahead(router: RunningRouter, stub: OpenAIStub) -> None:
    await one_slot(router, stub, "m")
    await behind(router, stub, await router.user("bob", weight=9), router.key)


async def every_slot_in_use(router: RunningRouter, stub: OpenAIStub) -> None:
    await one_slot(router, stub, "m")
    await behind(router, stub, router.key)


async def cold_load(router: RunningRouter, stub: OpenAIStub) -> None:
    await one_slot(router, stub, "another")
    stub.then(late)
    await router.chat(stream=True)


async def slow_backend(router: RunningRouter, stub: OpenAIStub) -> None:
    await one_slot(router, stub, "m")
    stub.then(late)
    await router.chat(stream=True)


async def long_prompt(router: RunningRouter, stub: OpenAIStub) -> None:
    await one_slot(router, stub, "m")
    stub.prompt_tokens = causes.LONG_PROMPT_TOKENS
    stub.then(late)
    await router.chat(stream=True)


@pytest.mark.parametrize(
    ("stage", "cause", "words"),
    [
        (nobody_has_it, "no_backend", "no backend has the model"),
        (own_backlog, "own_backlog", "earlier requests of the same user came first"),
        (others_ahead, "others_ahead", "others were owed more; 1 request of bob was served ahead"),
        (every_slot_in_use, "all_full", "all backends with m were full"),
        (cold_load, "cold_load", "slow because the model had to be loaded first"),
        (slow_backend, "slow_backend", "slow because the backend was slow"),
        (long_prompt, "long_prompt", "slow because the prompt was long"),
    ],
)
async def test_the_explanation_names_the_cause_that_was_staged(
    router: RunningRouter, stub: OpenAIStub, stage: Staged, cause: str, words: str
) -> None:
    await stage(router, stub)
    *_, last = await router.records()
    client = Client()
    await router.ask(lambda: client.force_login(make_admin("root")))
    told = (await router.ask(client.get, f"/api/admin/decisions/{last.request_id}")).json()
    assert told["slow_because"] == cause
    assert words in told["explanation"]
    own = await router.client.get(f"/v1/requests/{last.request_id}")
    assert own.json()["explanation"] == told["explanation"]
    assert own.json()["slow_because"] == cause
    page = await router.ask(client.get, f"/admin/decisions/{last.request_id}/")
    assert words in page.content.decode()


@pytest.mark.browser
@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")  # whitenoise's files
async def test_a_slow_request_is_found_by_its_id_in_the_browser(
    router: RunningRouter, stub: OpenAIStub, chromium: Any
) -> None:
    await others_ahead(router, stub)
    *_, last = await router.records()
    assert isinstance(last, Decision)

    def sign_in() -> str:
        client = Client()
        client.force_login(make_admin("root"))
        return client.cookies["sessionid"].value

    session = await router.ask(sign_in)
    tab = await asyncio.to_thread(lambda: chromium.open(base_url=router.url))

    def find(page: Page) -> None:
        page.context.add_cookies([{"name": "sessionid", "value": session, "url": router.url}])
        page.goto("/admin/scheduler/decision/")
        page.locator("input[name=q]").first.fill(last.request_id)
        page.locator("input[name=q]").first.press("Enter")
        page.locator("#result_list tbody a").first.click()
        expect(page.get_by_text("because others were owed more")).to_be_visible()
        expect(page.get_by_text("1 request of bob was served ahead").first).to_be_visible()

    try:
        await asyncio.to_thread(tab, find)
    finally:
        await asyncio.to_thread(tab.close)
