"""The page of groups and shares, without a browser."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest
from django.test import Client

from accounts.models import Group, Role
from tests.factories import make_admin, make_group, make_user

pytestmark = pytest.mark.django_db


@pytest.fixture
def admin_client(client: Client) -> Client:
    client.force_login(make_admin("root"))
    return client


def set_weights(client: Client, **weights: str):
    """Send the form as a browser would: every field as the page shows it, but for ``weights``."""
    page = client.get("/admin/groups/").content.decode()
    form = re.search(r'<form[^>]*id="groups-form".*?</form>', page, re.DOTALL)
    fields = {}
    for tag in re.findall(r"<input[^>]*>", form[0]):
        name, value = re.search(r'name="([^"]*)"', tag), re.search(r'value="([^"]*)"', tag)
        if name:
            fields[name[1]] = value[1].replace("&quot;", '"') if value else ""
    for group, weight in weights.items():
        pk = Group.objects.get(name=group).pk
        assert f"group-{pk}-scheduler_weight" in fields
        fields[f"group-{pk}-scheduler_weight"] = weight
    return client.post("/admin/groups/", fields)


@pytest.mark.parametrize(
    ("text", "weight"),
    [
        ("0", Decimal(0)),
        ("", None),
        ("0.5", Decimal("0.5")),
        ("1e9", Decimal(10**9)),
        ("7", Decimal(7)),
    ],
)
def test_a_valid_weight_is_saved(admin_client, text, weight):
    answer = set_weights(admin_client, faculty=text)
    assert (answer.status_code, answer["Location"]) == (302, "/admin/groups/")
    assert Group.objects.get(name="faculty").scheduler_weight == weight


@pytest.mark.parametrize(
    "text", ["-1", "NaN", "nan", "Infinity", "three", "1000000000.000001", "1e999", "2e9"]
)
def test_an_invalid_weight_comes_back_with_its_error_and_nothing_is_saved(admin_client, text):
    answer = set_weights(admin_client, faculty=text, staff="5")
    assert answer.status_code == 200
    assert 'class="errorlist"' in answer.content.decode()
    assert Group.objects.get(name="faculty").scheduler_weight == 3
    assert Group.objects.get(name="staff").scheduler_weight == 2


def test_a_change_is_kept_in_the_history_with_its_author(admin_client):
    set_weights(admin_client, faculty="4")
    newest = Group.objects.get(name="faculty").history.first()
    assert (newest.scheduler_weight, newest.history_user.username) == (4, "root")


def test_a_page_left_open_overwrites_nobodys_later_edit(admin_client):
    page = admin_client.get("/admin/groups/").content.decode()
    faculty, staff = (Group.objects.get(name=name) for name in ("faculty", "staff"))
    known = re.search(rf'name="group-{faculty.pk}-known" value="([^"]*)"', page)[1].replace(
        "&quot;", '"'
    )
    faculty.scheduler_weight = 9
    faculty.save()
    admin_client.post(
        "/admin/groups/",
        {
            f"group-{faculty.pk}-scheduler_weight": "3",
            f"group-{faculty.pk}-known": known,
            f"group-{staff.pk}-scheduler_weight": "6",
        },
    )
    assert Group.objects.get(name="faculty").scheduler_weight == 9
    assert Group.objects.get(name="staff").scheduler_weight == 6


def test_a_group_can_be_added_and_renamed(admin_client):
    admin_client.post("/admin/groups/add/", {"name-new": "guests", "scheduler_weight-new": "0.5"})
    guests = Group.objects.get(name="guests")
    assert guests.scheduler_weight == Decimal("0.5")
    admin_client.post("/admin/groups/", {f"group-{guests.pk}-name": "visitors"})
    guests.refresh_from_db()
    assert (guests.name, guests.scheduler_weight) == ("visitors", Decimal("0.5"))


def test_two_rows_cannot_take_the_same_new_name(admin_client):
    staff, student = (Group.objects.get(name=name).pk for name in ("staff", "student"))
    answer = admin_client.post(
        "/admin/groups/", {f"group-{staff}-name": "people", f"group-{student}-name": "people"}
    )
    assert answer.status_code == 200
    assert answer.content.decode().count("Another row has this name.") == 2
    assert not Group.objects.filter(name="people").exists()


def test_a_group_deleted_meanwhile_is_left_out(admin_client):
    answer = admin_client.post("/admin/groups/", {"group-99999-scheduler_weight": "9"}, follow=True)
    assert "Nothing was changed." in answer.content.decode()


def test_a_refused_new_group_comes_back_with_its_errors(admin_client):
    answer = admin_client.post(
        "/admin/groups/add/", {"name-new": "staff", "scheduler_weight-new": "NaN"}
    )
    assert answer.status_code == 200
    assert set(answer.context["new"].errors) == {"name", "scheduler_weight"}
    assert Group.objects.count() == 4


def test_each_group_has_one_field_whose_name_ends_in_scheduler_weight(admin_client):
    page = admin_client.get("/admin/groups/").content.decode()
    assert len(re.findall(r'name="[^"]*scheduler_weight"', page)) == Group.objects.count() == 4


def test_a_garbled_hidden_field_is_no_harm(admin_client):
    pk = Group.objects.get(name="staff").pk
    admin_client.post(
        "/admin/groups/", {f"group-{pk}-known": "}{", f"group-{pk}-scheduler_weight": "6"}
    )
    assert Group.objects.get(name="staff").scheduler_weight == 6


@pytest.mark.parametrize("role", [Role.AUDITOR, Role.OPERATOR])
def test_who_may_only_read_sees_disabled_fields_and_is_refused_a_change(client, role):
    client.force_login(make_user("reader", is_staff=True, role=role))
    page = client.get("/admin/groups/").content.decode()
    weights = re.findall(r"<input[^>]*scheduler_weight[^>]*>", page)
    assert len(weights) == 4
    assert all("disabled" in tag for tag in weights)
    faculty = Group.objects.get(name="faculty")
    answer = client.post("/admin/groups/", {f"group-{faculty.pk}-scheduler_weight": "9"})
    assert answer.status_code == 403
    assert client.post("/admin/groups/add/", {"name-new": "x"}).status_code == 403
    faculty.refresh_from_db()
    assert faculty.scheduler_weight == 3


def test_staff_without_a_role_reads_like_an_auditor(client):
    client.force_login(make_user("clerk", is_staff=True))
    assert client.get("/admin/groups/").status_code == 200
    assert client.post("/admin/groups/", {}).status_code == 403


def test_who_is_not_signed_in_is_sent_to_the_sign_in_page(client):
    answer = client.get("/admin/groups/")
    assert (answer.status_code, answer["Location"]) == (302, "/admin/login/?next=/admin/groups/")


def test_the_shares_of_weight_add_up(admin_client):
    Group.objects.all().delete()
    for name, weight in (("faculty", 3), ("staff", 2), ("student", 1)):
        make_group(name, scheduler_weight=weight)
    page = admin_client.get("/admin/groups/").content.decode()
    shares = re.findall(r'<td class="mr-number">([\d.]+)\xa0%</td>', page)
    assert shares == ["50", "33.3", "16.7"]
