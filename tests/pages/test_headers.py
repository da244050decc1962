"""What pages say in their headers, and what they believe of those that come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from axes.models import AccessAttempt
from django.core.checks import run_checks
from django.test import Client

from tests.factories import make_admin, make_user

pytestmark = pytest.mark.django_db
PASSWORD = "a-long-enough-password"


def test_pages_cannot_be_framed_sniffed_or_referred_from(client: Client) -> None:
    answer = client.get("/admin/login/")
    assert answer["X-Frame-Options"] == "DENY"
    assert answer["X-Content-Type-Options"] == "nosniff"
    assert answer["Referrer-Policy"] == "same-origin"
    assert answer["Cross-Origin-Opener-Policy"] == "same-origin"


def test_scripts_cannot_read_the_session(client: Client) -> None:
    make_admin("root", password=PASSWORD)
    answer = client.post("/admin/login/", {"username": "root", "password": PASSWORD})
    cookie = answer.cookies["sessionid"]
    assert (cookie["httponly"], cookie["samesite"]) == (True, "Lax")


def test_signing_in_gives_another_session_and_signing_out_ends_it(client: Client) -> None:
    make_admin("root", password=PASSWORD)
    client.get("/admin/login/")
    client.post("/account/login/", {"username": "root", "password": PASSWORD})
    first = client.cookies["sessionid"].value
    assert client.get("/admin/").status_code == 200
    client.post("/account/logout/")
    client.cookies["sessionid"] = first
    assert client.get("/admin/").status_code == 302


# ---- proxies and https


def deployed(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"]
    environment = {**os.environ, "MINDROUTER_DATA": str(tmp_path), **variables}
    return subprocess.run(program, env=environment, capture_output=True, text=True, check=False)


def test_the_settings_for_https_pass_djangos_checks(tmp_path: Path) -> None:
    ran = deployed(tmp_path, HTTPS="1", ALLOWED_HOSTS="llm.example.org")
    assert ran.returncode == 0, ran.stderr


def test_any_host_name_is_warned_of_where_the_site_is_deployed(settings: Any) -> None:
    settings.ALLOWED_HOSTS = ["*"]
    found = run_checks(tags=["mindrouter"], include_deployment_checks=True)
    assert [message.id for message in found] == ["mindrouter.W002"]


@pytest.fixture
def https(settings: Any) -> None:
    settings.SECURE_SSL_REDIRECT = True
    settings.TRUSTED_PROXIES = ["10.0.0.0/8"]


def test_plain_requests_are_sent_to_https(https: None, client: Client) -> None:
    answer = client.get("/admin/login/")
    assert answer.status_code == 301
    assert answer["Location"] == "https://testserver/admin/login/"


@pytest.mark.parametrize(("peer", "status"), [("10.1.2.3", 200), ("192.0.2.9", 301)])
def test_only_a_trusted_proxy_says_that_it_was_https(
    https: None, client: Client, peer: str, status: int
) -> None:
    told = {"HTTP_X_FORWARDED_PROTO": "https", "REMOTE_ADDR": peer}
    assert client.get("/admin/login/", **told).status_code == status


def test_a_form_from_a_site_that_is_not_ours_is_refused() -> None:
    client = Client(enforce_csrf_checks=True)
    make_admin("root", password=PASSWORD)
    fields = {"username": "root", "password": PASSWORD}
    assert client.post("/admin/login/", fields).status_code == 403
    client.get("/admin/login/")
    fields["csrfmiddlewaretoken"] = client.cookies["csrftoken"].value
    elsewhere = client.post("/admin/login/", fields, HTTP_ORIGIN="https://elsewhere.example")
    assert elsewhere.status_code == 403
    assert client.post("/admin/login/", fields).status_code == 302


def test_another_origin_of_ours_can_be_named(settings: Any) -> None:
    client = Client(enforce_csrf_checks=True)
    make_admin("root", password=PASSWORD)
    client.get("/admin/login/")
    fields = {"username": "root", "password": PASSWORD}
    fields["csrfmiddlewaretoken"] = client.cookies["csrftoken"].value
    settings.CSRF_TRUSTED_ORIGINS = ["https://llm.example.org"]
    told = {"HTTP_ORIGIN": "https://llm.example.org"}
    assert client.post("/admin/login/", fields, **told).status_code == 302


@pytest.mark.parametrize(
    "path", ["/admin/%00/", "/admin/limits/?user=%00", "/api/admin/captures/%00"]
)
def test_an_address_with_a_nul_is_refused_before_any_database_is_asked(
    client: Client, path: str, django_assert_num_queries: Any
) -> None:
    client.force_login(make_admin("root"))
    with django_assert_num_queries(0):
        assert client.get(path).status_code == 400


def test_a_session_with_a_nul_is_refused_before_any_database_is_asked(
    client: Client, django_assert_num_queries: Any
) -> None:
    cookie = '"' + r"\000" + "a" * 31 + '"'  # as cookies spell it
    with django_assert_num_queries(0):
        assert client.get("/admin/", HTTP_COOKIE=f"sessionid={cookie}").status_code == 400


# ---- guessing passwords


def guess(client: Client, name: str, page: str = "/admin/login/", **extra: str) -> int:
    return client.post(page, {"username": name, "password": "wrong"}, **extra).status_code


@pytest.mark.parametrize("page", ["/admin/login/", "/account/login/"])
def test_who_guesses_is_locked_out_and_the_right_password_does_not_help(
    client: Client, page: str
) -> None:
    make_admin("root", password=PASSWORD)
    assert [guess(client, "root", page) for _ in range(10)] == [*[200] * 9, 429]
    right = {"username": "root", "password": PASSWORD}
    assert client.post(page, right).status_code == 429
    assert "sessionid" not in client.cookies
    assert client.post(page, right, REMOTE_ADDR="192.0.2.7").status_code == 302  # nobody else is


def test_each_client_behind_a_trusted_proxy_is_counted_by_itself(
    settings: Any, client: Client
) -> None:
    settings.TRUSTED_PROXIES = ["10.0.0.1"]
    make_user("ada", password=PASSWORD)

    def via(proxy: str, told: str) -> dict[str, str]:
        return {"REMOTE_ADDR": proxy, "HTTP_X_FORWARDED_FOR": told}

    for number in range(10):  # what a client claims itself stands before what the proxy adds
        guess(client, "ada", **via("10.0.0.1", f"192.0.2.{number}, 198.51.100.1"))
    assert AccessAttempt.objects.get().ip_address == "198.51.100.1"
    assert guess(client, "ada", **via("10.0.0.1", "198.51.100.1")) == 429
    assert guess(client, "ada", **via("10.0.0.1", "198.51.100.2")) == 200
    assert guess(client, "ada", **via("203.0.113.5", "198.51.100.1")) == 200  # not a proxy of ours


def test_a_password_is_kept_as_an_argon2_hash_only() -> None:
    assert make_user("ada", password=PASSWORD).password.startswith("argon2$argon2id$")
