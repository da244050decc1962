"""Timed boosts on the pages: shown, made, ended early; and by whom."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from accounts.models import Boost, Group, Role
from scheduler import timelines
from scheduler.standing import group_figures
from tests.factories import make_admin, make_boost, make_group, make_user

pytestmark = pytest.mark.django_db


@pytest.fixture
def physics() -> Group:
    Group.objects.all().delete()
    return make_group("physics", scheduler_weight=3)


@pytest.fixture
def root(client: Client) -> Client:
    client.force_login(make_admin("root"), "accounts.authentication.RoleBackend")
    return client


def form(**fields: str) -> dict[str, str]:
    return {
        "name": "class project",
        "factor": "2",
        "starts_at_0": "2026-01-01",
        "starts_at_1": "08:00:00",
        "ends_at_0": "2040-01-01",
        "ends_at_1": "18:00:00",
    } | fields


def test_a_boost_made_in_the_admin_shows_on_the_groups_page(root, physics):
    answer = root.post("/admin/accounts/boost/add/", form(group=str(physics.pk)))
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    boost = Boost.objects.get()
    assert (boost.group, boost.made_by.username) == (physics, "root")
    page = root.get("/admin/groups/").content.decode()
    assert "×2 until Sun 1 Jan 18:00 UTC: class project" in page
    assert "in force: <strong>6</strong>" in page
    assert "class project" in root.get("/admin/history/").content.decode()


def test_the_form_says_in_which_zone_times_are(root):
    root.cookies["mindrouter-zone"] = "Asia/Tokyo"
    assert "In the zone Asia/Tokyo." in root.get("/admin/accounts/boost/add/").content.decode()


def test_a_boost_of_a_user_is_made_by_the_users_name_and_edited(root, physics):
    make_user("ada", group=physics)
    root.post("/admin/accounts/boost/add/", form(username="ada"))
    boost = Boost.objects.get()
    assert boost.user.username == "ada"
    page = root.get(f"/admin/accounts/boost/{boost.pk}/change/").content.decode()
    assert 'value="ada"' in page
    root.post(f"/admin/accounts/boost/{boost.pk}/change/", form(username="ada", factor="0.5"))
    boost.refresh_from_db()
    assert boost.factor == 0.5


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"username": "nobody"}, "There is no such user."),
        ({}, "either a group or one user"),
        ({"username": "ada", "ends_at_0": "2025-01-01"}, "must end after it begins"),
        ({"username": "ada", "factor": "-1"}, "greater than or equal to 0"),
        ({"username": "ada", "factor": "NaN"}, "Enter a number"),
    ],
)
def test_a_wrong_boost_is_shown_with_its_error(root, physics, fields, error):
    make_user("ada")
    page = root.post("/admin/accounts/boost/add/", form(**fields))
    assert page.status_code == 200
    assert error in page.content.decode()
    assert not Boost.objects.exists()


def test_a_boost_is_ended_on_the_groups_page(root, physics):
    boost = make_boost(group=physics)
    coming = make_boost(group=physics, starts_at=timezone.now() + timedelta(hours=1))
    page = root.post(f"/admin/groups/boosts/{boost.pk}/end/", follow=True).content.decode()
    assert "is over" in page
    boost.refresh_from_db()
    assert boost.ends_at <= timezone.now()
    root.post(f"/admin/groups/boosts/{coming.pk}/end/")
    assert list(Boost.objects.all()) == [boost]
    assert group_figures(None)[0].weight == 3.0


def test_several_boosts_are_ended_from_the_list(root, physics):
    ids = [make_boost(group=physics).pk for _ in range(2)]
    root.post("/admin/accounts/boost/", {"action": "end_now", "_selected_action": ids})
    assert all(one.ends_at <= timezone.now() for one in Boost.objects.all())


def test_a_boosted_group_counts_with_its_weight_in_force(physics):
    make_group("student", scheduler_weight=6)
    make_boost(group=physics, factor=2)
    make_boost(group=physics, factor=9, starts_at=timezone.now() + timedelta(hours=1))
    row = next(one for one in group_figures(None) if one.name == "physics")
    assert (row.own_weight, row.weight, row.entitled_all) == (3.0, 6.0, 0.5)


@pytest.mark.parametrize("role", [Role.OPERATOR, Role.AUDITOR, Role.USER])
def test_only_superusers_end_boosts(client, physics, role):
    boost = make_boost(group=physics)
    client.force_login(make_user("somebody", role=role), "accounts.authentication.RoleBackend")
    answer = client.post(f"/admin/groups/boosts/{boost.pk}/end/")
    assert answer.status_code == (302 if role == Role.USER else 403)
    boost.refresh_from_db()
    assert boost.ends_at > timezone.now()
    if role != Role.USER:
        page = client.get("/admin/groups/").content.decode()
        assert "End now" not in page
        assert boost.name in page


def test_beginnings_and_ends_are_marked_on_the_charts(physics):
    now = timezone.now()
    start, end = now - timedelta(minutes=30), now - timedelta(minutes=10)
    make_boost(name="project", group=physics, factor=2, starts_at=start, ends_at=end)
    make_boost(name="later", group=physics, starts_at=now + timedelta(minutes=5))
    marks = timelines.markers(make_admin("root"), hours=1)
    assert (start.timestamp(), "boost project: ×2 for group physics begins") in marks
    assert (end.timestamp(), "boost project: ×2 for group physics ends") in marks
    assert not [text for _, text in marks if "later" in text and "begins" in text]
    assert marks == sorted(marks)
    assert timelines.markers(make_user("nobody"), hours=1) == []
