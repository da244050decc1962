"""Django's admin pages on users, quotas and API keys."""

from __future__ import annotations

import re

import pytest
from django.apps import apps
from django.contrib import admin
from django.test import Client

from accounts.models import ApiKey, Group, Quota, Role, User, hash_key
from tests.factories import make_admin, make_api_key, make_quota, make_user

pytestmark = pytest.mark.django_db


@pytest.fixture
def admin_client(client: Client) -> Client:
    client.force_login(make_admin("root"))
    return client


def user_fields(user: User, **fields) -> dict:
    return {
        "username": user.username,
        "role": user.role,
        "is_active": "on",
        "quota-TOTAL_FORMS": "0",
        "quota-INITIAL_FORMS": "0",
        "api_keys-TOTAL_FORMS": "0",
        "api_keys-INITIAL_FORMS": "0",
        **fields,
    }


def test_djangos_own_groups_have_no_page():
    assert not admin.site.is_registered(apps.get_model("auth", "Group"))


def test_a_user_is_added_with_a_password_and_a_group(admin_client):
    faculty = Group.objects.get(name="faculty")
    answer = admin_client.post(
        "/admin/accounts/user/add/",
        {
            "username": "ada",
            "group": faculty.pk,
            "usable_password": "true",
            "password1": "a-long-enough-one",
            "password2": "a-long-enough-one",
        },
    )
    assert answer.status_code == 302
    ada = User.objects.get(username="ada")
    assert ada.check_password("a-long-enough-one")
    assert (ada.group, ada.is_staff) == (faculty, False)


def test_group_role_flags_and_quota_are_changed_on_one_page(admin_client):
    user, staff = make_user("ada"), Group.objects.get(name="staff")
    answer = admin_client.post(
        f"/admin/accounts/user/{user.pk}/change/",
        user_fields(
            user,
            group=staff.pk,
            role="operator",
            is_staff="on",
            **{
                "quota-TOTAL_FORMS": "1",
                "quota-0-weight_override": "0.5",
                "quota-0-max_concurrent": "3",
            },
        ),
    )
    assert answer.status_code == 302
    user.refresh_from_db()
    assert (user.group, user.role, user.is_staff) == (staff, Role.OPERATOR, True)
    assert (float(user.quota.weight_override), user.quota.max_concurrent) == (0.5, 3)


@pytest.mark.parametrize("weight", ["-1", "NaN", "text", "1000000001"])
def test_a_weight_override_out_of_range_is_refused(admin_client, weight):
    user = make_user("ada")
    answer = admin_client.post(
        "/admin/accounts/quota/add/", {"user": user.pk, "weight_override": weight}
    )
    assert answer.status_code == 200
    assert "weight_override" in answer.context["adminform"].form.errors
    assert not Quota.objects.exists()


@pytest.mark.parametrize(("weight", "saved"), [("0", 0), ("", None), ("0.5", 0.5), ("1e9", 1e9)])
def test_a_weight_override_in_range_is_saved(admin_client, weight, saved):
    quota = make_quota(make_user("ada"))
    answer = admin_client.post(
        f"/admin/accounts/quota/{quota.pk}/change/",
        {"user": quota.user.pk, "weight_override": weight},
    )
    assert answer.status_code == 302
    quota.refresh_from_db()
    assert quota.weight_override == saved


def test_a_users_page_shows_keys_by_prefix_and_no_hash(admin_client):
    user = make_user("ada")
    key = make_api_key(user, name="laptop")
    page = admin_client.get(f"/admin/accounts/user/{user.pk}/change/").content.decode()
    assert key[:9] in page
    assert key not in page
    assert hash_key(key) not in page


def test_a_new_key_is_shown_once_and_only_its_hash_is_kept(admin_client):
    user = make_user("ada")
    answer = admin_client.post("/admin/accounts/apikey/add/", {"user": user.pk, "name": "laptop"})
    assert answer.status_code == 200
    assert "no-store" in answer["Cache-Control"]
    (key,) = set(re.findall(r"mr-[0-9a-f]{64}", answer.content.decode()))
    row = ApiKey.objects.get(name="laptop")
    assert (row.sha256, row.prefix, row.user, row.enabled) == (hash_key(key), key[:9], user, True)
    for address in ("/admin/accounts/apikey/", f"/admin/accounts/apikey/{row.pk}/change/"):
        page = admin_client.get(address).content.decode()
        assert row.prefix in page
        assert key not in page
        assert row.sha256 not in page
    assert key not in str(admin_client.cookies)


def test_a_second_key_of_the_same_name_is_refused(admin_client):
    user = make_user("ada")
    make_api_key(user, name="laptop")
    answer = admin_client.post("/admin/accounts/apikey/add/", {"user": user.pk, "name": "laptop"})
    assert answer.status_code == 200
    assert answer.context["adminform"].form.errors
    assert ApiKey.objects.count() == 1


def test_a_key_keeps_its_user(admin_client):
    make_api_key(make_user("ada"), name="laptop")
    row, other = ApiKey.objects.get(), make_user("eve")
    admin_client.post(
        f"/admin/accounts/apikey/{row.pk}/change/",
        {"user": other.pk, "name": "desktop", "enabled": "on"},
    )
    row.refresh_from_db()
    assert (row.user.username, row.name) == ("ada", "desktop")


def test_keys_are_disabled_and_enabled_with_a_history(admin_client):
    make_api_key(make_user("ada"), name="laptop")
    row = ApiKey.objects.get()
    for action, enabled in (("disable", False), ("enable", True)):
        admin_client.post(
            "/admin/accounts/apikey/", {"action": action, "_selected_action": [row.pk]}
        )
        row.refresh_from_db()
        assert row.enabled is enabled
        newest = row.history.first()
        assert (newest.enabled, newest.history_user.username) == (enabled, "root")


def test_a_password_is_never_shown_and_never_in_the_history(admin_client):
    user = make_user("ada", password="a-long-enough-one")
    page = admin_client.get(f"/admin/accounts/user/{user.pk}/change/").content.decode()
    assert user.password not in page
    assert not hasattr(user.history.first(), "password")
