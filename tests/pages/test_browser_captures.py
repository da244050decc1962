"""Captured prompts in a real browser: the marks, the switch, reading and deleting."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from playwright.sync_api import Page, expect

from accounts.models import ApiKey
from scheduler.models import Capture
from tests.factories import make_admin, make_api_key, make_capture, make_decision, make_user
from tests.pages.test_browser_pages import OVERFLOW, UNNAMED

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

LONG = b'{"messages": [{"role": "user", "content": "' + b"long-word" * 300 + b'"}]}'
OWN = ["/account/", "/account/keys/", "/account/requests/", "/account/requests/req-1/"]
ADMIN = [
    "/admin/scheduler/decision/",
    "/admin/decisions/req-1/",
    "/admin/decisions/req-1/prompt/",
    "/admin/scheduler/capture/",
    "/admin/accounts/apikey/",
]


@pytest.fixture
def key() -> ApiKey:
    ada = make_user("ada")
    make_api_key(ada, name="laptop")
    key = ApiKey.objects.get()
    key.capture_until = timezone.now() + timedelta(days=2)
    key.capture_reason, key.capture_days = "answers in forms are cut: ticket 4711", 7
    key.save()
    make_decision(
        "req-1",
        user="ada",
        user_id=ada.pk,
        key_id=key.pk,
        model_requested="m",
        arrived_at=timezone.now(),
    )
    answer = b'data: {"choices": [{"delta": {"content": "Hello"}}]}\n\n' * 5
    make_capture(
        key,
        "req-1",
        request=LONG,
        request_bytes=4_000_000,
        answer=answer,
        answer_bytes=len(answer),
    )
    return key


@pytest.fixture
def open_as(key: ApiKey, client: Any, open_tab: Any, live_server: Any) -> Any:
    def open_one(user: Any, **options: Any) -> Any:
        client.force_login(user, "accounts.authentication.RoleBackend")
        cookie = {"name": "sessionid", "value": client.cookies["sessionid"].value}
        tab = open_tab(**options)
        tab(lambda page: page.context.add_cookies([{**cookie, "url": live_server.url}]))
        return tab

    return open_one


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_every_page_with_a_mark_fits_and_has_nothing_that_axe_complains_of(
    open_as, key, axe, scheme, width
):
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
    root = make_admin("root")
    for user, addresses in ((key.user, OWN), (root, ADMIN)):

        def look(page: Page, addresses: list[str] = addresses) -> None:
            for address in addresses:
                page.goto(address)
                assert page.evaluate(OVERFLOW) <= 0, address
                if not address.startswith(("/admin/accounts/", "/admin/scheduler/")):
                    assert page.evaluate(UNNAMED) == [], address
                    assert axe(page) == []

        open_as(user, **options)(look)


def test_an_admin_reads_a_prompt_stops_capturing_and_deletes_what_there_is(open_as, key):
    def walk(page: Page) -> None:
        page.goto("/admin/decisions/req-1/")
        page.get_by_role("link", name="Read them").click()
        expect(page.get_by_role("region", name="Request", exact=True)).to_contain_text(
            "long-wordlong-word"
        )
        page.get_by_role("link", name="All that was captured of this key").click()
        expect(page.locator("#result_list")).to_contain_text("laptop")
        page.goto(f"/admin/accounts/apikey/{key.pk}/change/")
        page.get_by_role("button", name="Stop capturing").click()
        expect(page.get_by_text("1 keys are not captured any more.")).to_be_visible()
        page.get_by_label("for good").check()
        page.get_by_role("button", name="Delete all captured prompts").click()
        expect(page.get_by_text("1 captured prompts were deleted.")).to_be_visible()
        page.goto("/admin/history/?kind=key")
        expect(page.get_by_text("captured prompt of req-1 read")).to_be_visible()
        expect(page.get_by_text("all captured prompts deleted: 1")).to_be_visible()

    open_as(make_admin("root"))(walk)
    key.refresh_from_db()
    assert not key.is_captured
    assert Capture.objects.count() == 0
