"""A browser for the tests of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Playwright, expect, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]

_T = TypeVar("_T")

# On a busy machine a page may take longer than the usual 5 s to show what it is to show.
expect.set_options(timeout=30_000)


class Chromium:
    """A browser that lives in a thread of its own.

    Playwright keeps an event loop running in its thread, where Django refuses to use the
    database. So the steps in the browser are given as functions of a page, and what is in the
    database is looked at between them.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="browser")
        self._playwright: Playwright = self._run(lambda: sync_playwright().start())
        self._browser: Browser = self._run(
            lambda: self._playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        )

    def open(self, **options: Any) -> Tab:
        """A fresh page with cookies of its own; ``options`` as for ``Browser.new_context``."""
        return Tab(self, self._run(lambda: self._browser.new_context(**options).new_page()))

    def run(self, step: Callable[[], _T]) -> _T:
        return self._run(step)

    def close(self) -> None:
        self._run(self._browser.close)
        self._run(self._playwright.stop)
        self._thread.shutdown()

    def _run(self, step: Callable[[], _T]) -> _T:
        return self._thread.submit(step).result()


class Tab:
    """One page; call it with what is to be done there."""

    def __init__(self, chromium: Chromium, page: Page) -> None:
        self._chromium = chromium
        self._page = page

    def __call__(self, step: Callable[[Page], _T]) -> _T:
        return self._chromium.run(lambda: step(self._page))

    def close(self) -> None:
        self._chromium.run(self._page.context.close)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    if not CHROMIUM.exists():
        pytest.skip(f"needs Chromium at {CHROMIUM} (apt-get install chromium)")
    browser = Chromium()
    yield browser
    browser.close()


@pytest.fixture
def open_tab(chromium: Chromium, live_server: Any) -> Iterator[Callable[..., Tab]]:
    """Opens pages of the live server; each is closed at the end of the test."""
    tabs: list[Tab] = []

    def open_one(**options: Any) -> Tab:
        tabs.append(chromium.open(base_url=live_server.url, **options))
        return tabs[-1]

    yield open_one
    for tab in tabs:
        tab.close()


@pytest.fixture(scope="session")
def axe() -> Callable[[Page], list[str]]:
    """What axe-core finds wrong with the page that is open, one line for each element."""
    rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
    checker = Axe()

    def complaints(page: Page) -> list[str]:
        found = checker.run(page, options=rules).response["violations"]
        return [
            f"{page.url}: {one['id']}: {node['target']}: {node['failureSummary']}"
            for one in found
            for node in one["nodes"]
        ]

    return complaints
