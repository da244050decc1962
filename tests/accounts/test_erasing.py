"""Erasing a person: the name goes everywhere, the totals stay."""

from __future__ import annotations

from datetime import timedelta

import pytest
from axes.models import AccessLog
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import ValidationError
from django.db.models import Sum
from django.test import Client
from django.utils import timezone

from accounts import erasing
from accounts.erasing import erase
from accounts.models import ApiKey, User
from scheduler.models import Decision
from tests.factories import make_admin, make_api_key, make_decision, make_group, make_user

pytestmark = pytest.mark.django_db


@pytest.fixture
def ada() -> User:
    user = make_user(
        "ada", email="ada@a.example", first_name="Ada", last_name="L", group=make_group("physics")
    )
    user.username = "ada.lovelace"
    user.save()
    make_api_key(user, name="ada's laptop")
    for number, name in enumerate(["ada", "ada", "ada.lovelace"]):
        make_decision(
            f"r{number}", user=name, user_id=user.pk, group="physics", charged_tokens=10,
            end_user="child", client_request_id="ada-1",
        )  # fmt: skip
    make_decision("other", user="ada", user_id=user.pk + 1, charged_tokens=5)
    kind = ContentType.objects.get_for_model(User)
    LogEntry.objects.create(
        user=user, content_type=kind, object_id=str(user.pk), object_repr="ada", action_flag=CHANGE
    )
    AccessLog.objects.create(username="ada", ip_address="10.0.0.1", user_agent="x")
    return user


def test_nothing_tells_of_the_person_any_more_and_the_totals_stay(
    ada: User, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(erasing, "BATCH", 2)
    make_admin("root")
    before = Decision.objects.aggregate(Sum("charged_tokens"))
    assert erase(ada) == 3
    name = f"erased-{ada.pk}"
    ada = User.objects.get(pk=ada.pk)
    assert (ada.username, ada.email, ada.get_full_name(), ada.is_active) == (name, "", "", False)
    assert (ada.has_usable_password(), ada.group.name) == (False, "physics")
    assert not ApiKey.objects.exists()
    rows = Decision.objects.filter(user_id=ada.pk)
    assert set(rows.values_list("user", "end_user", "client_request_id", "group")) == {
        (name, "", None, "physics")
    }
    assert Decision.objects.get(request_id="other").user == "ada"
    assert Decision.objects.aggregate(Sum("charged_tokens")) == before
    assert set(User.history.filter(id=ada.pk).values_list("username", "email")) == {(name, "")}
    assert set(ApiKey.history.values_list("name", "prefix")) == {("erased", "")}
    assert LogEntry.objects.get().object_repr == name
    assert not AccessLog.objects.exists()


def test_erasing_again_reaches_what_was_recorded_late(ada: User):
    make_admin("root")
    erase(ada)
    make_decision("late", user="ada.lovelace", user_id=ada.pk, arrived_at=timezone.now())
    old = timezone.now() - timedelta(days=2)
    make_decision("older", user="ada.lovelace", user_id=ada.pk, arrived_at=old)
    assert erase(User.objects.get(pk=ada.pk)) == 1
    assert Decision.objects.get(request_id="late").user == f"erased-{ada.pk}"


def test_a_name_that_somebody_else_has_is_not_taken(ada: User):
    make_admin("root")
    make_user(f"erased-{ada.pk}")
    with pytest.raises(ValidationError, match="Another user"):
        erase(ada)
    assert User.objects.get(pk=ada.pk).email == "ada@a.example"


def test_the_last_superuser_is_not_erased():
    with pytest.raises(ValidationError, match="last active superuser"):
        erase(make_admin("root"))


def test_the_page_asks_before_it_erases(client: Client, ada: User):
    client.force_login(make_admin("root"))
    form = {"action": "erase", "_selected_action": [ada.pk]}
    page = client.post("/admin/accounts/user/", form)
    assert page.status_code == 200
    assert "cannot be undone" in page.content.decode()
    form |= {"apply": "1", "count": "1"}
    refused = client.post("/admin/accounts/user/", form)
    assert refused.context["form"].errors["sure"] == ["This field is required."]
    assert User.objects.get(pk=ada.pk).username == "ada.lovelace"
    answer = client.post("/admin/accounts/user/", {**form, "sure": "on"})
    assert answer.status_code == 302
    assert User.objects.get(pk=ada.pk).username == f"erased-{ada.pk}"
