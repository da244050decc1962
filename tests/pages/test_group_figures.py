"""The figures of groups and of the first page, from a real scheduler."""

from __future__ import annotations

import pytest
from django.test import Client

from accounts.models import Group, User
from scheduler import services
from scheduler.models import SiteSettings
from scheduler.standing import GroupFigures, group_figures, overview
from tests.factories import make_admin, make_backend, make_group, make_quota, make_user
from tests.pages.live import Cluster

pytestmark = pytest.mark.django_db


@pytest.fixture
def people() -> dict[str, User]:
    """3:2:1 with 1, 2 and 5 members, as in rule R14."""
    Group.objects.all().delete()
    found = {}
    for name, weight, members in (("faculty", 3, 1), ("staff", 2, 2), ("student", 1, 5)):
        group = make_group(name, scheduler_weight=weight)
        for number in range(members):
            found[f"{name}-{number}"] = make_user(f"{name}-{number}", group=group)
    return found


def by_name(figures: list[GroupFigures]) -> dict[str, GroupFigures]:
    return {one.name: one for one in figures}


def test_in_user_mode_a_groups_share_now_is_its_weight_times_its_busy_members(people):
    cluster = Cluster(slots=2)
    for user in people.values():
        cluster.ask(user)
    figures = by_name(group_figures(cluster.view()))
    shares = {name: round(one.entitled_now or 0, 4) for name, one in figures.items()}
    assert shares == {"faculty": 0.25, "staff": 0.3333, "student": 0.4167}
    assert {name: one.active_members for name, one in figures.items()} == {
        "faculty": 1,
        "staff": 2,
        "student": 5,
    }


def test_in_group_mode_it_is_the_weight_however_many_are_busy(people):
    SiteSettings.objects.create(pk=1, share_mode="group")
    cluster = Cluster(slots=2, share_mode="group")
    for user in people.values():
        cluster.ask(user)
    figures = by_name(group_figures(cluster.view()))
    shares = {name: round(one.entitled_now or 0, 4) for name, one in figures.items()}
    assert shares == {"faculty": 0.5, "staff": 0.3333, "student": 0.1667}


def test_the_share_of_weight_counts_every_group_once(people):
    figures = by_name(group_figures(None))
    shares = {name: round(one.entitled_all or 0, 4) for name, one in figures.items()}
    assert shares == {"faculty": 0.5, "staff": 0.3333, "student": 0.1667}
    assert {name: one.members for name, one in figures.items()} == {
        "faculty": 1,
        "staff": 2,
        "student": 5,
    }


def test_only_busy_groups_have_a_share_now(people):
    cluster = Cluster(slots=1)
    cluster.ask(people["staff-0"], jobs=3)
    figures = by_name(group_figures(cluster.view()))
    assert figures["staff"].entitled_now == 1.0
    assert (figures["staff"].running, figures["staff"].queued) == (1, 2)
    assert figures["faculty"].entitled_now is None
    assert (figures["faculty"].running, figures["faculty"].queued) == (0, 0)


def test_received_is_the_share_of_settled_tokens(people):
    cluster = Cluster(slots=2)
    (first,) = cluster.ask(people["faculty-0"])
    (second,) = cluster.ask(people["student-0"])
    cluster.settle(first, tokens=300)
    cluster.settle(second, tokens=100)
    figures = by_name(group_figures(cluster.view()))
    assert {name: one.received for name, one in figures.items()} == {
        "faculty": 0.75,
        "staff": 0.0,
        "student": 0.25,
    }
    assert {one.active_members for one in figures.values()} == {0}  # all has been answered
    assert {one.entitled_now for one in figures.values()} == {None}


def test_a_weight_override_counts_instead_of_the_groups_weight(people):
    make_quota(people["student-0"], weight_override=3)
    cluster = Cluster(slots=1)
    cluster.ask(people["student-0"])
    cluster.ask(people["faculty-0"])
    figures = by_name(group_figures(cluster.view()))
    assert (figures["student"].entitled_now, figures["faculty"].entitled_now) == (0.5, 0.5)


