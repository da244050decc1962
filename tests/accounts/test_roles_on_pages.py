"""What each role may open and change on the pages."""

from __future__ import annotations

import pytest
from django.contrib import admin
from django.test import Client

from accounts.models import Role, User
from tests.factories import make_admin, make_api_key, make_decision, make_user

pytestmark = pytest.mark.django_db

READ = [
    "/admin/",
    "/admin/groups/",
    "/admin/groups/figures/",
    "/admin/queue/",
    "/admin/advice/",
    "/admin/decisions/req-1/",
    "/admin/scheduler/sitesettings/1/change/",
    "/admin/search/?s=x",
]
READ += [
    f"/admin/{model._meta.app_label}/{model._meta.model_name}/"
    for model in admin.site._registry
    if model._meta.model_name not in ("capture", "sitesettings")  # a redirect to the one there is
]
PROMPTS = ["/admin/scheduler/capture/"]
PEOPLE = [
    "/admin/accounts/user/add/",
    "/admin/accounts/user/import/",
    "/admin/accounts/group/add/",
    "/admin/accounts/apikey/add/",
    "/admin/accounts/quota/add/",
]
CLUSTER = [
    "/admin/backends/backend/add/",
    "/admin/backends/node/add/",
    "/admin/backends/alias/add/",
    "/admin/backends/modelstrategy/add/",
]
NOBODY = ["/admin/scheduler/decision/add/", "/admin/scheduler/sitesettings/add/"]

#: role -> (what is a user of it, what comes of READ, PROMPTS, CLUSTER, PEOPLE and NOBODY)
ROLES = {
    "superuser": ({"is_superuser": True}, (200, 200, 200, 200, 403)),
    "operator": ({"role": Role.OPERATOR}, (200, 403, 200, 403, 403)),
    "auditor": ({"role": Role.AUDITOR}, (200, 403, 403, 403, 403)),
    "staff": ({"is_staff": True}, (200, 403, 403, 403, 403)),
    "user": ({}, (302, 302, 302, 302, 302)),
    "disabled": ({"is_superuser": True, "is_active": False}, (302, 302, 302, 302, 302)),
}


@pytest.fixture(autouse=True)
def _decision() -> None:
    make_decision("req-1")


def sign_in(client: Client, **fields) -> User:
    user = make_user("somebody", **fields)
    client.force_login(user, "accounts.authentication.RoleBackend")
    return user


@pytest.mark.parametrize("role", ROLES)
def test_each_role_opens_its_pages_and_no_others(client, role):
    fields, statuses = ROLES[role]
    sign_in(client, **fields)
    expected = {
        address: status
        for addresses, status in zip(
            (READ, PROMPTS, CLUSTER, PEOPLE, NOBODY), statuses, strict=True
        )
        for address in addresses
    }
    answers = {address: client.get(address) for address in expected}
    assert {address: answer.status_code for address, answer in answers.items()} == expected
    if 302 in statuses:
        assert all(one["Location"].startswith("/admin/login/") for one in answers.values())


@pytest.mark.parametrize("role", ["superuser", "operator", "auditor", "staff", "user"])
def test_what_is_asked_one_by_one_and_all_together_agrees(role):
    user = make_user("somebody", **ROLES[role][0])
    granted = user.get_all_permissions()
    everything = make_admin("root").get_all_permissions()
    assert granted <= everything
    for permission in everything:
        assert user.has_perm(permission) is (permission in granted)
    apps = {permission.partition(".")[0] for permission in granted}
    assert {app for app in ("accounts", "backends", "scheduler") if user.has_module_perms(app)} == (
        apps & {"accounts", "backends", "scheduler"}
    )


def test_an_operator_changes_backends_and_the_queue_and_nobodys_rights():
    operator = make_user("somebody", role=Role.OPERATOR)
    assert operator.has_perm("backends.change_backend")
    assert operator.has_perm("scheduler.cancel_job")
    for permission in (
        "accounts.change_user",
        "accounts.add_apikey",
        "accounts.change_group",
        "scheduler.change_sitesettings",
        "backends.change_historicalbackend",
    ):
        assert not operator.has_perm(permission), permission


def test_an_auditor_sees_no_password_hash_and_no_key_hash(client):
    sign_in(client, role=Role.AUDITOR, is_staff=True)
    ada = make_user("ada", password="a-long-enough-one")
    make_api_key(ada, name="laptop")
    page = client.get(f"/admin/accounts/user/{ada.pk}/change/")
    assert page.status_code == 200
    assert ada.password not in page.content.decode()
    assert ada.password.rsplit("$", 1)[1] not in page.content.decode()
    assert ada.api_keys.get().sha256 not in page.content.decode()


def test_an_auditor_cannot_disable_a_key(client):
    sign_in(client, role=Role.AUDITOR, is_staff=True)
    make_api_key(make_user("ada"), name="laptop")
    row = User.objects.get(username="ada").api_keys.get()
    client.post("/admin/accounts/apikey/", {"action": "disable", "_selected_action": [row.pk]})
    row.refresh_from_db()
    assert row.enabled is True


def test_the_menu_shows_only_what_the_user_may_open(client):
    sign_in(client, role=Role.AUDITOR)
    page = client.get("/admin/").content.decode()
    assert "/admin/groups/" in page
    assert "/admin/accounts/user/add/" not in page
