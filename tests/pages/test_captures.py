"""Capturing prompts on the pages: who switches it, who is told, who reads, and what is noted."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from accounts.models import ApiKey, Role
from scheduler.changes import changes
from scheduler.models import Capture
from tests.factories import make_admin, make_api_key, make_capture, make_decision, make_user

pytestmark = pytest.mark.django_db

REASON = "answers are cut in forms"
PROMPT = "canary-of-a-prompt <b>"


@pytest.fixture
def key() -> ApiKey:
    ada = make_user("ada")
    make_api_key(ada, name="laptop")
    key = ApiKey.objects.get()
    make_decision("req-1", user="ada", user_id=ada.pk, key_id=key.pk)
    make_decision("req-2", user="ada", user_id=ada.pk, key_id=key.pk)
    return key


@pytest.fixture
def root(client: Client) -> Client:
    client.force_login(make_admin("root"))
    return client


def signed_in(name: str, **fields: Any) -> Client:
    client = Client()
    client.force_login(make_user(name, **fields))
    return client


def owner(key: ApiKey) -> Client:
    client = Client()
    client.force_login(key.user)
    return client


def on(key: ApiKey, **fields: Any) -> ApiKey:
    key.capture_until = timezone.now() + timedelta(hours=1)
    key.capture_reason, key.capture_days = REASON, 7
    for name, value in fields.items():
        setattr(key, name, value)
    key.save()
    return key


def text(answer: Any) -> str:
    return re.sub(r"\s+", " ", answer.content.decode())


def form_of(client: Client, key: ApiKey) -> dict[str, Any]:
    """What the key's page would send as it stands."""
    page = client.get(f"/admin/accounts/apikey/{key.pk}/change/")
    form = page.context["adminform"].form
    values = {name: form[name].value() for name in form.fields}
    split = {}
    for name in ("expires_at", "capture_until"):
        moment = values.pop(name)
        local = timezone.localtime(moment) if moment else None
        split |= {f"{name}_0": f"{local:%Y-%m-%d}" if local else "",
                  f"{name}_1": f"{local:%H:%M:%S}" if local else ""}  # fmt: skip
    return {name: value for name, value in values.items() if value not in (None, False)} | split


def save(client: Client, key: ApiKey, **changed: str) -> Any:
    return client.post(f"/admin/accounts/apikey/{key.pk}/change/", form_of(client, key) | changed)


TOMORROW = (datetime.now(UTC) + timedelta(days=1)).strftime("%Y-%m-%d")
SWITCH = {
    "capture_until_0": TOMORROW,
    "capture_until_1": "12:00:00",
    "capture_reason": REASON,
    "capture_days": "14",
}


# ---- the switch


def test_a_superuser_switches_it_on_and_off_and_the_history_shows_both(root, key):
    assert save(root, key, **SWITCH).status_code == 302
    key.refresh_from_db()
    assert (key.is_captured, key.capture_reason, key.capture_days) == (True, REASON, 14)
    change = changes(key.history.first().history_user, kind="key")[0][0]
    assert change.who == "root"
    assert [(v.name, v.before) for v in change.values] == [
        ("capture until", "–"), ("capture reason", "–"), ("capture days", "–"),
    ]  # fmt: skip
    assert save(root, key, capture_until_0="", capture_until_1="").status_code == 302
    key.refresh_from_db()
    assert (key.capture_until, key.capture_reason, key.capture_days) == (None, "", None)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"capture_reason": ""}, "capture_reason"),
        ({"capture_days": ""}, "capture_days"),
        ({"capture_days": "91"}, "capture_days"),
        ({"capture_until_0": "2020-01-01"}, "capture_until"),
        ({"capture_until_0": "2099-01-01"}, "capture_until"),
        ({"capture_until_0": "", "capture_until_1": ""}, "capture_until"),
    ],
)
def test_half_a_switch_is_refused_at_its_field(root, key, changed, field):
    answer = save(root, key, **SWITCH | changed)
    assert answer.status_code == 200
    assert list(answer.context["adminform"].form.errors) == [field]
    key.refresh_from_db()
    assert not key.is_captured


