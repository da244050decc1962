"""Signing in at an identity provider; run by ``test_oidc`` with the settings for one."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from django.conf import settings
from django.test import Client

from accounts.models import Group, User
from tests.factories import make_group, make_user
from tests.stubs.oidc import Provider

pytestmark = pytest.mark.django_db


@pytest.fixture
def provider() -> Iterator[Provider]:
    running = Provider(urlsplit(settings.OIDC_ISSUER).port or 0)
    yield running
    running.close()


def go_there(client: Client, next_page: str = "") -> str:
    """Press the button; where the browser comes back to, with a code."""
    answer = client.post(f"/oidc/provider/login/?next={next_page}")
    assert answer.status_code == 302
    return httpx.get(answer["Location"], trust_env=False).headers["location"]


def come_back(client: Client, address: str) -> httpx.Response:
    parts = urlsplit(address)
    return client.get(f"{parts.path}?{parts.query}")


def sign_in(client: Client, **claims: object) -> User | None:
    come_back(client, go_there(client))
    user = client.get("/account/").wsgi_request.user
    return user if user.is_authenticated else None


def test_both_login_pages_have_the_button(provider: Provider, client: Client) -> None:
    for page in ("/admin/login/", "/account/login/"):
        answer = client.get(f"{page}?next=/account/keys/")
        text = answer.content.decode()
        assert "Sign in with Campus" in text
        assert "/oidc/provider/login/?next=/account/keys/" in text
        assert f"form-action 'self' {provider.issuer}" in answer["Content-Security-Policy"]


def test_the_first_sign_in_makes_an_account_in_the_group_of_the_claim(
    provider: Provider, client: Client
) -> None:
    group = make_group("physics")
    provider.claims = {
        "sub": "4711", "preferred_username": "ada", "email": "ada@example.org",
        "name": "Ada Lovelace", "groups": ["unknown here", "physics"],
    }  # fmt: skip
    user = sign_in(client)
    assert user is not None
    assert (user.username, user.email, user.first_name) == ("ada", "ada@example.org", "Ada")
    assert user.group == group
    assert (user.is_staff, user.is_superuser) == (False, False)
    assert not user.has_usable_password()
    assert provider.refusals == []
    again = Client()
    assert sign_in(again) == user
    assert User.objects.count() == 1


def test_a_group_that_has_changed_there_changes_here_and_one_that_is_not_named_stays(
    provider: Provider, client: Client
) -> None:
    make_group("physics"), make_group("chemistry")
    provider.claims = {"sub": "1", "preferred_username": "ada", "groups": "physics"}
    sign_in(client)
    provider.claims["groups"] = ["chemistry"]
    sign_in(Client())
    user = User.objects.get()
    assert user.group is not None
    assert user.group.name == "chemistry"
    assert user.history.first().history_change_reason == "group named by the identity provider"
    del provider.claims["groups"]
    sign_in(Client())
    assert Group.objects.get(name="chemistry").members.get() == user


def test_an_account_that_was_made_here_is_not_taken_over(
    provider: Provider, client: Client
) -> None:
    own = make_user("ada", email="ada@example.org", is_superuser=True, password="a-long-password")
    provider.claims = {
        "sub": "9", "preferred_username": "ada", "email": "ada@example.org", "email_verified": True,
    }  # fmt: skip
    user = sign_in(client)
    assert user is not None
    assert user != own
    assert user.username != "ada"
    assert not user.is_superuser


def test_who_was_disabled_here_stays_out(provider: Provider, client: Client) -> None:
    provider.claims = {"sub": "1", "preferred_username": "ada"}
    assert sign_in(client) is not None
    User.objects.update(is_active=False)
    other = Client()
    answer = come_back(other, go_there(other))
    assert answer["Location"] == "/account/login/"
    assert "sessionid" not in other.cookies or not other.get("/account/").wsgi_request.user.pk


def test_a_forged_or_repeated_answer_signs_nobody_in(provider: Provider, client: Client) -> None:
    provider.claims = {"sub": "1", "preferred_username": "ada"}
    address = go_there(client)
    victim = Client()  # in a session that has not asked
    come_back(victim, address)
    assert not victim.get("/account/").wsgi_request.user.is_authenticated
    come_back(client, address.replace("code=", "code=x"))
    assert not client.get("/account/").wsgi_request.user.is_authenticated
    address = go_there(client)
    come_back(client, address)
    client.post("/account/logout/")
    come_back(client, address)
    assert not client.get("/account/").wsgi_request.user.is_authenticated
    assert User.objects.count() == 1


def test_a_token_for_another_client_signs_nobody_in(provider: Provider, client: Client) -> None:
    provider.claims = {"sub": "1", "preferred_username": "ada"}
    provider.audience = "somebody-else"
    assert sign_in(client) is None
    assert User.objects.count() == 0


def test_a_provider_that_is_away_is_said_and_passwords_go_on_working(client: Client) -> None:
    answer = client.post("/oidc/provider/login/")
    assert (answer.status_code, answer["Location"]) == (302, "/account/login/")
    make_user("ada", password="a-long-password")
    client.post("/account/login/", {"username": "ada", "password": "a-long-password"})
    assert client.get("/account/").status_code == 200


def test_the_button_asks_with_a_form_of_ours(provider: Provider) -> None:
    client = Client(enforce_csrf_checks=True)
    assert client.post("/oidc/provider/login/").status_code == 403
    assert client.get("/oidc/provider/login/").status_code != 302  # a link signs nobody in
