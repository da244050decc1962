"""Django's admin pages on groups."""

from __future__ import annotations

import pytest
from django.test import Client

from accounts.models import Group
from tests.factories import make_admin, make_group, make_user

pytestmark = pytest.mark.django_db


@pytest.fixture
def admin_client(client: Client) -> Client:
    client.force_login(make_admin("root"))
    return client


def group_fields(**fields: str) -> dict[str, str]:
    return {"name": "guests", "description": "", "scheduler_weight": "1", **fields}


def texts(answer) -> list[str]:
    return [str(message) for message in answer.context["messages"]]


def test_the_list_counts_members_in_a_fixed_number_of_queries(
    admin_client, django_assert_max_num_queries
):
    faculty = Group.objects.get(name="faculty")
    for _ in range(3):
        make_user(group=faculty)
    with django_assert_max_num_queries(8):
        page = admin_client.get("/admin/accounts/group/").content.decode()
    assert f'?group__id__exact={faculty.pk}">3</a>' in page


@pytest.mark.parametrize("weight", ["0", "", "0.5", "1e9"])
def test_a_group_can_be_added_with_any_weight_in_range(admin_client, weight):
    answer = admin_client.post("/admin/accounts/group/add/", group_fields(scheduler_weight=weight))
    assert answer.status_code == 302
    saved = Group.objects.get(name="guests").scheduler_weight
    assert saved == (None if weight == "" else float(weight))


@pytest.mark.parametrize("weight", ["-1", "NaN", "sNaN", "three", "1e10", "Infinity"])
def test_a_weight_out_of_range_is_refused(admin_client, weight):
    answer = admin_client.post("/admin/accounts/group/add/", group_fields(scheduler_weight=weight))
    assert answer.status_code == 200
    assert "scheduler_weight" in answer.context["adminform"].form.errors
    assert not Group.objects.filter(name="guests").exists()


def test_allowed_models_are_typed_one_a_line_and_empty_means_every_model(admin_client):
    group = make_group("lab")
    address = f"/admin/accounts/group/{group.pk}/change/"
    admin_client.post(address, group_fields(name="lab", allowed_models="qwen3\n\n llama3 \nqwen3"))
    group.refresh_from_db()
    assert group.allowed_models == ["qwen3", "llama3"]
    assert ">\nqwen3\nllama3</textarea>" in admin_client.get(address).content.decode()
    admin_client.post(address, group_fields(name="lab", allowed_models=" "))
    group.refresh_from_db()
    assert group.allowed_models is None


def test_a_group_in_use_is_not_deleted_and_the_page_says_how_many_use_it(admin_client):
    faculty = Group.objects.get(name="faculty")
    make_user(group=faculty)
    make_user(group=faculty, is_active=False)
    answer = admin_client.post(
        f"/admin/accounts/group/{faculty.pk}/delete/", {"post": "yes"}, follow=True
    )
    assert texts(answer) == [
        "Nothing was deleted: faculty has 2 users. Move them to another group first."
    ]
    assert Group.objects.filter(name="faculty").exists()


def test_an_unused_group_is_deleted(admin_client):
    group = make_group("spare")
    answer = admin_client.post(f"/admin/accounts/group/{group.pk}/delete/", {"post": "yes"})
    assert (answer.status_code, answer["Location"]) == (302, "/admin/groups/")
    assert not Group.objects.filter(name="spare").exists()


def test_bulk_deletion_is_refused_as_a_whole_while_one_of_the_groups_is_in_use(admin_client):
    spare, faculty = make_group("spare"), Group.objects.get(name="faculty")
    make_user(group=faculty)
    data = {"action": "delete_selected", "_selected_action": [spare.pk, faculty.pk], "post": "yes"}
    answer = admin_client.post("/admin/accounts/group/", data, follow=True)
    assert texts(answer) == [
        "Nothing was deleted: faculty has 1 user. Move them to another group first."
    ]
    assert Group.objects.filter(name="spare").exists()


def test_bulk_deletion_asks_first_and_then_deletes(admin_client):
    chosen = [make_group("spare").pk, make_group("other").pk]
    data = {"action": "delete_selected", "_selected_action": chosen}
    question = admin_client.post("/admin/accounts/group/", data)
    assert question.status_code == 200
    assert 'name="action" value="delete_selected"' in question.content.decode()
    admin_client.post("/admin/accounts/group/", {**data, "post": "yes"})
    assert not Group.objects.filter(pk__in=chosen).exists()


def test_the_history_says_who_changed_what(admin_client):
    group = make_group("lab")
    admin_client.post(
        f"/admin/accounts/group/{group.pk}/change/", group_fields(name="lab", scheduler_weight="4")
    )
    newest = group.history.first()
    assert (newest.scheduler_weight, newest.history_user.username) == (4, "root")
    page = admin_client.get(f"/admin/accounts/group/{group.pk}/history/")
    assert page.status_code == 200
    assert "root" in page.content.decode()


def test_a_group_that_does_not_exist_is_told_so(admin_client):
    assert admin_client.get("/admin/accounts/group/x/delete/").status_code == 302
    assert admin_client.get("/admin/accounts/group/99999/delete/").status_code == 302