def test_a_key_whose_capture_is_over_can_be_changed_otherwise(root, key):
    on(key, capture_until=timezone.now() - timedelta(days=1))
    assert save(root, key, name="desktop").status_code == 302
    key.refresh_from_db()
    assert (key.name, key.is_captured, key.capture_reason) == ("desktop", False, REASON)


def test_a_new_key_is_never_captured(root, key):
    form = root.get("/admin/accounts/apikey/add/").context["adminform"].form
    assert not set(ApiKey.CAPTURE) & set(form.fields)


def test_the_owner_cannot_switch_it(key):
    owner(key).post("/account/keys/", {"name": "new", **SWITCH})
    assert ApiKey.objects.get(name="new").capture_until is None
    assert owner(key).post(f"/admin/accounts/apikey/{key.pk}/captures/").status_code == 302
    assert b"capture" not in owner(key).get("/account/keys/").content


@pytest.mark.parametrize("role", [Role.AUDITOR, Role.OPERATOR])
def test_who_reads_everything_else_neither_switches_reads_nor_deletes(key, role):
    client = signed_in("eve", role=role)
    make_capture(on(key), "req-1", request=PROMPT.encode())
    before = (ApiKey.history.count(), Capture.objects.count())
    for address in (
        "/admin/decisions/req-1/prompt/",
        "/admin/scheduler/capture/",
        f"/admin/scheduler/capture/{Capture.objects.get().pk}/change/",
    ):
        assert client.get(address).status_code == 403, address
    for what in ({"action": "stop"}, {"action": "delete", "sure": "on"}):
        answer = client.post(f"/admin/accounts/apikey/{key.pk}/captures/", what)
        assert answer.status_code == 403
    page = client.get("/admin/decisions/req-1/")
    assert "Captured: the prompt of this request" in text(page)
    assert b"/prompt/" not in page.content
    assert "Captured prompts" not in text(client.get("/admin/"))
    assert (ApiKey.history.count(), Capture.objects.count()) == before
    key.refresh_from_db()
    assert key.is_captured


# ---- the mark


def test_the_owner_is_told_on_every_page_of_the_account_that_shows_the_key_or_requests(key):
    on(key)
    until = f"{timezone.localtime(key.capture_until):%-d %b %Y %H:%M}"
    for page in ("", "keys/", "requests/", "requests/req-1/"):
        told = text(owner(key).get(f"/account/{page}"))
        assert f"is stored until {until}" in told, page
        assert f"Why: {REASON}" in told, page
        assert "deleted after 7 days" in told, page


def test_nobody_is_told_what_is_not_so(root, key):
    on(key, capture_until=timezone.now() - timedelta(seconds=1))
    make_api_key(make_user("bob"), name="bobs")
    pages = [owner(key).get(f"/account/{page}") for page in ("", "keys/", "requests/")]
    pages += [root.get("/admin/scheduler/decision/"), root.get("/admin/decisions/req-1/")]
    on(ApiKey.objects.get(name="bobs"))
    pages += [owner(key).get(f"/account/{page}") for page in ("", "keys/", "requests/")]
    pages.append(root.get("/admin/decisions/req-1/"))
    for page in pages:
        assert "is stored until" not in text(page)


def test_an_admin_sees_it_on_lists_of_keys_and_requests_and_on_a_requests_page(root, key):
    make_api_key(key.user, name="other")
    make_capture(on(key), "req-1")
    listed = root.get("/admin/accounts/apikey/")
    assert text(listed).count("until 20") == 1
    chosen = root.get("/admin/accounts/apikey/?captured=now")
    assert [row.name for row in chosen.context["cl"].result_list] == ["laptop"]
    log = root.get("/admin/scheduler/decision/")
    assert f"Why: {REASON}" in text(log)
    marked = {row.request_id: row.is_captured for row in log.context["cl"].result_list}
    assert marked == {"req-1": True, "req-2": False}
    assert text(log).count(">captured</span>") == 1
    assert "is stored until" in text(root.get("/admin/decisions/req-2/"))
    assert "is stored until" in text(root.get(f"/admin/accounts/apikey/{key.pk}/change/"))


