"""The account's pages, boosts and advice in a real browser, some against the running router."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from playwright.sync_api import Page, expect

from accounts.models import ApiKey, Boost, Group, User
from tests.factories import (
    make_admin,
    make_api_key,
    make_backend,
    make_boost,
    make_decision,
    make_group,
    make_user,
)
from tests.pages.conftest import Chromium, Tab
from tests.pages.test_browser_pages import OVERFLOW, UNNAMED
from tests.running import RunningRouter, until

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

PASSWORD = "a-long-enough-password"
OWN = [
    "/account/",
    "/account/keys/",
    "/account/requests/",
    "/account/requests/req-1/",
    "/account/clients/",
    "/account/password/",
]
ADMIN = ["/admin/advice/", "/admin/groups/", "/admin/accounts/boost/"]


@pytest.fixture
def people() -> dict[str, User]:
    Group.objects.all().delete()
    physics = make_group("physics", scheduler_weight=3, max_concurrent=4, token_budget=100_000)
    make_group("unused", scheduler_weight=1)
    ada = make_user("ada", password=PASSWORD, group=physics)
    make_api_key(ada, name="laptop", expires_at=timezone.now() + timedelta(days=3))
    make_api_key(ada, name="old", enabled=False)
    make_backend("gpu-1", models=("llama3:70b-instruct-with-a-very-long-name-that-goes-on",))
    make_boost(name="class project", group=physics, reason="until the deadline")
    at = timezone.now() - timedelta(minutes=5)
    make_decision(
        "req-1",
        user="ada",
        user_id=ada.pk,
        model_requested="llama3:70b-instruct-with-a-very-long-name-that-goes-on",
        arrived_at=at,
        queued_at=at,
        dispatched_at=at + timedelta(seconds=12),
        ended_at=at + timedelta(seconds=20),
        selected_backend="gpu-1",
        wait_reason="others_ahead",
        served_ahead={"staff": [4, 900.0]},
    )
    return {"ada": ada, "root": make_admin("root", password=PASSWORD)}


@pytest.fixture
def open_as(people, client, open_tab, live_server) -> Callable[..., Tab]:
    def open_one(name: str, **options: Any) -> Tab:
        client.force_login(people[name], "accounts.authentication.RoleBackend")
        cookie = {"name": "sessionid", "value": client.cookies["sessionid"].value}
        tab: Tab = open_tab(**options)
        tab(lambda page: page.context.add_cookies([{**cookie, "url": live_server.url}]))
        return tab

    return open_one


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize(("name", "addresses"), [("ada", OWN), ("root", ADMIN)])
def test_every_page_fits_names_its_inputs_and_has_nothing_that_axe_complains_of(
    open_as, axe, name, addresses, scheme, width
):
    tab = open_as(name, color_scheme=scheme, viewport={"width": width, "height": 800})

    def look(page: Page) -> None:
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        for address in addresses:
            page.goto(address)
            assert page.evaluate(OVERFLOW) <= 0, address
            if not address.startswith("/admin/accounts/"):
                assert page.evaluate(UNNAMED) == [], address
                assert axe(page) == []
        assert errors == []

    tab(look)


def test_everything_works_without_scripts(people, open_tab):
    def walk(page: Page) -> None:
        page.goto("/account/keys/")
        page.get_by_label("Username").fill("ada")
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Log in").click()
        page.get_by_label("Name").fill("desktop")
        page.get_by_role("button", name="Make key").click()
        expect(page.get_by_label("Key desktop")).to_have_value(re_key())
        page.goto("/account/keys/")
        page.get_by_role("button", name="Revoke the key desktop").click()
        expect(page.get_by_text("The key desktop was revoked.")).to_be_visible()
        page.goto("/account/")
        page.get_by_role("link", name="My requests, each explained").click()
        expect(page.get_by_text("4 requests of staff were served ahead")).to_be_visible()
        page.get_by_role("button", name="Log out").click()
        page.wait_for_url("**/account/login/")

    open_tab(java_script_enabled=False)(walk)
    assert ApiKey.objects.get(name="desktop").enabled is False


def re_key() -> Any:

    return re.compile(r"^mr-[0-9a-f]{64}$")


def test_a_user_who_tries_others_pages_sees_nothing_of_them(people, open_as):
    bob = make_user("bob")
    make_api_key(bob, name="bobs-key")
    make_decision("req-bob", user="bob", user_id=bob.pk)
    key = ApiKey.objects.get(name="bobs-key")

    def wander(page: Page) -> None:
        for address in ("/admin/", "/admin/groups/", f"/admin/accounts/apikey/{key.pk}/change/"):
            page.goto(address)
            assert "/admin/login/" in page.url
        for address in ("/account/requests/req-bob/", f"/account/keys/{key.pk}/revoke/"):
            assert page.request.get(address).status in (404, 405), address
        for address in OWN:
            page.goto(address)
            assert "bob" not in page.content()
        forged = page.evaluate(
            """async (address) => {
              const body = new FormData();
              body.append("csrfmiddlewaretoken",
                document.querySelector("[name=csrfmiddlewaretoken]").value);
              return (await fetch(address, {method: "POST", body})).status;
            }""",
            f"/account/keys/{key.pk}/revoke/",
        )
        assert forged == 404

    open_as("ada")(wander)
    key.refresh_from_db()
    assert key.enabled


def test_times_are_in_the_browsers_zone_after_the_first_page(open_as):
    def look(page: Page) -> None:
        page.goto("/account/keys/")
        page.goto("/account/keys/")
        expect(page.get_by_role("columnheader", name="Expires (JST)")).to_be_visible()

    open_as("ada", timezone_id="Asia/Tokyo")(look)


# ---- against the running router


@pytest.fixture
def open_router(chromium: Chromium, router: RunningRouter) -> Iterator[Callable[[], Tab]]:
    tabs: list[Tab] = []

    def open_one() -> Tab:
        tabs.append(chromium.open(base_url=router.url))
        return tabs[-1]

    yield open_one
    for tab in tabs:
        tab.close()


def sign_in(page: Page, username: str) -> None:
    page.goto("/account/login/")
    page.get_by_label("Username").fill(username)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(lambda url: "login" not in url)


async def test_a_key_is_made_used_its_request_explained_and_the_key_revoked(
    router: RunningRouter, backend: int, open_router: Callable[[], Tab]
) -> None:
    await router.change(make_user, "eve", password=PASSWORD)
    tab = await asyncio.to_thread(open_router)

    def make(page: Page) -> str:
        sign_in(page, "eve")
        assert page.url.endswith("/account/")
        page.get_by_role("link", name="My keys").first.click()
        page.get_by_label("Name").fill("laptop")
        page.get_by_role("button", name="Make key").click()
        return page.get_by_label("Key laptop").input_value()

    key = await asyncio.to_thread(tab, make)
    await router.reload()
    assert (await router.chat(key=key)).status_code == 200
    await router.records()

    def explain(page: Page) -> str:
        page.goto("/account/requests/")
        page.locator("tbody a").click()
        return page.locator(".mr-sentence").inner_text()

    assert (await asyncio.to_thread(tab, explain)).startswith("Did not wait; went to a:")

    def revoke(page: Page) -> None:
        page.goto("/account/keys/")
        page.get_by_role("button", name="Revoke the key laptop").click()
        expect(page.get_by_text("The key laptop was revoked.")).to_be_visible()

    await asyncio.to_thread(tab, revoke)
    await router.reload()
    assert (await router.chat(key=key)).status_code == 401


async def test_a_boost_made_in_the_browser_moves_the_weight_and_ends(
    router: RunningRouter, backend: int, open_router: Callable[[], Tab]
) -> None:
    await router.change(make_admin, "root", password=PASSWORD)
    tab = await asyncio.to_thread(open_router)

    def make(page: Page) -> None:
        sign_in(page, "root")
        page.goto("/admin/groups/")
        page.get_by_role("link", name="Add a boost").click()
        page.locator("[name=name]").fill("class project")
        page.locator("[name=username]").fill("ada")
        page.locator("[name=factor]").fill("4")
        page.locator("[name=ends_at_0]").fill("2040-01-01")
        page.locator("[name=ends_at_1]").fill("18:00:00")
        page.get_by_role("button", name="Save", exact=True).click()
        page.wait_for_url("**/accounts/boost/")

    def weight() -> float:
        users = router.runtime.snapshot.users.values()
        return next(spec.weight for spec in users if spec.username == "ada")

    await asyncio.to_thread(tab, make)
    await until(lambda: weight() == 4.0, within=60)
    assert (await router.chat()).status_code == 200

    def end(page: Page) -> None:
        page.goto("/admin/groups/")
        page.get_by_role("button", name="End the boost class project").click()
        expect(page.get_by_text("The boost class project is over.")).to_be_visible()

    await asyncio.to_thread(tab, end)
    await until(lambda: weight() == 1.0, within=60)
    assert (await router.chat()).status_code == 200
    assert [one.user_weight for one in await router.records()] == [4.0, 1.0]
    boost = await router.ask(Boost.objects.get)
    assert boost.ends_at <= timezone.now()
