"""The history of the configuration: what it shows, to whom, and taking a change back."""

from __future__ import annotations

from decimal import Decimal

import pytest
from django.test import Client

from accounts.models import Group, Role, User
from scheduler.changes import PAGE_ROWS, TRACKED, changes
from scheduler.models import SiteSettings
from tests.factories import (
    make_admin,
    make_api_key,
    make_backend,
    make_group,
    make_quota,
    make_user,
)

pytestmark = pytest.mark.django_db


@pytest.fixture
def root(client: Client) -> Client:
    client.force_login(make_admin("root"))
    return client


def weigh(group: Group, weight: int, why: str = "") -> None:
    group.scheduler_weight = weight
    group._change_reason = why
    group.save()


def newest(kind: str = ""):
    return changes(User.objects.get(username="root"), kind=kind)[0][0]


def revert(client: Client, kind: str, history_id: int) -> str:
    answer = client.post(f"/admin/history/{kind}/{history_id}/", follow=True)
    return answer.content.decode()


def test_a_change_shows_who_what_before_after_and_why(root):
    group = make_group("physics", scheduler_weight=3)
    pk = group.pk
    root.post(
        "/admin/groups/",
        {f"group-{pk}-scheduler_weight": "4.5", "reason": "new hires"},
    )
    change = newest("group")
    assert (change.what, change.who, change.reason) == ("physics", "root", "new hires")
    assert [(one.before, one.after) for one in change.values] == [("3", "4.5")]
    page = root.get("/admin/history/").content.decode()
    assert "<strong>4.5</strong>" in page
    assert "new hires" in page


def test_every_kind_of_row_is_followed(root):
    group = make_group("physics")
    user = make_user("ada", group=group)
    make_quota(user, weight_override=2)
    make_api_key(user, name="laptop")
    make_backend("gpu-1", models=("m",))
    SiteSettings.objects.create(pk=1, share_mode="group")
    made = {one.kind: one.what for one in changes(User.objects.get(username="root"))[0]}
    assert made | {"user": "ada"} == made | {
        "group": "physics",
        "user": "ada",
        "quota": "ada",
        "key": "laptop",
        "backend": "gpu-1",
        "model": "m on gpu-1",
        "settings": "",
    }


def test_a_change_from_a_scenario_links_to_it(root):
    weigh(make_group("physics"), 7, "What-if 12: more for physics")
    assert newest("group").what_if_id == 12
    assert 'href="/admin/what-if/12/"' in root.get("/admin/history/").content.decode()


def test_a_reference_shows_the_name_of_what_it_pointed_to(root):
    one, two = make_group("physics"), make_group("history")
    user = make_user("ada", group=one)
    user.group = two
    user.save()
    (value,) = newest("user").values
    assert (value.name, value.before, value.after) == ("group", "physics", "history")


def test_a_change_is_taken_back_and_that_is_a_change_too(root):
    group = make_group("physics", scheduler_weight=3)
    weigh(group, 9)
    page = revert(root, "group", newest("group").history_id)
    assert "Taken back: scheduler weight 9 → 3." in page
    group.refresh_from_db()
    assert group.scheduler_weight == Decimal(3)
    change = newest("group")
    assert change.who == "root"
    assert change.reason.startswith("Takes back the change of ")


def test_other_columns_changed_since_are_kept(root):
    group = make_group("physics", scheduler_weight=3)
    weigh(group, 9)
    wanted = newest("group").history_id
    group.description = "atoms"
    group.save()
    revert(root, "group", wanted)
    group.refresh_from_db()
    assert (group.scheduler_weight, group.description) == (3, "atoms")


def test_what_was_changed_again_or_deleted_since_is_not_taken_back(root):
    group = make_group("physics", scheduler_weight=3)
    weigh(group, 9)
    first = newest("group").history_id
    weigh(group, 11)
    assert "has been changed again since" in revert(root, "group", first)
    group.refresh_from_db()
    assert group.scheduler_weight == 11
    group.delete()
    assert "has been deleted" in revert(root, "group", first)


def test_a_value_that_is_not_allowed_any_more_is_not_put_back(root):
    group = make_group("physics")
    group.name = "chemistry"
    group.save()
    wanted = newest("group").history_id
    make_group("physics")
    assert "Not taken back" in revert(root, "group", wanted)
    group.refresh_from_db()
    assert group.name == "chemistry"


def test_what_was_made_or_never_was_cannot_be_taken_back(root):
    made = make_group("physics").history.get()
    assert "There is no such change." in revert(root, "group", made.history_id)
    assert "There is no such change." in revert(root, "group", 999999)
    assert root.post("/admin/history/nonsense/1/").status_code == 404
    assert root.get("/admin/history/group/1/").status_code == 405


def test_pages_follow_one_another_without_a_gap(root):
    group = make_group("physics", scheduler_weight=1)
    for weight in range(2, PAGE_ROWS + 20):
        weigh(group, weight)
    reader = User.objects.get(username="root")
    first, further = changes(reader, kind="group")
    second, end = changes(reader, kind="group", before=further)
    assert len(first) == PAGE_ROWS
    seen = [one.history_id for one in first + second]
    assert seen == sorted(set(seen), reverse=True)
    assert [one.values[0].after for one in first[:2]] == ["69", "68"]
    assert end is None
    assert "Older" in root.get("/admin/history/?kind=group").content.decode()


@pytest.mark.parametrize("query", ["kind=nonsense", "before=x", "before=2026-01-01", "before=9999"])
def test_odd_parameters_are_left_out(root, query):
    assert root.get(f"/admin/history/?{query}").status_code == 200


def test_secrets_are_not_in_it(root):
    ada = make_user("ada", password="a-long-enough-one")
    make_api_key(ada, name="laptop")
    ada.set_password("another-long-one")
    ada.save()
    page = root.get("/admin/history/").content.decode()
    assert "argon2" not in page
    assert ada.api_keys.get().sha256 not in page


def test_operators_take_back_changes_of_backends_only_and_auditors_none(client):
    gpu, group = make_backend("gpu-1", max_concurrent=4), make_group("physics")
    gpu.max_concurrent = 8
    gpu.save()
    weigh(group, 5)
    ids = {kind: TRACKED[kind][0].history.first().history_id for kind in ("backend", "group")}
    for role, allowed in ((Role.AUDITOR, set()), (Role.OPERATOR, {"backend"})):
        client.force_login(make_user(f"the-{role}", is_staff=True, role=role))
        assert client.get("/admin/history/").status_code == 200
        for kind, history_id in ids.items():
            status = client.post(f"/admin/history/{kind}/{history_id}/").status_code
            assert status == (302 if kind in allowed else 403)
    gpu.refresh_from_db()
    assert gpu.max_concurrent == 4


def test_many_changes_take_no_more_queries(root, django_assert_max_num_queries):
    user = make_user("ada", group=make_group("physics"))
    make_quota(user)
    make_backend("gpu-1")
    for number in range(30):
        weigh(user.group, number)
        make_user(group=user.group)
        make_backend(f"backend-{number}-x")
    # Session and user, and for each kind its changes and the versions before them.
    with django_assert_max_num_queries(2 + 2 * len(TRACKED)):
        root.get("/admin/history/")