# ---- reading


def test_a_superuser_reads_it_from_the_requests_page_and_that_is_noted(root, key):
    make_capture(key, "req-1", request=PROMPT.encode(), request_bytes=5000, answer=b"\xff\x00")
    assert b"/admin/decisions/req-1/prompt/" in root.get("/admin/decisions/req-1/").content
    assert b"/prompt/" not in root.get("/admin/decisions/req-2/").content
    before = ApiKey.history.count()
    page = root.get("/admin/decisions/req-1/prompt/")
    assert "canary-of-a-prompt &lt;b&gt;" in text(page)
    assert "the first 22 of 5,000 bytes" in text(page)
    assert "It is no text." in text(page)
    assert "no-store" in page["Cache-Control"]
    assert ApiKey.history.count() == before + 1
    change = changes(ApiKey.history.first().history_user, kind="key")[0][0]
    assert (change.who, change.what) == ("root", "laptop")
    assert change.reason == "captured prompt of req-1 read"
    assert change.via == "GET /admin/decisions/req-1/prompt/"
    assert (change.values, change.may_revert) == ([], False)
    assert root.get("/admin/decisions/req-2/prompt/").status_code == 404
    assert ApiKey.history.count() == before + 1


def test_the_owner_is_told_that_a_request_is_stored_and_reads_no_other_pages(key):
    make_capture(key, "req-1", request=PROMPT.encode())
    page = text(owner(key).get("/account/requests/req-1/"))
    assert "Captured: the prompt of this request and its answer are stored until" in page
    assert "canary" not in page
    assert "/prompt/" not in page


def test_the_list_shows_what_there_is_without_reading_it(root, key):
    make_capture(key, "req-1", request=PROMPT.encode(), request_bytes=22)
    make_capture(key, "req-gone", answer_bytes=1234)
    before = ApiKey.history.count()
    listed = root.get(f"/admin/scheduler/capture/?key_id={key.pk}")
    assert [row.request_id for row in listed.context["cl"].result_list] == ["req-gone", "req-1"]
    assert {"ada", "laptop", "1,234"} <= set(re.split(r"[<>]", text(listed)))
    assert "canary" not in text(listed)
    assert ApiKey.history.count() == before
    found = Capture.objects.get(request_id="req-gone")
    opened = root.get(f"/admin/scheduler/capture/{found.pk}/change/")
    assert opened["Location"] == "/admin/decisions/req-gone/prompt/"
    assert "How it was decided" not in text(root.get(opened["Location"]))


def test_what_cannot_be_decrypted_is_said(root, key, settings):
    make_capture(key, "req-1")
    settings.FIELD_ENCRYPTION_KEY = "x" * 43 + "="
    assert "It cannot be read" in text(root.get("/admin/decisions/req-1/prompt/"))


# ---- the end


def test_a_button_stops_it_and_another_deletes_what_there_is_if_one_is_sure(root, key):
    make_capture(on(key), "req-1")
    address = f"/admin/accounts/apikey/{key.pk}/captures/"
    root.post(address, {"action": "stop"})
    key.refresh_from_db()
    assert not key.is_captured
    assert "1 captured prompt stored." in text(root.get(address.replace("captures", "change")))
    asked = root.post(address, {"action": "delete"}, follow=True)
    assert "Nothing was deleted" in text(asked)
    assert Capture.objects.count() == 1
    done = root.post(address, {"action": "delete", "sure": "on"}, follow=True)
    assert "1 captured prompts were deleted" in text(done)
    assert Capture.objects.count() == 0
    assert ApiKey.history.first().history_change_reason == "all captured prompts deleted: 1"
    assert root.get(address).status_code == 405


def test_many_keys_are_stopped_on_the_list(root, key):
    on(key)
    root.post("/admin/accounts/apikey/", {"action": "stop_capture", "_selected_action": [key.pk]})
    key.refresh_from_db()
    assert (key.capture_until, key.capture_reason, key.capture_days) == (None, "", None)