def test_background_groups_have_no_share_beside_others_and_split_what_is_left_among_users(people):
    Group.objects.filter(name__in=["faculty", "staff"]).update(scheduler_weight=0)
    cluster = Cluster(slots=1)
    for name in ("faculty-0", "staff-0", "staff-1"):
        cluster.ask(people[name])
    figures = by_name(group_figures(cluster.view()))
    assert round(figures["staff"].entitled_now or 0, 4) == 0.6667
    cluster.ask(people["student-0"])
    figures = by_name(group_figures(cluster.view()))
    assert (figures["student"].entitled_now, figures["staff"].entitled_now) == (1.0, 0.0)


def test_users_without_a_group_have_a_row_of_their_own_while_they_count(people):
    loner = make_user("loner")
    cluster = Cluster(slots=1)
    assert None not in [one.group_id for one in group_figures(cluster.view())]
    cluster.ask(loner)
    (row,) = [one for one in group_figures(cluster.view()) if one.group_id is None]
    assert (row.running, row.entitled_now) == (1, 1.0)


def test_a_group_without_a_weight_falls_back_to_the_environments(people, settings):
    settings.SCHEDULER_WEIGHT_STUDENT = 1.5
    Group.objects.filter(name="student").update(scheduler_weight=None)
    row = by_name(group_figures(None))["student"]
    assert (row.weight, row.weight_is_fallback) == (1.5, True)


def test_the_figures_take_the_same_few_queries_however_many_groups(
    people, django_assert_num_queries
):
    cluster = Cluster(slots=2)
    for user in people.values():
        cluster.ask(user)
    view = cluster.view()
    with django_assert_num_queries(3):
        group_figures(view)
    for _ in range(30):
        make_user(group=make_group())
    with django_assert_num_queries(3):
        group_figures(view)


def test_without_a_scheduler_there_are_no_live_figures(people):
    row = by_name(group_figures(None))["faculty"]
    assert (row.entitled_now, row.received, row.queued, row.running) == (None, None, None, None)
    figures = overview(None)
    assert (figures.groups, figures.queued, figures.tokens_per_second) == (3, None, None)


def test_the_first_page_adds_the_cluster_up(people, django_assert_num_queries):
    make_backend("gpu-1")
    make_backend("gpu-2")
    cluster = Cluster(slots=1)
    (lease, *_) = cluster.ask(people["faculty-0"], jobs=3)
    cluster.settle(lease, tokens=600)
    cluster.ask(people["staff-0"], jobs=1)
    view = cluster.view()
    with django_assert_num_queries(3):
        figures = overview(view)
    assert (figures.groups, figures.backends, figures.busy_users) == (3, 2, 2)
    assert (figures.queued, figures.running) == (2, 1)
    assert figures.tokens_per_second == 2.0  # 600 tokens in a window of 300 s


def test_the_pages_show_the_running_schedulers_figures(people, client: Client, monkeypatch):
    cluster = Cluster(slots=1)
    cluster.ask(people["staff-0"], jobs=3)
    monkeypatch.setattr(services, "live", cluster.view)
    client.force_login(make_admin("root"))
    staff = people["staff-0"].group
    assert staff is not None
    for address in ("/admin/groups/", "/admin/groups/figures/"):
        page = client.get(address).content.decode()
        assert f'id="now-{staff.pk}"' in page
        assert "100\xa0%" in page
        assert "No scheduler runs" not in page
    cards = client.get("/admin/figures/").content.decode()
    assert "<strong>2</strong> waiting, <strong>1</strong> running" in cards


def test_the_pages_say_so_when_no_scheduler_runs(client: Client):
    client.force_login(make_admin("root"))
    for address in ("/admin/", "/admin/groups/"):
        assert "No scheduler runs in this process" in client.get(address).content.decode()


def test_the_refreshed_figures_contain_no_input(client: Client):
    client.force_login(make_admin("root"))
    page = client.get("/admin/groups/figures/").content.decode()
    assert "<input" not in page
    assert page.count('hx-swap-oob="true"') == 20  # five figures of the four first groups
