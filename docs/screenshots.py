"""Take pictures of the pages of a running server: light and dark, wide and narrow.

    MINDROUTER_ADMIN_PASSWORD=… python docs/screenshots.py OUTDIR [http://127.0.0.1:8000] [--best]

With ``--best`` only those that the documents show, as a wide screen does, light; they are best
taken while ``make demo-load`` runs. Signs in as ``admin``. Needs Playwright and Chromium
(``CHROMIUM``, default /usr/bin/chromium).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

PAGES = {
    "overview": "/admin/",
    "groups": "/admin/groups/",
    "queue": "/admin/queue/",
    "what-if": "/admin/what-if/",
    "reports": "/admin/reports/",
    "limits": "/admin/limits/",
    "advice": "/admin/advice/",
    "history": "/admin/history/",
    "decisions": "/admin/scheduler/decision/",
    "backends": "/admin/backends/backend/",
    "users": "/admin/accounts/user/",
    "keys": "/admin/accounts/apikey/",
    "boosts": "/admin/accounts/boost/",
    "model-limits": "/admin/accounts/modellimits/",
    "prices": "/admin/scheduler/modelprice/",
    "settings": "/admin/scheduler/sitesettings/",
    "account": "/account/",
    "account-keys": "/account/keys/",
    "account-requests": "/account/requests/",
    "account-clients": "/account/clients/",
}
#: Pages behind the first link of a list.
DETAILS = {
    "decision": ("/admin/scheduler/decision/", "#result_list tbody a"),
    "group": ("/admin/accounts/group/", "#result_list tbody a"),
    "user": ("/admin/accounts/user/", "#result_list tbody a"),
    "backend": ("/admin/backends/backend/", "#result_list tbody a"),
}
WIDTHS = {"wide": 1280, "narrow": 400}
#: What the documents show.
BEST = ("overview", "groups", "queue", "decision")


def main(folder: Path, server: str, *, best: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        if best:
            take_best(browser, server, folder)
        else:
            for scheme in ("light", "dark"):
                for size, width in WIDTHS.items():
                    take_all(browser, server, folder, f"{scheme}-{size}", scheme, width)
        browser.close()


def take_best(browser: Browser, server: str, folder: Path) -> None:
    context = browser.new_context(base_url=server, viewport={"width": 1280, "height": 860})
    page = context.new_page()
    sign_in(page)
    for name in BEST:
        if name in DETAILS:
            open_first(page, *DETAILS[name])
        else:
            page.goto(PAGES[name])
        page.wait_for_timeout(2500)  # the live figures' second round
        page.screenshot(path=folder / f"{name}.png")
    context.close()


def take_all(
    browser: Browser, server: str, folder: Path, suffix: str, scheme: str, width: int
) -> None:
    """All pages in one colour scheme and width, as ``NAME-SUFFIX.png``."""
    context = browser.new_context(
        base_url=server,
        color_scheme="dark" if scheme == "dark" else "light",
        viewport={"width": width, "height": 800},
    )
    page = context.new_page()
    page.goto("/admin/login/")
    save(page, folder / f"login-{suffix}.png")
    sign_in(page)
    for name, address in PAGES.items():
        page.goto(address)
        save(page, folder / f"{name}-{suffix}.png")
    for name, (address, link) in DETAILS.items():
        if open_first(page, address, link):
            save(page, folder / f"{name}-{suffix}.png")
    context.close()


def sign_in(page: Page) -> None:
    page.goto("/admin/login/")
    page.fill("input[name=username]", "admin")
    page.fill("input[name=password]", os.environ["MINDROUTER_ADMIN_PASSWORD"])
    page.press("input[name=password]", "Enter")
    page.wait_for_url("**/admin/")


def open_first(page: Page, address: str, link: str) -> bool:
    """Follow the first link of a list; whether there was one."""
    page.goto(address)
    first = page.locator(link).first
    if not first.count():
        return False
    first.click()
    page.wait_for_load_state()
    return True


def save(page: Page, path: Path) -> None:
    page.wait_for_load_state("load")
    page.screenshot(path=path, full_page=True)
    print(path)


if __name__ == "__main__":
    folder, *rest = [argument for argument in sys.argv[1:] if argument != "--best"]
    main(Path(folder), rest[0] if rest else "http://127.0.0.1:8000", best="--best" in sys.argv)
