"""/account/: for everybody who has signed in, and only about themselves."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from accounts.models import ApiKey, Role, User, hash_key
from scheduler import services
from tests.factories import (
    make_admin,
    make_api_key,
    make_backend,
    make_decision,
    make_group,
    make_user,
)
from tests.pages.live import Cluster

pytestmark = pytest.mark.django_db
PASSWORD = "a-long-enough-password"
PAGES = [
    "/account/",
    "/account/figures/",
    "/account/keys/",
    "/account/requests/",
    "/account/requests/req-ada/",
    "/account/clients/",
    "/account/password/",
]


@pytest.fixture
def ada() -> User:
    user = make_user("ada", password=PASSWORD, group=make_group("physics", scheduler_weight=3))
    make_decision("req-ada", user_id=user.pk, user="ada", model_requested="m")
    return user


@pytest.fixture
def own(client: Client, ada: User) -> Client:
    client.force_login(ada, "accounts.authentication.RoleBackend")
    return client


def text(answer) -> str:
    return re.sub(r"\s+", " ", answer.content.decode())


# ---- who


@pytest.mark.parametrize("address", PAGES)
def test_a_plain_user_opens_every_page_and_nobody_else_does_unsigned(own, address):
    assert own.get(address).status_code == 200
    answer = Client().get(address)
    assert answer.status_code == 302
    assert answer["Location"] == f"/account/login/?next={address}"


@pytest.mark.parametrize(
    "fields",
    [{"is_superuser": True}, {"role": Role.OPERATOR}, {"role": Role.AUDITOR}, {"is_staff": True}],
)
def test_staff_have_an_account_too(client, fields):
    client.force_login(make_user("staff", **fields), "accounts.authentication.RoleBackend")
    for address in ("/account/", "/account/keys/", "/account/requests/"):
        assert client.get(address).status_code == 200
    assert "My share" in client.get("/admin/").content.decode()


@pytest.mark.parametrize(
    "address", ["/admin/", "/admin/groups/", "/admin/decisions/req-ada/", "/admin/search/?s=a"]
)
def test_a_plain_user_does_not_reach_the_admin(own, address):
    assert own.get(address)["Location"].startswith("/admin/login/")


def test_a_plain_users_pages_lead_to_no_admin_page(own):
    page = own.get("/account/").content.decode()
    assert "/account/keys/" in page
    assert 'href="/admin/' not in page


def test_a_disabled_user_is_signed_out(own, ada):
    User.objects.filter(pk=ada.pk).update(is_active=False)
    assert own.get("/account/").status_code == 302


# ---- signing in and out


def sign_in(client: Client, address: str = "/account/login/", **fields: str):
    return client.post(address, {"username": "ada", "password": PASSWORD} | fields)


def test_a_plain_user_signs_in_and_out(client, ada):
    assert sign_in(client)["Location"] == "/account/"
    assert client.get("/")["Location"] == "/account/"
    assert client.get("/account/logout/").status_code == 405
    assert client.post("/account/logout/")["Location"] == "/account/login/"
    assert client.get("/account/").status_code == 302


def test_staff_who_sign_in_here_come_to_the_overview(client, ada):
    User.objects.filter(pk=ada.pk).update(is_staff=True)
    assert sign_in(client)["Location"] == "/admin/"


def test_signing_in_leads_on_to_this_site_only(client, ada):
    assert sign_in(client, "/account/login/?next=/account/keys/")["Location"] == "/account/keys/"
    client.post("/account/logout/")
    away = sign_in(client, "/account/login/?next=https://evil.example/")
    assert away["Location"] == "/account/"


def test_a_wrong_password_is_refused_in_words(client, ada):
    page = sign_in(client, password="wrong")
    assert page.status_code == 200
    assert "enter a correct username and password" in text(page)


def test_the_own_password_is_changed_with_the_old_one(own, ada):
    new = {"new_password1": "another-long-one", "new_password2": "another-long-one"}
    refused = own.post("/account/password/", {"old_password": "wrong"} | new)
    assert refused.status_code == 200
    changed = own.post("/account/password/", {"old_password": PASSWORD} | new)
    assert changed["Location"] == "/account/"
    ada.refresh_from_db()
    assert ada.check_password("another-long-one")
    assert own.get("/account/").status_code == 200


# ---- the share


def test_the_share_is_shown_with_its_reasons(own, ada, monkeypatch):
    bob = make_user("bob", group=make_group("biology", scheduler_weight=1))
    cluster = Cluster(slots=1)
    cluster.ask(ada, jobs=2)
    cluster.ask(bob)
    monkeypatch.setattr(services, "live", cluster.view)
    for address in ("/account/", "/account/figures/"):
        page = text(own.get(address))
        assert "75 %" in page
        assert "Your weight is 3: the weight of your group physics." in page
        assert "1 other user has requests too" in page
        assert "bob" not in page


def test_the_page_takes_as_many_queries_whatever_there_is(own, ada, django_assert_num_queries):
    make_backend(models=("m",))
    with django_assert_num_queries(24) as few:
        own.get("/account/")
    for number in range(30):
        make_user(group=make_group())
        make_backend(models=(f"m{number}",))
        make_decision(user="ada", user_id=ada.pk, arrived_at=timezone.now())
    with django_assert_num_queries(len(few)):
        own.get("/account/")


# ---- keys


def make_key(client: Client, **fields: str):
    return client.post("/account/keys/", {"name": "laptop", "expires_at": ""} | fields)


def test_a_key_is_shown_once_and_only_its_hash_is_kept(own, ada):
    answer = make_key(own, expires_at="2040-01-01T12:00")
    (secret,) = re.findall(r"mr-[0-9a-f]{64}", answer.content.decode())
    assert answer["Cache-Control"] == "no-store"
    key = ApiKey.objects.get()
    assert (key.user, key.name, key.sha256) == (ada, "laptop", hash_key(secret))
    assert key.expires_at is not None
    assert key.expires_at.isoformat() == "2040-01-01T12:00:00+00:00"
    assert not key.may_name_end_user
    page = own.get("/account/keys/").content.decode()
    assert secret not in page
    assert key.prefix in page


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"name": ""}, "This field is required"),
        ({"name": "desktop"}, "You have a key of this name already."),
        ({"expires_at": "2020-01-01T00:00"}, "This is in the past."),
        ({"expires_at": "soon"}, "Enter a valid date/time."),
    ],
)
def test_a_wrong_key_is_refused_with_its_error(own, ada, fields, error):
    make_api_key(ada, name="desktop")
    assert error in text(make_key(own, **fields))
    assert ApiKey.objects.count() == 1


def test_nothing_but_name_and_expiry_is_taken_from_the_form(own, ada):
    other = make_user("bob")
    make_key(own, user=str(other.pk), may_name_end_user="on", sha256="0" * 64)
    key = ApiKey.objects.get()
    assert (key.user, key.may_name_end_user) == (ada, False)
    assert key.sha256 != "0" * 64


def test_a_key_may_be_for_some_models_only(own, ada):
    make_key(own, allowed_models="m\nn")
    assert ApiKey.objects.get().allowed_models == ["m", "n"]
    assert "only m, n" in text(own.get("/account/keys/"))


def test_a_key_is_revoked_by_its_owner_only(own, ada):
    make_api_key(ada, name="mine")
    make_api_key(make_user("bob"), name="theirs")
    mine, theirs = ApiKey.objects.order_by("name")
    assert own.post(f"/account/keys/{theirs.pk}/revoke/").status_code == 404
    assert own.get(f"/account/keys/{mine.pk}/revoke/").status_code == 405
    assert "was revoked" in text(own.post(f"/account/keys/{mine.pk}/revoke/", follow=True))
    assert list(ApiKey.objects.order_by("name").values_list("enabled", flat=True)) == [False, True]
    assert ApiKey.history.first().history_change_reason == "revoked by its owner"
    assert "theirs" not in own.get("/account/keys/").content.decode()


# ---- requests


def test_requests_are_the_own_ones_each_explained(own, ada):
    bob = make_user("bob")
    make_decision("req-bob", user="bob", user_id=bob.pk)
    make_decision("old-ada", user="ada", user_id=ada.pk + 100)  # an earlier user of that name
    page = own.get("/account/requests/").content.decode()
    assert "req-ada" in page
    assert "req-bob" not in page
    assert "old-ada" not in page
    assert own.get("/account/requests/req-bob/").status_code == 404
    assert own.get("/account/requests/none/").status_code == 404


def test_one_request_shows_others_as_counts_of_groups_only(own, ada):
    at = timezone.now()
    make_decision(
        "req-2",
        user="ada",
        user_id=ada.pk,
        model_requested="m",
        arrived_at=at,
        queued_at=at,
        dispatched_at=at + timedelta(seconds=4),
        selected_backend="gpu-1",
        wait_reason="others_ahead",
        served_ahead={"staff": [3, 900.0]},
    )
    page = text(own.get("/account/requests/req-2/"))
    assert "3 requests of staff were served ahead" in page
    assert "Waited 4.0 s because others were owed more" in page


def test_the_list_goes_on_and_is_filtered(own, ada):
    now = timezone.now()
    for number in range(60):
        outcome = "failed" if number == 5 else "completed"
        at = now - timedelta(minutes=number)
        make_decision(f"r-{number:02}", user="ada", user_id=ada.pk, arrived_at=at, outcome=outcome)
    first = own.get("/account/requests/").content.decode()
    assert "r-49" in first
    assert "r-50" not in first
    older = re.search(r'href="/account/requests/(\?[^"]*before=[^"]*)"', first)
    assert older is not None
    second = own.get("/account/requests/" + older[1].replace("&amp;", "&")).content.decode()
    assert "r-49" not in second
    assert "r-50" in second
    failed = own.get("/account/requests/?outcome=failed").content.decode()
    assert re.findall(r"requests/(r-\d\d)/", failed) == ["r-05"]
    assert own.get("/account/requests/?outcome=x&before=y").status_code == 200


def test_a_list_of_requests_takes_few_queries(own, ada, django_assert_num_queries):
    backend = make_backend("gpu-1")
    for number in range(30):
        make_decision(
            f"r-{number}", user="ada", user_id=ada.pk, candidate_backends=[backend.pk, 77]
        )
    with django_assert_num_queries(5):  # session, user, captured keys, requests, backends
        own.get("/account/requests/")


# ---- clients and the zone


def test_snippets_have_this_sites_address_and_the_chosen_model(own):
    make_backend("a", models=("m", "n"))
    page = text(own.get("/account/clients/?model=n", headers={"host": "llm.uni.example"}))
    assert "http://llm.uni.example/v1" in page
    assert "model=&#x27;n&#x27;" in page
    assert "model=&#x27;m&#x27;" in text(own.get("/account/clients/?model=secret"))


def test_times_are_in_the_zone_that_the_browser_has_said(own, ada):
    own.cookies["mindrouter-zone"] = "Asia/Tokyo"
    page = own.get("/account/requests/").content.decode()
    assert "1 Jun 2026 21:00:00" in page
    assert "Arrived (JST)" in page
    make_key(own, expires_at="2040-01-01T12:00")
    assert ApiKey.objects.get().expires_at.isoformat() == "2040-01-01T03:00:00+00:00"
    own.cookies["mindrouter-zone"] = "../../etc/passwd"
    assert "1 Jun 2026 12:00:00" in own.get("/account/requests/").content.decode()


def test_the_sites_root_leads_where_one_belongs(client):
    assert client.get("/")["Location"] == "/admin/"
    client.force_login(make_admin("root"), "accounts.authentication.RoleBackend")
    assert client.get("/")["Location"] == "/admin/"
