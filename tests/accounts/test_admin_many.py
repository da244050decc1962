"""Many users at once: moved, deleted, listed."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils.html import strip_tags

from accounts.models import ApiKey, Group, Quota, User
from tests.factories import make_admin, make_group, make_user

pytestmark = pytest.mark.django_db

USERS = "/admin/accounts/user/"


@pytest.fixture
def admin_client(client: Client) -> Client:
    client.force_login(make_admin("root"))
    return client


def test_users_are_moved_after_a_question_and_with_a_history(admin_client):
    physics = make_group("physics")
    ada, bob = make_user("ada"), make_user("bob", group=physics)
    form = {"action": "move_to_group", "_selected_action": [ada.pk, bob.pk]}
    page = admin_client.post(USERS, form)
    assert page.status_code == 200
    assert {user.username for user in page.context["users"]} == {"ada", "bob"}
    assert User.objects.get(pk=ada.pk).group is None
    wish = {"apply": "1", "count": "2", "group": physics.pk, "reason": "new term"}
    answer = admin_client.post(USERS, form | wish, follow=True)
    assert "1 users were moved to group physics." in answer.content.decode()
    ada = User.objects.get(pk=ada.pk)
    newest = ada.history.first()
    assert (ada.group, newest.history_change_reason, newest.history_user.username) == (
        physics,
        "new term",
        "root",
    )
    assert bob.history.count() == 1
    admin_client.post(USERS, form | {"apply": "1", "count": "2", "group": ""})
    assert User.objects.filter(group=physics).count() == 0


def test_everybody_who_is_found_is_moved_not_only_the_page(admin_client):
    User.objects.bulk_create(User(username=f"u{n}") for n in range(150))
    physics = make_group("physics")
    form = {"action": "move_to_group", "select_across": "1", "_selected_action": ["1"]}
    page = admin_client.post(f"{USERS}?q=u1", form)
    assert page.context["count"] == 61  # u1, u10 to u19, u100 to u149
    assert '<form method="post" novalidate>' in page.content.decode()  # to this same address
    form |= {"apply": "1", "count": "61", "group": physics.pk, "reason": ""}
    page = admin_client.post(USERS, form)
    assert page.context["count"] == 151  # others than were asked about: asked once more
    assert User.objects.filter(group=physics).count() == 0
    admin_client.post(f"{USERS}?q=u1", form)
    assert User.objects.filter(group=physics).count() == 61


@pytest.mark.parametrize(
    "fields", [{"is_superuser": ""}, {"is_active": ""}], ids=["demoted", "disabled"]
)
def test_the_last_superuser_stays_one_on_the_page(admin_client, fields):
    root = User.objects.get(username="root")
    form = {
        "username": "root", "role": "user", "is_active": "on", "is_superuser": "on",
        "quota-TOTAL_FORMS": "0", "quota-INITIAL_FORMS": "0",
        "api_keys-TOTAL_FORMS": "0", "api_keys-INITIAL_FORMS": "0",
    } | fields  # fmt: skip
    form = {name: value for name, value in form.items() if value}
    page = admin_client.post(f"{USERS}{root.pk}/change/", form)
    assert page.status_code == 200
    assert "last active superuser" in page.content.decode()
    root.refresh_from_db()
    assert (root.is_superuser, root.is_active) == (True, True)


def test_the_last_superusers_are_not_deleted_and_the_page_says_why(admin_client):
    root, second = User.objects.get(username="root"), make_admin("second")
    both = {"action": "delete_selected", "_selected_action": [root.pk, second.pk], "post": "yes"}
    page = admin_client.post(USERS, both)
    assert "last active superuser" in page.content.decode()
    assert User.objects.count() == 2
    one = {"action": "delete_selected", "_selected_action": [second.pk], "post": "yes"}
    assert admin_client.post(USERS, one).status_code == 302
    page = admin_client.post(f"{USERS}{root.pk}/delete/", {"post": "yes"})
    assert page.status_code == 200
    assert User.objects.get() == root


def test_an_operator_who_becomes_a_user_is_staff_no_more(admin_client):
    somebody = make_user("somebody", role="operator")
    assert somebody.is_staff is True
    form = {
        "username": "somebody", "role": "user", "is_active": "on", "is_staff": "on",
        "quota-TOTAL_FORMS": "0", "quota-INITIAL_FORMS": "0",
        "api_keys-TOTAL_FORMS": "0", "api_keys-INITIAL_FORMS": "0",
    }  # fmt: skip
    assert admin_client.post(f"{USERS}{somebody.pk}/change/", form).status_code == 302
    somebody.refresh_from_db()
    assert (somebody.role, somebody.is_staff) == ("user", False)


def test_the_history_says_who_changed_what_from_what(admin_client):
    group = make_group("physics", scheduler_weight=3)
    form = {"name": "physics", "description": "", "scheduler_weight": "5", "max_wait": ""}
    assert admin_client.post(f"/admin/accounts/group/{group.pk}/change/", form).status_code == 302
    page = " ".join(
        admin_client.get(f"/admin/accounts/group/{group.pk}/history/").content.decode().split()
    )
    assert "root" in page
    assert "Scheduler weight: 3.000000 arrow_right_alt 5.000000" in " ".join(
        strip_tags(page).split()
    )


@pytest.mark.parametrize("name", ["user", "group", "quota", "apikey"])
def test_lists_cost_the_same_few_queries_whatever_their_length(admin_client, name):
    address = f"/admin/accounts/{name}/"
    admin_client.get(address)  # fills what is kept, like the content types
    costs = []
    for count in (0, 1, 5000):
        make_people(count)
        with CaptureQueriesContext(
            connection,
        ) as queries:
            assert admin_client.get(address).status_code == 200
        costs.append(len(queries))
    assert costs[1] == costs[2]
    assert costs[0] <= costs[1] <= 12


def make_people(count: int) -> None:
    User.objects.filter(is_superuser=False).delete()
    Group.objects.exclude(name__in=["student", "staff", "faculty", "admin"]).delete()
    Group.objects.bulk_create(Group(name=f"g{n}") for n in range(min(count, 50)))
    groups = list(Group.objects.filter(name__startswith="g"))
    User.objects.bulk_create(
        User(username=f"u{n}", group=groups[n % len(groups)]) for n in range(count)
    )
    users = list(User.objects.filter(is_superuser=False))
    Quota.objects.bulk_create(Quota(user=user, weight_override=1) for user in users)
    ApiKey.objects.bulk_create(
        ApiKey(user=user, name="key", prefix="mr-0", sha256=f"{user.pk:064}") for user in users
    )
