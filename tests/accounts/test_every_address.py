"""Every address of the site, as the resolver knows them: the wrong role, somebody else, an expired
session and a forged form get nothing. A new page is in here by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.sessions.models import Session
from django.test import Client
from django.urls import URLResolver, get_resolver
from django.utils import timezone

from accounts.models import ApiKey, Boost, Group, ModelLimits, Quota, Role, User, hash_key
from backends.models import Alias, Backend, BackendModel, ModelStrategy, Node
from scheduler.models import (
    Capture,
    ConfigurationVersion,
    Decision,
    ModelPrice,
    SiteSettings,
    WhatIf,
)
from tests.factories import (
    make_admin,
    make_api_key,
    make_boost,
    make_capture,
    make_decision,
    make_user,
)

pytestmark = pytest.mark.django_db

#: The number of every row that is somebody else's.
PK = 4711
#: Anybody may open these, and they tell nothing; the last only leads to one of the others.
PUBLIC = {
    *("/account/login/", "/admin/login/", "/admin/logout/", "/account/logout/"),
    *("/admin/jsi18n/", "/"),
}
#: Everybody who is signed in has these.
OWN = {"/account/", "/account/figures/", "/account/password/", "/account/keys/"}
OWN |= {"/account/requests/", "/account/clients/", *PUBLIC}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def patterns(resolver: URLResolver, prefix: str = "") -> Iterator[str]:
    for one in resolver.url_patterns:
        if isinstance(one, URLResolver):
            yield from patterns(one, prefix + str(one.pattern))
        else:
            yield prefix + str(one.pattern)


def address(pattern: str) -> str:
    """The pattern with the rows of somebody else in its places."""
    pattern = pattern.replace("<str:kind>", "group").replace("<str:what>", "groups")
    pattern = pattern.replace("<str:form>", "json").replace("<str:request_id>", "req-1")
    pattern = re.sub(r"\^\(\?P<app_label>[^)]*\)", "accounts", pattern)
    pattern = re.sub(r"\^?\(\?P<[^>]*>\.\*\)", "nothing", pattern)
    pattern = re.sub(r"<[^>]*>|\(\[\^/\]\+\)", str(PK), pattern)
    return "/" + pattern.replace("^", "").replace("$", "")


ADDRESSES = sorted({address(pattern) for pattern in patterns(get_resolver())})


@pytest.fixture(autouse=True)
def _rows() -> None:
    """One of each kind."""
    group = Group.objects.create(pk=PK, name="physics", scheduler_weight=1)
    grace = make_user("grace", pk=PK, group=group, email="grace@example.org")
    ApiKey.objects.create(pk=PK, user=grace, name="grace's", prefix="mr-x", sha256=hash_key("x"))
    Quota.objects.create(pk=PK, user=grace)
    make_boost(pk=PK, user=grace)
    ModelLimits.objects.create(pk=PK, model_name="m")
    ModelPrice.objects.create(pk=PK, model_name="m", prompt=1, completion=1)
    backend = Backend.objects.create(pk=PK, name="gpu-1", base_url="http://127.0.0.1:9")
    BackendModel.objects.create(pk=PK, backend=backend, name="m")
    Node.objects.create(pk=PK, name="node-1")
    Alias.objects.create(pk=PK, name="chat", targets=["m"])
    ModelStrategy.objects.create(pk=PK, model_name="m")
    SiteSettings.objects.create(pk=1)
    make_decision("req-1", pk=PK, user="grace", user_id=PK)
    make_capture(ApiKey.objects.get(pk=PK), "req-1", pk=PK)
    now = timezone.now()
    WhatIf.objects.create(pk=PK, since=now, until=now)


def state() -> tuple[Any, ...]:
    """What would tell that something was changed."""
    rows = (Decision, WhatIf, ApiKey, User, Boost, Capture)
    version = ConfigurationVersion.objects.get(pk=1).version
    noted = ApiKey.history.count()  # type: ignore[attr-defined]
    return version, noted, *(model.objects.count() for model in rows)


def answers(client: Client, addresses: list[str], methods: tuple[str, ...]) -> dict[str, int]:
    """{"METHOD address": status}. Redirects to a sign-in page count as 401."""
    found = {}
    for one in addresses:
        for method in methods:
            if method not in ("GET", "POST") and not one.startswith("/api/"):
                continue  # pages have forms only
            answer = client.generic(method, one, b"{}", content_type="application/json")
            location = answer.headers.get("Location", "")
            asks_who = answer.status_code == 302 and "/login/" in location
            found[f"{method} {one}"] = 401 if asks_who else answer.status_code
    return found


def test_there_are_as_many_addresses_as_there_should_be() -> None:
    assert len(ADDRESSES) > 150
    assert {"/admin/groups/", "/account/keys/", f"/api/admin/users/{PK}"} <= set(ADDRESSES)
    assert not [one for one in ADDRESSES if set(one) & set("<>()?^$")]


@pytest.mark.parametrize("session", ["none", "expired", "of a disabled account"])
def test_without_a_session_there_is_nothing(session: str) -> None:
    client = Client()
    root = make_admin("root")
    if session != "none":
        client.force_login(root)
    if session == "expired":
        Session.objects.all().delete()
    if session == "of a disabled account":
        User.objects.filter(pk=root.pk).update(is_active=False)
    before = state()
    closed = [one for one in ADDRESSES if one not in PUBLIC]
    found = answers(client, closed, METHODS)
    wrong = {what: status for what, status in found.items() if status not in (401, 403, 404, 405)}
    assert wrong == {}
    assert state() == before


def test_a_user_gets_nothing_of_the_admin_the_api_or_somebody_elses() -> None:
    client, ada = Client(), make_user("ada")
    client.force_login(ada)
    before = state()
    closed = [one for one in ADDRESSES if one not in OWN]
    found = answers(client, closed, METHODS)
    wrong = {what: status for what, status in found.items() if status not in (401, 403, 404, 405)}
    assert wrong == {}
    assert state() == before
    for one in OWN - PUBLIC:
        assert b"grace" not in client.get(one).content


def test_a_users_key_opens_nothing_of_the_api_and_no_page() -> None:
    client = Client(headers={"Authorization": f"Bearer {make_api_key(make_user('ada'))}"})
    before = state()
    closed = [one for one in ADDRESSES if one not in PUBLIC]
    found = answers(client, closed, METHODS)
    wrong = {what: status for what, status in found.items() if status not in (401, 403, 404, 405)}
    assert wrong == {}
    assert state() == before


def test_an_auditor_changes_nothing_anywhere() -> None:
    client = Client()
    client.force_login(make_user("audrey", role=Role.AUDITOR))
    before = state()
    own = OWN | {"/admin/password_change/"}
    found = answers(client, [one for one in ADDRESSES if one not in own], METHODS[1:])
    assert state() == before
    assert not [what for what, status in found.items() if status >= 500]


def test_a_forged_form_is_refused_wherever_a_superuser_is_signed_in() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_admin("root"))
    before = state()
    found = answers(client, ADDRESSES, METHODS[1:])
    wrong = {what: status for what, status in found.items() if status not in (403, 404, 405)}
    assert wrong == {}
    assert state() == before
