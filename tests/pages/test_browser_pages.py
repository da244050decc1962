"""The pages in a real browser: with and without scripts, wide and narrow, light and dark."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from playwright.sync_api import Page, expect

from accounts.models import Group, User
from scheduler import services
from scheduler.models import ClusterMinute, ShareHour, ShareMinute, UsageHour
from scheduler.serving import LiveView
from tests.factories import make_admin, make_backend, make_decision, make_group, make_user
from tests.pages.live import Cluster

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

PASSWORD = "a-long-enough-password"
OWN_PAGES = [
    "/admin/",
    "/admin/groups/",
    "/admin/queue/",
    "/admin/what-if/",
    "/admin/history/",
    "/admin/reports/",
    "/admin/decisions/req-1/",
]
DJANGO_PAGES = [
    "/admin/scheduler/decision/",
    "/admin/scheduler/sitesettings/1/change/",
    "/admin/accounts/group/",
    "/admin/accounts/user/",
    "/admin/accounts/apikey/add/",
    "/admin/backends/backend/",
]

#: Inputs that nothing names: a label, or a description of their own.
UNNAMED = """() => [...document.querySelectorAll('input, select, textarea')]
  .filter(el => el.type !== 'hidden' && el.offsetParent !== null)
  .filter(el => !el.labels?.length && !el.getAttribute('aria-label') && !el.getAttribute('title'))
  .map(el => el.outerHTML)"""
UNSCOPED = "() => [...document.querySelectorAll('.mr-table th:not([scope])')].length"
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture
def people() -> User:
    """Two groups, somebody in one of them, an explained request, and who may see it all."""
    Group.objects.all().delete()  # a migration's, in whichever test comes first
    faculty = make_group("faculty", scheduler_weight=3, description="People who teach")
    make_group("student", scheduler_weight=1)
    make_user("ada", group=faculty)
    make_backend("gpu-1", models=("llama3:70b",))
    make_decision(
        "req-1",
        model_requested="llama3:70b-instruct-with-a-very-long-name-that-goes-on-and-on-and-on",
        user="somebody-with-a-long-name@department.university.example",
        group="faculty",
    )
    return make_admin("root", password=PASSWORD)


@pytest.fixture
def open_signed_in(people, client, open_tab, live_server):
    """Opens pages as the superuser, without the half second that checking a password takes."""
    client.force_login(people)
    cookie = {"name": "sessionid", "value": client.cookies["sessionid"].value}

    def open_one(**options: Any) -> Any:
        tab = open_tab(**options)
        tab(lambda page: page.context.add_cookies([{**cookie, "url": live_server.url}]))
        return tab

    return open_one


def test_signing_in_and_changing_a_weight_work_without_scripts(people, open_tab):
    tab = open_tab(java_script_enabled=False)

    def change_weight(page: Page) -> str:
        page.goto("/admin/login/")
        page.get_by_label("Username").fill("root")
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url("**/admin/")
        page.goto("/admin/groups/")
        expect(page.get_by_role("heading", name="Add a group")).to_be_visible()
        page.get_by_label("Weight of faculty").fill("4.5")
        page.get_by_label("Reason for the change").fill("new hires")
        page.get_by_role("button", name="Save weights").click()
        expect(page.get_by_text("Saved: faculty 3 → 4.5.")).to_be_visible()
        return page.get_by_label("Weight of faculty").input_value()

    assert tab(change_weight) == "4.5"
    faculty = Group.objects.get(name="faculty")
    assert faculty.scheduler_weight == 4.5
    newest = faculty.history.first()
    assert (newest.history_user, newest.history_change_reason) == (people, "new hires")


def test_a_refused_weight_is_shown_with_its_error_and_nothing_is_saved(open_signed_in):
    def refuse(page: Page) -> str:
        page.goto("/admin/groups/")
        page.get_by_label("Weight of faculty").fill("-2")
        page.get_by_label("Weight of student").fill("8")
        page.get_by_label("Weight of student").press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("Nothing was saved")
        expect(page.locator(".errorlist")).to_have_count(1)
        return page.get_by_label("Weight of student").input_value()

    assert open_signed_in()(refuse) == "8"
    assert list(Group.objects.values_list("scheduler_weight", flat=True)) == [3, 1]


def test_figures_are_refreshed_while_a_weight_is_being_edited(open_signed_in, monkeypatch):
    ada, cluster = User.objects.get(username="ada"), Cluster(slots=1)

    def busier_each_time() -> LiveView:
        cluster.ask(ada)
        return cluster.view()

    monkeypatch.setattr(services, "live", busier_each_time)
    group = Group.objects.get(name="faculty").pk

    def edit(page: Page) -> tuple[str, bool]:
        page.goto("/admin/groups/")
        weight = page.get_by_label("Weight of faculty")
        weight.fill("77")
        queued = page.locator(f"#queued-{group}")
        before = queued.inner_text()
        expect(queued).not_to_have_text(before, timeout=8000)
        expect(page.locator(f"#now-{group}")).to_have_text("100\xa0%")
        return weight.input_value(), weight.evaluate("el => el === document.activeElement")

    assert open_signed_in()(edit) == ("77", True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_every_page_fits_names_its_inputs_and_loads_nothing_from_elsewhere(
    open_signed_in, live_server, scheme, width
):
    tab = open_signed_in(color_scheme=scheme, viewport={"width": width, "height": 800})

    def look(page: Page) -> None:
        addresses: list[str] = []
        complaints: list[str] = []
        page.on("request", lambda request: addresses.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        for address in [*OWN_PAGES, *DJANGO_PAGES]:
            page.goto(address)
            assert page.evaluate(UNSCOPED) == 0, address
            assert page.evaluate(OVERFLOW) <= 0, address
            if address in OWN_PAGES:
                assert page.evaluate(UNNAMED) == [], address
            is_dark = page.evaluate("() => document.documentElement.classList.contains('dark')")
            assert is_dark == (scheme == "dark")
        assert complaints == []
        assert [url for url in addresses if not url.startswith(live_server.url)] == []

    tab(look)


@pytest.fixture
def full(people, monkeypatch) -> None:
    """Something to see on every page: work, samples, a slow request, a change, totals."""
    now = timezone.now()
    ada, faculty = User.objects.get(username="ada"), Group.objects.get(name="faculty")
    cluster = Cluster(slots=1)
    cluster.ask(ada, 5)
    monkeypatch.setattr(services, "live", cluster.view)
    faculty.scheduler_weight = 5
    faculty.save()
    for minute in (1, 2, 3):
        at = now - timedelta(minutes=minute)
        ShareMinute.objects.create(
            at=at, group="faculty", entitled=0.75, received=0.5, queued=3, running=1
        )
        ClusterMinute.objects.create(
            at=at, gap=5, gap_bound=9, queued=3, running=1, tokens_per_second=8
        )
    hour = now.replace(minute=0, second=0, microsecond=0)
    ShareHour.objects.create(hour=hour, group="faculty", entitled=9, nominal=5)
    UsageHour.objects.create(
        hour=hour, group="faculty", user_id=ada.pk, requests=4, charged_tokens=99, slow_cold_load=2
    )
    make_decision(
        "req-2",
        queued_at=now - timedelta(seconds=60),
        dispatched_at=now - timedelta(seconds=40),
        first_byte_at=now - timedelta(seconds=30),
        first_token_at=now - timedelta(seconds=29),
        ended_at=now,
        wait_reason="others_ahead",
        selected_backend="gpu-1",
        selected_backend_id=1,
        candidate_backends=[1, 2],
        backend_names={"1": "gpu-1", "2": "gpu-2", "3": "gpu-3"},
        scores={"1": 130.0, "2": 90.0},
        score_parts={"1": {"model_loaded": 100.0}, "2": {"model_loaded": 50.0}},
        constraints={"3": {"capacity": "4 + 0 of 4 slots in use"}},
        served_ahead={"student": [3, 700.0]},
        user_deficit=-50.0,
        user_weight=3.0,
        burst_credits=5.0,
        deprioritization_factor=0.5,
        wait_bonus=20.0,
        priority=-10.0,
        selection_reason="score",
        arrived_at=now - timedelta(seconds=60),
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_wrong_with_the_own_pages(open_signed_in, full, axe, scheme):
    def look(page: Page) -> list[str]:
        complaints = []
        for address in [*OWN_PAGES, "/admin/decisions/req-2/", "/admin/nothing-is-here/"]:
            page.goto(address)
            complaints += axe(page)
        return complaints

    assert open_signed_in(color_scheme=scheme)(look) == []


@pytest.mark.parametrize("address", OWN_PAGES)
def test_own_pages_are_readable_without_scripts_and_lead_to_the_others(open_signed_in, address):
    def read(page: Page) -> None:
        page.goto(address)
        assert page.evaluate("() => getComputedStyle(document.documentElement).display") == "block"

    def plain(page: Page) -> None:
        page.goto(address)
        expect(page.locator("#content")).to_be_visible()

    open_signed_in()(read)
    open_signed_in(java_script_enabled=False)(plain)


@pytest.mark.parametrize("scripts", [True, False])
def test_a_change_is_taken_back_with_and_without_scripts(open_signed_in, people, scripts):
    faculty = Group.objects.get(name="faculty")
    faculty.scheduler_weight = 8
    faculty.save()

    def take_back(page: Page) -> None:
        page.goto("/admin/history/")
        page.get_by_role("button", name="Take back the change of group faculty").click()
        expect(page.get_by_text("Taken back: scheduler weight 8 → 3.")).to_be_visible()
        expect(page.get_by_role("button", name="Take back")).to_have_count(2)  # both changes

    open_signed_in(java_script_enabled=scripts)(take_back)
    faculty.refresh_from_db()
    assert faculty.scheduler_weight == 3
    assert faculty.history.first().history_user == people


def test_the_menu_is_opened_with_the_keyboard_on_a_narrow_screen(open_signed_in):
    def open_menu(page: Page) -> None:
        page.goto("/admin/groups/")
        button = page.get_by_role("button", name="Menu")
        expect(page.get_by_role("link", name="Decisions")).to_be_hidden()
        button.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("link", name="Decisions")).to_be_visible()

    open_signed_in(viewport={"width": 400, "height": 800})(open_menu)


def test_a_keyboard_user_can_skip_the_menu(open_signed_in):
    def skip(page: Page) -> None:
        page.goto("/admin/groups/")
        page.keyboard.press("Tab")
        link = page.get_by_role("link", name="Skip to main content")
        expect(link).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        expect(page.get_by_role("region", name="Groups")).to_be_focused()

    open_signed_in()(skip)


def test_the_sign_in_page_names_its_inputs_and_fits(people, open_tab):
    def look(page: Page) -> None:
        page.goto("/admin/login/")
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate(OVERFLOW) <= 0

    open_tab(viewport={"width": 400, "height": 800})(look)
