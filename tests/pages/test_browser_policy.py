"""The policy on scripts: every page works under it, and what it is for does not."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.test import Client
from playwright.sync_api import Page, expect

from accounts.models import User
from backends.models import Alias, Backend, Node
from scheduler.models import Decision
from tests.factories import make_admin, make_api_key, make_backend, make_boost, make_decision

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

PAGES = [
    *("/admin/", "/admin/groups/", "/admin/queue/", "/admin/what-if/", "/admin/history/"),
    *("/admin/reports/", "/admin/advice/", "/admin/decisions/", "/admin/decisions/req-1/"),
    *("/account/", "/account/keys/", "/account/requests/", "/account/clients/"),
    *("/account/password/", "/admin/password_change/", "/admin/accounts/user/import/"),
    *("/api/admin/docs/", "/admin/nothing-is-here/"),
]
#: Written down as they happen, before any script of the page runs.
LISTEN = """document.addEventListener('securitypolicyviolation', event => {
  console.error('violation', event.effectiveDirective, event.blockedURI, event.sourceFile);
});"""


@pytest.fixture
def root() -> User:
    root = make_admin("root", password="a-long-enough-password")
    make_api_key(root)
    make_boost(user=root)
    make_backend("gpu-1", models=("m",))
    Node.objects.create(name="node-1")
    Alias.objects.create(name="chat", targets=["m"])
    make_decision("req-1", user="root", user_id=root.pk)
    return root


def every_page() -> list[str]:
    """Also each model's list, its form for a new row, and that of a row that there is."""
    decision = Decision.objects.get()
    found = [*PAGES, f"/admin/scheduler/decision/{decision.pk}/delete/"]
    for model in admin.site._registry:
        base = f"/admin/{model._meta.app_label}/{model._meta.model_name}/"
        found.append(base)
        row = model._default_manager.first()
        if row is not None:
            found.append(f"{base}{row.pk}/change/")
        found.append(f"{base}add/")
    return found


def test_no_page_does_what_the_policy_forbids(
    root: User, client: Client, open_tab: Any, live_server: Any
) -> None:
    client.force_login(root)
    cookie = {"name": "sessionid", "value": client.cookies["sessionid"].value}
    tab, pages = open_tab(), every_page()

    def look(page: Page) -> list[str]:
        found: list[str] = []
        page.context.add_init_script(LISTEN)
        page.on("console", lambda m: found.append(f"{page.url}: {m.text}") if is_bad(m) else None)
        page.on("pageerror", lambda error: found.append(f"{page.url}: {error}"))
        for address in ("/admin/login/", "/account/login/"):
            page.goto(address)
        page.context.add_cookies([{**cookie, "url": live_server.url}])
        for address in pages:
            page.goto(address)
            if page.locator("body[x-data]").count():  # the theme's library runs
                assert page.evaluate("() => Alpine.evaluate(document.body, '1 + 1')") == 2
        return found

    def is_bad(message: Any) -> bool:
        return "violation" in message.text or "Content Security Policy" in message.text

    assert tab(look) == []
    assert Backend.objects.count() == 1


def test_a_script_that_somebody_smuggles_into_a_page_does_not_run(
    root: User, client: Client, open_tab: Any, live_server: Any
) -> None:
    tab = open_tab()

    def look(page: Page) -> None:
        page.goto("/account/login/")
        page.evaluate("""() => {
          for (const text of ['window.inline = 1', '']) {
            const script = document.createElement('script');
            if (text) script.textContent = text; else script.src = 'https://elsewhere.example/x.js';
            document.body.append(script);
          }
          const image = '<img src=x onerror="window.attribute = 1">';
          document.body.insertAdjacentHTML('beforeend', image);
        }""")
        expect(page.locator("img[src=x]")).to_have_count(1)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("() => [window.inline, window.attribute]") == [None, None]

    tab(look)


def test_only_the_themes_pages_may_compile_scripts(client: Client, root: User) -> None:
    def scripts(address: str) -> str:
        policy = client.get(address)["Content-Security-Policy"]
        [found] = [part for part in policy.split("; ") if part.startswith("script-src")]
        return found

    assert scripts("/api/admin/docs/") == scripts("/nothing") == "script-src 'self'"
    for address in ("/admin/login/", "/account/login/"):
        assert scripts(address) == "script-src 'self' 'unsafe-eval'"
    policy = client.get("/admin/login/")["Content-Security-Policy"]
    for directive in ("default-src 'self'", "object-src 'none'", "base-uri 'none'"):
        assert directive in policy
    assert "frame-ancestors 'none'" in policy
