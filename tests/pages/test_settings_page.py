"""The page of the site's settings."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from scheduler import standing
from scheduler.checks import NUMBERS
from scheduler.models import SiteSettings
from scheduler.settings_admin import DESCRIBED, ENVIRONMENT
from scheduler.snapshot import load_snapshot, setting_name
from tests.factories import make_admin, make_user

pytestmark = pytest.mark.django_db

PAGE = "/admin/scheduler/sitesettings/1/change/"
HISTORY = "/admin/scheduler/sitesettings/1/history/"


@pytest.fixture
def admin_client(client: Client) -> Client:
    client.force_login(make_admin("root"))
    return client


def texts_of(client: Client) -> dict[str, str]:
    """{setting: its help, without markup}"""
    fields = client.get(PAGE).context["adminform"].form.fields
    return {name: plain(str(field.help_text)) for name, field in fields.items()}


def plain(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html)).strip()


def test_the_list_leads_to_the_one_row_without_making_it(admin_client: Client) -> None:
    answer = admin_client.get("/admin/scheduler/sitesettings/", follow=True)
    assert answer.redirect_chain == [(PAGE, 302)]
    assert answer.status_code == 200
    assert not SiteSettings.objects.exists()


def test_every_setting_is_on_the_page_and_described(admin_client: Client) -> None:
    adminform = admin_client.get(PAGE).context["adminform"]
    wanted = {one.name for one in SiteSettings._meta.fields} - {"id"}
    assert set(adminform.form.fields) == wanted
    shown = {name for fieldset in adminform for line in fieldset for name in line.fields}
    assert shown == wanted | {"environment"}
    described = {name for name in wanted if SiteSettings._meta.get_field(name).help_text}
    assert described | set(DESCRIBED) == wanted
    saved = {setting_name(name) for name in wanted}
    assert set(ENVIRONMENT) <= set(NUMBERS) - saved


def test_the_groups_are_those_of_the_rules(admin_client: Client) -> None:
    fieldsets = [fieldset.name for fieldset in admin_client.get(PAGE).context["adminform"]]
    assert fieldsets[:6] == ["Shares", "Queue", "Placement", "Backends", "Records", "Gateway"]


def test_each_value_is_shown_with_its_source_unit_effect_and_limits(
    admin_client: Client, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    SiteSettings.objects.create(pk=1, quantum=500)
    monkeypatch.setenv("SCHEDULER_MAX_WAIT", "90")
    settings.SCHEDULER_MAX_WAIT = 90
    texts = texts_of(admin_client)
    assert texts["quantum"].startswith(
        "In force: 500 tokens per unit of weight and round (saved; emptied: 1,000 tokens per unit "
        "of weight and round, default). How much a user may be ahead"
    )
    assert texts["quantum"].endswith("At least 1. SCHEDULER_QUANTUM")
    assert texts["max_wait"].startswith("In force: 90 seconds (environment). After so long")
    assert texts["backend_fail_window"].startswith("In force: 30 seconds (default).")
    assert texts["backend_fail_window"].endswith("At least 0. BACKEND_FAIL_WINDOW")
    assert texts["max_queued"].startswith("In force: no limit (default).")
    assert "A whole number, at least 0." in texts["max_queued"]
    assert texts["deprioritize_threshold"].endswith(
        "From 0.5 to 1. SCHEDULER_DEPRIORITIZE_THRESHOLD"
    )
    assert texts["share_mode"].startswith("In force: user (default).")
    assert texts["cost_cached_token"].startswith("In force: the price of a prompt token (default).")


def test_what_is_shown_is_what_is_in_force(admin_client: Client) -> None:
    SiteSettings.objects.create(pk=1, max_wait=12.5, score_latency=0)
    texts, tunables = texts_of(admin_client), load_snapshot().tunables
    assert (tunables.max_wait, tunables.score_latency) == (12.5, 0)
    assert texts["max_wait"].startswith("In force: 12.5 seconds (saved")
    assert texts["score_latency"].startswith("In force: 0 points (saved")


def test_what_only_the_environment_sets_is_told_too(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHUTDOWN_GRACE", "30")
    text = plain(admin_client.get(PAGE).content.decode())
    assert "SHUTDOWN_GRACE 30 seconds environment That running streams have to end" in text
    assert "BACKEND_POLL_INTERVAL 5 seconds default Between polls" in text


def test_a_saved_value_is_in_force_and_kept_in_the_history(admin_client: Client) -> None:
    assert standing.share_mode() == "user"
    answer = admin_client.post(PAGE, {"share_mode": "group", "quantum": "500"})
    assert answer.status_code == 302
    assert standing.share_mode() == "group"
    row = SiteSettings.objects.get()
    assert (row.pk, row.quantum, row.max_wait) == (1, 500, None)
    assert row.history.first().history_user.username == "root"


def test_the_history_says_who_changed_what_and_when(admin_client: Client) -> None:
    for quantum in ("500", "750"):
        admin_client.post(PAGE, {"quantum": quantum})
    text = plain(admin_client.get(HISTORY).content.decode())
    assert re.search(r"Changed root \S+ Quantum: 500\.0 \S+ 750\.0", text)


def test_an_emptied_field_goes_back_to_the_environment(admin_client: Client) -> None:
    admin_client.post(PAGE, {"quantum": "500"})
    admin_client.post(PAGE, {"quantum": ""})
    assert SiteSettings.objects.get().quantum is None
    assert load_snapshot().tunables.quantum == 1000


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("quantum", "0", "greater than or equal to 1"),
        ("max_wait", "-1", "greater than or equal to 0"),
        ("quantum", "NaN", "Enter a number"),
        ("max_queued", "1.5", "Enter a whole number"),
        ("deprioritize_threshold", "1.1", "less than or equal to 1"),
        ("share_mode", "nobody", "not one of the available choices"),
    ],
)
def test_a_refused_value_comes_back_with_the_reason(
    admin_client: Client, field: str, value: str, why: str
) -> None:
    answer = admin_client.post(PAGE, {field: value})
    assert answer.status_code == 200
    (error,) = answer.context["adminform"].form.errors[field]
    assert why in error
    assert error in plain(answer.content.decode())
    assert not SiteSettings.objects.exists()


def test_there_is_no_second_row_and_no_deletion(admin_client: Client) -> None:
    assert admin_client.get("/admin/scheduler/sitesettings/add/").status_code == 403
    assert admin_client.get("/admin/scheduler/sitesettings/2/change/").status_code == 302
    assert admin_client.post("/admin/scheduler/sitesettings/1/delete/").status_code == 403


def test_an_operator_reads_the_settings_and_changes_none(client: Client) -> None:
    client.force_login(make_user("op", is_staff=True, role="operator"))
    page = client.get(PAGE)
    assert page.status_code == 200
    assert "In force: 1,000 tokens per unit of weight and round (default)" in plain(
        page.content.decode()
    )
    assert client.post(PAGE, {"quantum": "500"}).status_code == 403
    assert not SiteSettings.objects.exists()
