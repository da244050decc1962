"""A backend's life in a real browser: added by its address, tested, paused, drained."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from accounts.models import User
from backends.draining import disable_drained
from backends.models import Backend
from tests.factories import make_admin, make_backend
from tests.stubs.engines import Answer, vllm_stub

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def admin() -> User:
    return make_admin("root")


@pytest.fixture(params=[True, False], ids=["scripts", "no scripts"])
def tab(request: Any, admin: User, client: Any, open_tab: Any, live_server: Any) -> Any:
    """A page of the superuser, with and without scripts."""
    client.force_login(admin)
    cookie = {"name": "sessionid", "value": client.cookies["sessionid"].value}
    tab = open_tab(java_script_enabled=request.param)
    tab(lambda page: page.context.add_cookies([{**cookie, "url": live_server.url}]))
    return tab


def test_a_backend_is_added_by_its_address_detected_and_tested(tab: Any) -> None:
    with vllm_stub("smollm2", "qwen3") as stub:
        answer = {"choices": [{"message": {"content": "Hello from the stub."}}]}
        stub.answers["POST /v1/chat/completions"] = Answer(answer)

        def add(page: Page) -> None:
            page.goto("/admin/backends/backend/add/")
            page.get_by_label("Name").first.fill("gpu-1")
            page.get_by_label("Base URL").fill(stub.url)
            page.get_by_role("button", name="Save and continue editing").click()
            expect(page.get_by_text("gpu-1: vLLM 0.32.0, models: 2.")).to_be_visible()
            expect(page.locator('input[name="models-0-name"]')).to_have_value("qwen3")

        def test(page: Page) -> None:
            page.get_by_role("link", name="Test with a real request").click()
            page.get_by_label("Model").select_option("smollm2")
            page.get_by_role("button", name="Send").click()
            expect(page.get_by_text("Hello from the stub.")).to_be_visible()

        tab(add)
        tab(test)
        assert stub.count("/v1/chat/completions") == 1
    assert [row.name for row in Backend.objects.get().models.all()] == ["qwen3", "smollm2"]


def test_backends_are_paused_resumed_and_drained_by_buttons(tab: Any) -> None:
    one, other = make_backend("gpu-1"), make_backend("gpu-2")

    def states() -> list[tuple[bool, bool, bool]]:
        return list(Backend.objects.values_list("enabled", "draining", "paused").order_by("pk"))

    def press(name: str, address: str, said: str) -> None:
        def step(page: Page) -> None:
            page.goto(address)
            page.get_by_role("button", name=name, exact=True).click()
            expect(page.get_by_text(said)).to_be_visible()

        tab(step)

    press("Pause all backends", "/admin/backends/backend/", "Paused: 2 backends.")
    assert states() == [(True, False, True)] * 2
    press("Resume all backends", "/admin/backends/backend/", "Resumed: 2 backends.")
    page = f"/admin/backends/backend/{one.pk}/change/"
    press("Drain", page, "Drain: gpu-1.")
    assert states() == [(True, True, False), (True, False, False)]
    assert disable_drained([one.pk, other.pk]) == ["gpu-1"]
    press("Enable", page, "Enable: gpu-1.")
    assert states() == [(True, False, False)] * 2
