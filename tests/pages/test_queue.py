"""The queue's page: rows, order, filters, windows, and removing a request."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from unittest.mock import patch

import msgspec
import pytest
from django.test import Client

from accounts.models import Group, Role, User
from scheduler import services
from scheduler.core.picture import FlowPicture
from scheduler.runtime import Runtime, save_state
from scheduler.serving import QueuePicture
from scheduler.waiting_list import Filter, window
from tests.factories import make_admin, make_group, make_user
from tests.pages.live import Cluster
from tests.running import RunningRouter
from tests.stubs.openai_stub import OpenAIStub

NOW = 100.0


def flow(username: str = "ada", jobs: int = 1, **fields) -> FlowPicture:
    """``jobs`` waiting requests of one user, each 10 after the other in the order of service."""
    values = {
        "user_id": 1,
        "unit": 1,
        "username": username,
        "group": "staff",
        "model_name": "m",
        "weight": 1.0,
        "deficit": 0.0,
        "burst_credits": 0.0,
        "factor": 1.0,
        "wait_bonus": 0.0,
        "priority": 0.0,
        "pool": 1,
        "first": 0.0,
        "step": 10.0,
        "per_second": 2.0,
        "jobs": tuple((n, NOW - 5 + n, f"{username}-{n}") for n in range(jobs)),
    }
    return FlowPicture(**(values | fields))


def ids(found) -> list[str]:
    return [row.request_id for row in found.rows]


# ---- order, filters and windows


def test_rows_are_in_the_order_of_service_and_say_when_they_are_served():
    found = window([flow("ada", 3), flow("bob", 2, first=5.0)], NOW)
    assert ids(found) == ["ada-0", "bob-0", "ada-1", "bob-1", "ada-2"]
    assert [row.position for row in found.rows] == [1, 2, 3, 4, 5]
    assert [row.estimate_seconds for row in found.rows] == [0.5, 1.0, 1.5, 2.0, 2.5]
    assert found.rows[0].waited_seconds == 5.0


def test_each_set_of_backends_counts_its_own_positions():
    found = window([flow("ada", 2), flow("bob", 2, pool=2, first=900.0)], NOW)
    assert [(row.request_id, row.position) for row in found.rows] == [
        ("ada-0", 1), ("bob-0", 1), ("ada-1", 2), ("bob-1", 2),
    ]  # fmt: skip


def test_background_comes_after_everybody_else():
    found = window([flow("low", 1, weight=0.0, first=-50.0), flow("ada", 1)], NOW)
    assert ids(found) == ["ada-0", "low-0"]


@pytest.mark.parametrize(
    ("sort", "descending", "first"),
    [
        ("position", True, "bob-1"),
        ("waited", False, "ada-0"),
        ("waited", True, "bob-1"),
        ("user", True, "bob-1"),
        ("priority", False, "bob-0"),
        ("deficit", False, "bob-0"),
        ("weight", False, "ada-0"),
    ],
)
def test_rows_are_sorted_by_any_column_either_way(sort, descending, first):
    bobs = flow("bob", first=5.0, priority=9.0, deficit=7.0)
    bobs = replace(bobs, jobs=((0, NOW - 2, "bob-0"), (1, NOW - 1, "bob-1")))
    flows = [flow("ada", 2, weight=3.0), bobs]
    assert ids(window(flows, NOW, sort=sort, descending=descending))[0] == first


def test_a_filter_keeps_the_positions_of_the_whole_queue():
    flows = [flow("ada", 2), flow("bob", 2, first=5.0, group=None, model_name="n")]
    for wanted in (Filter(user="BO"), Filter(group="(no group)"), Filter(model="n")):
        found = window(flows, NOW, wanted=wanted)
        assert [(row.request_id, row.position) for row in found.rows] == [
            ("bob-0", 2),
            ("bob-1", 4),
        ]
        assert (found.matching, found.total) == (2, 4)
    assert found.groups == {"(no group)": 2, "staff": 2}
    assert found.models == {"m": 2, "n": 2}


def test_no_more_than_a_hundred_rows_are_given_and_a_start_beyond_the_end_is_the_last_window():
    flows = [flow("ada", 250)]
    assert [len(window(flows, NOW, start=start).rows) for start in (0, 200, 9999)] == [100, 50, 50]
    assert window(flows, NOW, start=100).rows[0].request_id == "ada-100"
    assert window([], NOW, start=100).rows == []


# ---- the picture


@pytest.mark.django_db
def test_a_picture_says_of_every_waiting_request_what_the_scheduler_itself_says():
    Group.objects.all().delete()
    cluster = Cluster(slots=2)
    for name, weight in (("faculty", 3), ("student", 1), ("background", 0)):
        group = make_group(name, scheduler_weight=weight)
        cluster_user = make_user(name, group=group)
        assert cluster_user.pk
    cluster = Cluster(slots=2)
    for user in User.objects.all():
        cluster.ask(user, 300)
    queue = cluster.scheduler.queue(0.0)
    flows = [one for part in cluster.scheduler.queue_parts(0.0) for one in part]
    rows = [row for n in range(0, 900, 100) for row in window(flows, 0.0, start=n).rows]
    assert len(rows) == 898
    assert [(row.request_id, row.position) for row in rows] == [
        (view.request_id, view.position) for view in queue
    ]
    for row, view in zip(rows, queue, strict=True):
        names = ("deficit", "burst_credits", "weight", "factor", "wait_bonus", "priority")
        assert [getattr(row.flow, n) for n in names] == [getattr(view, n) for n in names]


@pytest.mark.django_db
def test_the_scheduler_may_serve_others_between_the_parts_of_a_picture():
    ada, bob = make_user("ada"), make_user("bob")
    cluster = Cluster(slots=1)
    (running,) = cluster.ask(ada, 1)
    cluster.ask(ada, 250)
    cluster.ask(bob, 1)
    parts = cluster.scheduler.queue_parts(0.0)
    first = next(parts)
    cluster.settle(running, 20)
    cluster.scheduler.pump(0.0)  # bob's only request leaves the queue
    rest = [one for part in parts for one in part]
    assert {one.username for one in [*first, *rest]} <= {"ada", "bob"}
    assert sum(len(one.jobs) for one in [*first, *rest]) in (249, 250, 251)


# ---- the page


@pytest.fixture
def busy(monkeypatch) -> list[FlowPicture]:
    """A running scheduler with a queue that a test may change."""
    flows = [flow("ada", 250), flow("bob", 1, group=None, model_name="n", deficit=-1234.0)]
    monkeypatch.setattr(services, "queue_picture", lambda: QueuePicture(NOW, flows))
    return flows


@pytest.mark.django_db
def test_the_page_shows_each_part_of_the_priority_and_at_most_a_hundred_rows(client, busy):
    client.force_login(make_admin())
    page = client.get("/admin/queue/").content.decode()
    assert page.count("<tr>") == 101
    assert "251" in page
    assert "start=100" in page
    last = client.get("/admin/queue/?sort=deficit&start=200").content.decode()
    assert "−1,234" in last
    assert last.index("ada-249") < last.index("bob-0")


@pytest.mark.django_db
@pytest.mark.parametrize(
    "query", ["sort=nonsense", "sort=-", "start=-5", "start=x", "start=" + "9" * 40]
)
def test_odd_parameters_are_left_out(client, busy, query):
    client.force_login(make_admin())
    assert client.get(f"/admin/queue/?{query}").status_code == 200


@pytest.mark.django_db
def test_a_name_is_shown_as_text(client, busy):
    busy.append(flow("<script>alert(1)</script>", first=-1.0))
    client.force_login(make_admin())
    assert "<script>alert(1)" not in client.get("/admin/queue/rows/").content.decode()


@pytest.mark.django_db
def test_without_a_scheduler_the_page_says_so_and_when_nothing_waits_too(client, monkeypatch):
    client.force_login(make_admin())
    assert "No scheduler runs" in client.get("/admin/queue/").content.decode()
    monkeypatch.setattr(services, "queue_picture", lambda: QueuePicture(NOW, []))
    assert "Nothing waits." in client.get("/admin/queue/").content.decode()


@pytest.mark.django_db
def test_ten_thousand_waiting_requests_take_no_more_queries_than_one(
    client, busy, django_assert_num_queries
):
    client.force_login(make_admin())
    busy[:] = [flow(f"user-{n}", 1) for n in range(10_000)]
    with django_assert_num_queries(2):  # the session and the user
        page = client.get("/admin/queue/")
    assert page.content.decode().count("<tr>") == 101


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("role", "reads", "cancels"),
    [(Role.OPERATOR, 200, 302), (Role.AUDITOR, 200, 403), (Role.USER, 302, 302)],
)
def test_operators_remove_requests_and_auditors_only_look(
    client, busy, monkeypatch, role, reads, cancels
):
    monkeypatch.setattr(services, "evict", lambda request_id: True)
    client.force_login(make_user("somebody", role=role, is_staff=role != Role.USER))
    page = client.get("/admin/queue/")
    assert page.status_code == reads  # who is nobody is sent to the login
    assert ("cancel-ada-0" in page.content.decode()) is (role == Role.OPERATOR)
    assert client.get("/admin/queue/rows/").status_code == reads
    answer = client.post("/admin/queue/cancel/", {"request_id": "ada-0"})
    assert answer.status_code == cancels
    assert client.get("/admin/queue/cancel/").status_code in (405, 302)


@pytest.mark.django_db
def test_after_removing_one_the_same_rows_are_shown_and_what_became_of_it(client, busy):
    client.force_login(make_admin())
    answer = client.post(
        "/admin/queue/cancel/",
        {"request_id": "gone", "query": "user=ada&sort=waited&next=https://elsewhere"},
        follow=True,
    )
    assert answer.redirect_chain == [("/admin/queue/?user=ada&sort=waited", 302)]
    assert "Request gone does not wait any more." in answer.content.decode()


# ---- with the real router


@pytest.fixture
async def full(router: RunningRouter, stub: OpenAIStub, backend: int) -> RunningRouter:
    """A router whose one backend takes nothing, so that everything waits."""
    from backends.models import Backend

    await router.change(Backend.objects.filter(pk=backend).update, paused=True)
    return router


async def test_a_request_that_is_removed_on_the_page_gets_an_error(full: RunningRouter):
    client = Client()
    await full.ask(lambda: client.force_login(make_admin("root")))
    request = asyncio.create_task(full.chat())
    await full.until_waiting(1)
    page = (await full.ask(client.get, "/admin/queue/")).content.decode()
    request_id = re.search(r'id="cancel-([^"]+)"', page)[1]
    assert ">ada" in page
    answer = await full.ask(client.post, "/admin/queue/cancel/", {"request_id": request_id})
    assert answer.status_code == 302
    refused = await request
    assert refused.status_code == 403
    assert "administrator" in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert full.waiting == 0


async def _look_at_queue(runtime: Runtime) -> int:
    return len((await runtime._take_picture()).flows)


async def _look_at_statistics(runtime: Runtime) -> int:
    return (await runtime._current_view()).stats.queue_total


async def _save_shares(runtime: Runtime) -> int:
    saved, ask = [], runtime._ask_database

    async def instead(question: Callable, *args: dict) -> object:
        if question is not save_state:
            return await ask(question, *args)
        return saved.append(args[0])

    with patch.object(runtime, "_ask_database", instead):
        runtime._settled = True
        await runtime._save_checkpoint()
    return len(msgspec.json.decode(saved[0]["units"]))


@pytest.mark.parametrize("look", [_look_at_queue, _look_at_statistics, _save_shares])
async def test_a_look_at_many_waiting_users_holds_up_nobody(
    full: RunningRouter, look: Callable[[Runtime], Awaitable[int]]
):
    from scheduler.core.jobs import Job

    runtime = full.runtime
    (user_id,) = runtime.snapshot.users
    scheduler, now = runtime.scheduler, time.monotonic()
    await full.change(_allow_any_queue)
    tickets = []
    for n in range(3000):
        job = Job(request_id=f"r-{n}", user_id=user_id, unit=(user_id, f"e-{n}"), model_name="m")
        tickets.append(scheduler.submit(job, now))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    seen = await look(runtime)
    task.cancel()
    for ticket in tickets:
        scheduler.cancel(ticket, time.monotonic())
    assert seen == 3000
    assert turns >= 15  # once after each part of about 200


def _allow_any_queue() -> None:
    from backends.models import Backend

    Backend.objects.update(max_queue=100_000)
