"""The whole product in one picture: three groups keep a site busy over HTTP, an administrator
edits a weight in a real browser, and the shares follow."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, async_playwright

from tests.e2e.site import Site, running_site
from tests.pages.conftest import CHROMIUM, FLAGS
from tests.stubs.openai_stub import Call, OpenAIStub, ordinary

PASSWORD = "opensesame12"
GROUPS = ("faculty", "staff", "student")
KEYS = {group: f"mr-{number:064x}" for number, group in enumerate(GROUPS, 1)}
SLOTS = 4
#: The slots are what is scarce, on a busy machine too: else requests would wait in this process or
#: on their way, and nobody's share would be up to the scheduler.
SECONDS = 0.15  # for which each request has its slot
IN_FLIGHT = 24  # of each user: six times what there are slots

pytestmark = [
    pytest.mark.browser,
    pytest.mark.alone,
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"no Chromium at {CHROMIUM}"),
    pytest.mark.timeout(240),
]


def configuration(stub: OpenAIStub) -> str:
    return json.dumps(
        {
            "users": [{"username": f"u-{group}", "group": group} for group in GROUPS],
            "api_keys": [
                {"user": f"u-{group}", "name": "load", "key": KEYS[group]} for group in GROUPS
            ],
            "backends": [
                {
                    "name": "stub",
                    "base_url": stub.url,
                    "max_concurrent": SLOTS,
                    "max_queue": 1000,
                    "models": [{"name": "m"}],
                }
            ],
        }
    )


class Load:
    """Keeps every group's user backlogged and counts the tokens that the stub served to each."""

    def __init__(self, url: str) -> None:
        self.tokens: Counter[str] = Counter()
        self._url = url
        self._tasks: list[asyncio.Task[None]] = []

    async def behaviour(self, call: Call) -> None:
        await asyncio.sleep(SECONDS)
        await ordinary(call)
        self.tokens[call.body["messages"][0]["content"]] += 10  # 7 of the prompt, 3 of the answer

    def start(self) -> None:
        limits = httpx.Limits(max_connections=None)
        client = httpx.AsyncClient(base_url=self._url, timeout=60, limits=limits, trust_env=False)
        self._tasks = [
            asyncio.create_task(self._ask(client, group))
            for group in GROUPS
            for _ in range(IN_FLIGHT)
        ]

    async def _ask(self, client: httpx.AsyncClient, group: str) -> None:
        body = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": group}]}
        headers = {"Authorization": f"Bearer {KEYS[group]}"}
        while True:
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text

    async def until_served(self) -> None:
        """Wait until the gateway knows the keys. (Too many wrong ones would be refused as such.)"""
        async with httpx.AsyncClient(base_url=self._url, timeout=60, trust_env=False) as client:
            for key in KEYS.values():
                headers = {"Authorization": f"Bearer {key}"}
                async with asyncio.timeout(60):
                    while not (await client.get("/v1/models", headers=headers)).is_success:  # noqa: ASYNC110
                        await asyncio.sleep(3)

    async def shares_over(self, tokens: int) -> dict[str, float]:
        """Percentages of the next so many tokens."""
        before = Counter(self.tokens)
        while (total := sum(self.tokens.values()) - sum(before.values())) < tokens:
            await asyncio.sleep(0.05)
            for task in self._tasks:
                if task.done():
                    task.result()
        return {g: 100 * (self.tokens[g] - before[g]) / total for g in GROUPS}

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def sign_in(page: Page, site: Site) -> None:
    await page.goto(f"{site.url}/admin/groups/")
    await page.fill("input[name=username]", "admin")
    await page.fill("input[name=password]", PASSWORD)
    await page.press("input[name=password]", "Enter")
    await page.wait_for_url(re.compile(r"/admin/groups/"))


async def save_weight(page: Page, group: str, weight: str) -> None:
    row = page.locator("tr", has_text=group)
    await row.locator("input[name$=scheduler_weight]").fill(weight)
    await row.locator("input[name$=scheduler_weight]").press("Enter")
    await page.wait_for_load_state()


async def test_shares_follow_a_weight_edited_in_the_browser(tmp_path: Path) -> None:
    stub = await OpenAIStub.start()
    site_runs = running_site(tmp_path / "data", DEMO="0", MINDROUTER_ADMIN_PASSWORD=PASSWORD)
    async with stub, async_playwright() as playwright:
        site = await asyncio.to_thread(site_runs.__enter__)
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        load = Load(site.url)
        stub.behaviour = load.behaviour
        try:
            file = tmp_path / "site.yaml"
            file.write_text(configuration(stub))
            await asyncio.to_thread(site.manage, "apply", str(file))
            page = await browser.new_page()
            await sign_in(page, site)
            await load.until_served()
            load.start()
            await load.shares_over(500)
            assert await load.shares_over(3000) == pytest.approx(
                {"faculty": 50, "staff": 100 / 3, "student": 100 / 6}, abs=2
            )

            await save_weight(page, "student", "5")
            edited = time.monotonic()
            while (await load.shares_over(200))["student"] < 40:
                assert time.monotonic() - edited < 5
            assert await load.shares_over(3000) == pytest.approx(
                {"faculty": 30, "staff": 20, "student": 50}, abs=2
            )
        finally:
            await load.stop()
            await browser.close()
            await asyncio.to_thread(site_runs.__exit__, None, None, None)
