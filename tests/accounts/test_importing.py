"""Users from a CSV file: checked row by row, saved whole or not at all."""

from __future__ import annotations

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from pytest_django import DjangoAssertNumQueries

from accounts.importing import MOST_BYTES, read, save
from accounts.models import Group, Quota, Role, User
from tests.factories import make_admin, make_quota, make_user

pytestmark = pytest.mark.django_db

URL = "/admin/accounts/user/import/"


@pytest.fixture
def admin_client(client: Client) -> Client:
    client.force_login(make_admin("root"))
    return client


def errors_of(text: str) -> list[str]:
    found = read(text)
    return found.errors + [f"{row.line} {error}" for row in found.rows for error in row.errors]


def test_a_file_makes_and_changes_users_with_quotas_and_history():
    make_user("ada", email="ada@old.example", group=Group.objects.get(name="student"))
    found = read(
        "username,email,group,role,weight_override,token_budget,budget_period\n"
        "ada,ada@new.example,faculty,,0.5,,\n"
        "bob,,staff,auditor,,1000,day\n"
    )
    assert found.is_valid
    assert [row.changes for row in found.rows] == [
        ["email ada@old.example → ada@new.example", "group student → faculty",
         "weight_override nothing → 0.5"],
        ["group nothing → staff", "role user → auditor", "token_budget nothing → 1000",
         "budget_period nothing → day"],
    ]  # fmt: skip
    assert not User.objects.filter(username="bob").exists()
    assert save(found, "term") == 2
    ada, bob = User.objects.get(username="ada"), User.objects.get(username="bob")
    assert (ada.email, ada.group.name, float(ada.quota.weight_override)) == (
        "ada@new.example",
        "faculty",
        0.5,
    )
    assert (bob.role, bob.is_staff, bob.has_usable_password()) == (Role.AUDITOR, True, False)
    assert (bob.quota.token_budget, bob.quota.budget_period) == (1000, "day")
    assert ada.history.first().history_change_reason == "term"
    assert bob.quota.history.get().token_budget == 1000
    again = read("username,role,weight_override\nbob,user,2\n")
    assert save(again, "back") == 1
    bob = User.objects.get(username="bob")
    assert (bob.role, bob.is_staff, bob.quota.weight_override) == (Role.USER, False, 2)
    assert [one.history_type for one in bob.quota.history.all()] == ["~", "+"]


def test_an_empty_cell_leaves_what_is_stored():
    make_quota(make_user("ada", email="ada@a.example"), max_concurrent=3)
    found = read("username;email;max_concurrent\nada;;\n")
    assert (found.is_valid, found.rows[0].changes) == (True, [])
    assert save(found, "") == 0
    assert Quota.objects.get().max_concurrent == 3


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("username,group\nada,nobody\n", "2 group: there is no group 'nobody'."),
        ("username,role\nada,king\n", "2 role: Select a valid choice. king is not one of the"),
        ("username,email\nada,at\n", "2 email: Enter a valid email address."),
        ("username,weight_override\nada,-1\n", "2 weight_override: Ensure this value is greater"),
        ("username,weight_override\nada,NaN\n", "2 weight_override: Enter a number."),
        ("username,max_wait\nada,inf\n", "2 max_wait: Enter a number."),
        ("username,is_active\nada,maybe\n", "2 is_active: must be yes or no."),
        ("username\nada\nada\n", "3 username: is already in line 2."),
        ("username,email\n,a@a.example\n", "2 username: is missing."),
        ("username\na b\n", "2 username: Enter a valid username."),
        ("username,email\nada\n", "2 The number of cells is not that of the columns."),
        ("username\nada,1\n", "2 The number of cells is not that of the columns."),
        ("name\nada\n", "There is no column username."),
        ("username,colour\nada,red\n", "Unknown columns: colour."),
        ("username,username\nada,ada\n", "A column is given twice."),
        ("username\n", "The file has 0 rows"),
        ("", "There is no column username."),
        ('username\n"ada\n', "After line 1: unexpected end of data."),
        ("username\na\0b\n", "The file is not text."),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text, error):
    assert any(one.startswith(error) for one in errors_of(text)), errors_of(text)


def test_the_last_superuser_is_not_disabled_by_a_file():
    make_admin("root")
    assert "last active superuser" in errors_of("username,is_active\nroot,no\n")[0]


def test_reading_five_thousand_rows_asks_the_database_three_times(
    django_assert_num_queries: DjangoAssertNumQueries,
):
    make_user("u7", email="u7@b.example")
    lines = "".join(f"u{n},u{n}@a.example,faculty\n" for n in range(5000))
    with django_assert_num_queries(3):
        found = read("username,email,group\n" + lines)
    assert found.counts() == {"new": 4999, "changed": 1, "unchanged": 0, "wrong": 0}


def test_saving_five_thousand_users_takes_few_statements():
    lines = "".join(f"u{n},faculty,2\n" for n in range(5000))
    found = read("username,group,weight_override\n" + lines)
    with CaptureQueriesContext(connection) as queries:
        assert save(found, "term") == 5000
    assert len(queries) < 400
    assert (Quota.history.count(), User.history.count()) == (5000, 5000)


def upload(client: Client, text: str | bytes, **fields):
    data = text.encode() if isinstance(text, str) else text
    return client.post(URL, {"file": SimpleUploadedFile("users.csv", data), **fields})


def test_a_file_is_shown_before_it_is_imported(admin_client):
    page = upload(admin_client, "\ufeffusername,group\nada,faculty\n", reason="new term")
    assert page.status_code == 200
    assert "1 new, 0 changed" in page.content.decode()
    assert not User.objects.filter(username="ada").exists()
    form = {"text": page.context["text"], "reason": page.context["reason"], "apply": "1"}
    answer = admin_client.post(URL, form)
    assert (answer.status_code, answer["Location"]) == (302, "/admin/accounts/user/")
    newest = User.objects.get(username="ada").history.first()
    assert (newest.history_user.username, newest.history_change_reason) == ("root", "new term")


def test_one_wrong_row_keeps_all_from_being_imported(admin_client):
    page = upload(admin_client, "username,group\nada,faculty\nbob,nobody\n", apply="1")
    text = page.content.decode()
    assert "there is no group &#x27;nobody&#x27;" in text
    assert 'name="apply"' not in text
    assert User.objects.count() == 1


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"username\n\xff\n", "not UTF-8"),
        (b"x" * (MOST_BYTES + 1), "larger than"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(admin_client, data, error):
    page = upload(admin_client, data)
    assert error in page.content.decode()


def test_nothing_chosen_is_an_error_of_the_form(admin_client):
    assert "Choose a file." in admin_client.post(URL, {"reason": "x"}).content.decode()
