"""The page of the site's settings."""

from __future__ import annotations

import pytest
from django.test import Client

from scheduler import services
from scheduler.models import SiteSettings
from tests.factories import make_admin, make_user

pytestmark = pytest.mark.django_db

PAGE = "/admin/scheduler/sitesettings/1/change/"


@pytest.fixture
def admin_client(client: Client) -> Client:
    client.force_login(make_admin("root"))
    return client


def test_the_list_leads_to_the_one_row_without_making_it(admin_client):
    answer = admin_client.get("/admin/scheduler/sitesettings/", follow=True)
    assert answer.redirect_chain == [(PAGE, 302)]
    assert answer.status_code == 200
    assert not SiteSettings.objects.exists()


def test_every_setting_is_on_the_page(admin_client):
    form = admin_client.get(PAGE).context["adminform"].form
    wanted = {one.name for one in SiteSettings._meta.fields} - {"id"}
    assert set(form.fields) == wanted
    shown = {name for fieldset in admin_client.get(PAGE).context["adminform"] for line in fieldset
             for name in line.fields}  # fmt: skip
    assert shown == wanted


def test_an_empty_field_says_what_applies_and_where_it_comes_from(admin_client, settings):
    settings.SCHEDULER_QUANTUM = 2500
    fields = admin_client.get(PAGE).context["adminform"].form.fields
    assert fields["quantum"].help_text.endswith("Empty: 2500 (SCHEDULER_QUANTUM).")
    assert fields["max_queued"].help_text.endswith("Empty: no limit (SCHEDULER_MAX_QUEUED).")
    assert fields["cost_cached_token"].help_text.count("Empty:") == 1


def test_a_saved_value_is_in_force_and_kept_in_the_history(admin_client):
    assert services.share_mode() == "user"
    answer = admin_client.post(PAGE, {"share_mode": "group", "quantum": "500"})
    assert answer.status_code == 302
    assert services.share_mode() == "group"
    row = SiteSettings.objects.get()
    assert (row.pk, row.quantum, row.max_wait) == (1, 500, None)
    assert row.history.first().history_user.username == "root"


@pytest.mark.parametrize(
    ("field", "value"), [("quantum", "0"), ("max_wait", "-1"), ("quantum", "NaN")]
)
def test_a_value_out_of_range_is_refused(admin_client, field, value):
    answer = admin_client.post(PAGE, {field: value})
    assert answer.status_code == 200
    assert field in answer.context["adminform"].form.errors
    assert not SiteSettings.objects.exists()


def test_there_is_no_second_row_and_no_deletion(admin_client):
    assert admin_client.get("/admin/scheduler/sitesettings/add/").status_code == 403
    assert admin_client.get("/admin/scheduler/sitesettings/2/change/").status_code == 302
    assert admin_client.post("/admin/scheduler/sitesettings/1/delete/").status_code == 403


def test_an_operator_reads_the_settings_and_changes_none(client):
    client.force_login(make_user("op", is_staff=True, role="operator"))
    assert client.get(PAGE).status_code == 200
    assert client.post(PAGE, {"quantum": "500"}).status_code == 403
    assert not SiteSettings.objects.exists()
