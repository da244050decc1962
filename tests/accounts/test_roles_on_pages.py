"""What each role may open and change on the pages."""

from __future__ import annotations

import pytest
from django.test import Client

from accounts.models import Role, User
from tests.factories import make_api_key, make_decision, make_user

pytestmark = pytest.mark.django_db

READ = [
    "/admin/",
    "/admin/groups/",
    "/admin/groups/figures/",
    "/admin/accounts/group/",
    "/admin/accounts/user/",
    "/admin/accounts/quota/",
    "/admin/accounts/apikey/",
    "/admin/scheduler/decision/",
    "/admin/decisions/req-1/",
    "/admin/scheduler/sitesettings/1/change/",
]
CHANGE = ["/admin/accounts/user/add/", "/admin/accounts/group/add/", "/admin/accounts/apikey/add/"]


@pytest.fixture(autouse=True)
def _decision() -> None:
    make_decision("req-1")


def sign_in(client: Client, **fields) -> User:
    user = make_user("somebody", **fields)
    client.force_login(user)
    return user


@pytest.mark.parametrize("role", [Role.AUDITOR, Role.OPERATOR])
@pytest.mark.parametrize("address", READ)
def test_auditors_and_operators_read_everything(client, role, address):
    sign_in(client, role=role, is_staff=True)
    assert client.get(address).status_code == 200


@pytest.mark.parametrize("role", [Role.AUDITOR, Role.OPERATOR])
@pytest.mark.parametrize("address", CHANGE)
def test_auditors_and_operators_change_nothing_about_people(client, role, address):
    sign_in(client, role=role, is_staff=True)
    assert client.get(address).status_code == 403


@pytest.mark.parametrize("address", [*READ[1:], *CHANGE])
def test_staff_with_the_plain_role_opens_only_the_first_page(client, address):
    sign_in(client, is_staff=True)
    assert client.get("/admin/").status_code == 200
    assert client.get(address).status_code == 403


@pytest.mark.parametrize("address", [*READ, *CHANGE])
def test_a_role_without_staff_opens_nothing(client, address):
    sign_in(client, role=Role.OPERATOR)
    answer = client.get(address)
    assert answer.status_code == 302
    assert answer["Location"].startswith("/admin/login/")


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
    sign_in(client, is_staff=True)
    page = client.get("/admin/").content.decode()
    assert "/admin/groups/" not in page
    assert "/admin/accounts/user/" not in page
