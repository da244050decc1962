"""The first page: shares, gap, backends, refusals; as a page, by poll and over a WebSocket."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import websockets
from django.core.cache import cache
from django.test import Client
from django.utils import timezone

from accounts.models import Group, Role, User
from backends.models import Backend, BackendStatus
from scheduler import consumers, services
from scheduler.core.views import BackendView
from scheduler.models import ClusterMinute, ShareMinute
from scheduler.overview import Waits, attention, backend_rows, refusals, waits
from scheduler.serving import LiveView
from tests.factories import make_admin, make_backend, make_decision, make_group, make_user
from tests.pages.live import Cluster
from tests.running import RunningRouter

PAGES = ("/admin/", "/admin/figures/")


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    cache.clear()


def view(*backends: BackendView) -> LiveView:
    stats = Cluster(slots=1).view()
    return LiveView(
        taken_at=0.0,
        stats=stats.stats,
        backends=list(backends),
        shares=[],
        gap=0.0,
        gap_bound=0.0,
        configuration_version=1,
    )


def live_backend(row: Backend, **fields) -> BackendView:
    values = {
        "id": row.pk,
        "name": row.name,
        "in_flight": 0,
        "queued": 0,
        "max_concurrent": 4,
        "state": "ready",
        "observed_age_seconds": 1.0,
        "failed_for_seconds": None,
        "foreign": 0,
    }
    return BackendView(**(values | fields))


def polled(row: Backend, seconds_ago: float = 1.0, **fields) -> None:
    observed = timezone.now() - timedelta(seconds=seconds_ago)
    BackendStatus.objects.update_or_create(backend=row, defaults={"observed_at": observed} | fields)


# ---- backends


@pytest.mark.django_db
def test_a_backend_shows_what_runs_its_memory_and_the_age_of_what_is_known(monkeypatch):
    now = timezone.now()
    monkeypatch.setattr(timezone, "now", lambda: now)
    gpu = make_backend("gpu-1", max_concurrent=4)
    polled(gpu, 2.0, vram_total_mib=24576.0, vram_free_mib=6144.0, kv_use=0.25)
    (row,) = backend_rows(view(live_backend(gpu, in_flight=2, foreign=1, queued=7)))
    assert (row.running, row.foreign, row.slots, row.waiting, row.busy) == (2, 1, 4, 7, 0.75)
    assert (row.vram_used, row.kv_use) == (0.75, 0.25)
    assert row.age_seconds == 2.0
    assert not row.is_stale
    assert attention([row]) == []


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("live", "status", "why"),
    [
        ({"state": "failed", "failed_for_seconds": 12.0}, {},
         "has failed; tried again in 12.0\xa0s"),
        ({"state": "down"}, {"error": "refused"}, "is down: refused"),
        ({"state": "down"}, {}, "is down"),
        ({}, {"seconds_ago": 120.1},
         "was last heard of 2\xa0min ago: its figures count as unknown"),
        ({"in_flight": 1, "foreign": 3}, {},
         "is full, with 3 requests that did not come through here"),
        ({}, {"kv_use": 0.96}, "has nearly no room left in its KV cache"),
        ({"state": "disabled"}, {"seconds_ago": 900}, None),
    ],
)  # fmt: skip
def test_what_needs_attention_is_said_in_words(live, status, why):
    gpu = make_backend("gpu-1", max_concurrent=4)
    polled(gpu, **({"seconds_ago": 1.0} | status))
    rows = backend_rows(view(live_backend(gpu, **live)))
    said = [text for _, text in attention(rows)]
    if why is None:
        assert said == []
    else:
        assert said == [why]


@pytest.mark.django_db
def test_a_backend_that_was_never_polled_and_one_without_a_scheduler():
    make_backend("gpu-1")
    make_backend("gpu-2", enabled=False)
    rows = backend_rows(None)
    assert [(row.state, row.running, row.vram_used, row.busy) for row in rows] == [
        ("unknown", None, None, None),
        ("disabled", None, None, None),
    ]
    assert [text for _, text in attention(rows)] == ["has never answered a poll"]


# ---- refusals


@pytest.mark.django_db
def test_the_last_hours_refusals_are_counted_by_reason_most_first():
    now = timezone.now()
    for reason, number in (("queue_full", 1), ("rate_limit_exceeded", 2)):
        for _ in range(number):
            make_decision(outcome="refused", reason=reason, arrived_at=now)
    make_decision(outcome="refused", reason="queue_full", arrived_at=now - timedelta(hours=2))
    make_decision(outcome="completed", arrived_at=now)
    assert refusals() == [("the rate limit was reached", 2), ("the queue was full", 1)]


# ---- the page


@pytest.fixture
def busy(monkeypatch) -> Cluster:
    """Two users who wait on a full cluster."""
    Group.objects.all().delete()
    people = [
        make_user(name, group=make_group(name, scheduler_weight=weight))
        for name, weight in (("faculty", 3), ("student", 1))
    ]
    cluster = Cluster(slots=1)
    for person in people:
        cluster.ask(person, 5)
    cluster.view()  # the gap is measured from one look to the next
    monkeypatch.setattr(services, "live", cluster.view)
    return cluster


@pytest.mark.django_db
@pytest.mark.parametrize("address", PAGES)
def test_the_page_shows_shares_with_bars_and_the_gap_beside_its_bound(client, busy, address):
    client.force_login(make_admin())
    page = client.get(address).content.decode()
    assert "75\xa0%" in page
    assert 'width="75.00%"' in page
    assert "bound is" in page
    assert "Nothing was refused." in page
    assert "There are no backends yet." in page


@pytest.mark.django_db
def test_many_groups_backends_and_records_take_no_more_queries(
    client, busy, django_assert_num_queries
):
    client.force_login(make_admin())
    with django_assert_num_queries(12) as few:
        client.get("/admin/figures/")
    assert few
    for _ in range(20):
        polled(make_backend())
        make_group()
        make_decision(outcome="refused", reason="queue_full", arrived_at=timezone.now())
    cache.clear()
    with django_assert_num_queries(12):
        client.get("/admin/figures/")


@pytest.mark.django_db
def test_only_staff_reads_the_figures(client, busy):
    client.force_login(make_user("ada"))
    assert client.get("/admin/figures/").status_code == 302
    client.force_login(make_user("auditor", is_staff=True, role=Role.AUDITOR))
    assert client.get("/admin/figures/").status_code == 200


# ---- over the WebSocket


async def session_of(router: RunningRouter, **fields) -> str:
    """A cookie of somebody who has signed in."""

    def sign_in() -> str:
        client = Client()
        client.force_login(make_user("reader", **fields))
        return client.cookies["sessionid"].value

    return await router.ask(sign_in)


def connect(router: RunningRouter, session: str = "", **options) -> websockets.connect:
    headers = {"Cookie": f"sessionid={session}"} if session else {}
    return websockets.connect(
        f"ws://127.0.0.1:{router.port}/admin/live/",
        additional_headers=headers,
        proxy=None,
        **options,
    )


async def test_staff_gets_the_figures_again_and_again(router: RunningRouter, monkeypatch):
    monkeypatch.setattr(consumers, "EVERY_SECONDS", 0.05)
    session = await session_of(router, is_staff=True, role=Role.AUDITOR)
    async with connect(router, session) as socket:
        first = await asyncio.wait_for(socket.recv(), 30)
        assert "overview-cards" in first
        await router.user("bob", weight=7)
        async with asyncio.timeout(30):
            while "weight 7" not in await socket.recv():
                pass


async def test_who_is_not_staff_and_another_sites_page_are_refused(router: RunningRouter):
    plain = await session_of(router)
    staff = await router.ask(_sign_in_staff)
    for session, options in (
        ("", {}),
        ("nonsense", {}),
        (plain, {}),
        (staff, {"origin": "https://elsewhere.example"}),
    ):
        with pytest.raises(websockets.InvalidStatus) as refused:
            await connect(router, session, **options)
        assert refused.value.response.status_code == 403
    async with connect(router, staff, origin=f"http://127.0.0.1:{router.port}") as socket:
        assert await asyncio.wait_for(socket.recv(), 30)


def _sign_in_staff() -> str:
    client = Client()
    client.force_login(make_admin("root"))
    return client.cookies["sessionid"].value


async def test_who_loses_the_right_to_read_loses_the_connection(router: RunningRouter, monkeypatch):
    monkeypatch.setattr(consumers, "EVERY_SECONDS", 0.02)
    monkeypatch.setattr(consumers, "ASK_AGAIN_SECONDS", 0.02)
    session = await router.ask(_sign_in_staff)
    async with connect(router, session) as socket:
        await asyncio.wait_for(socket.recv(), 30)
        await router.ask(User.objects.filter(username="root").update, is_active=False)
        async with asyncio.timeout(30):
            await socket.wait_closed()
    assert socket.close_code == consumers.FORBIDDEN


@pytest.mark.alone
@pytest.mark.browser
@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")  # whitenoise's files
async def test_a_browser_shows_what_the_socket_sends_and_keeps_the_place(
    router: RunningRouter, chromium, monkeypatch
):
    monkeypatch.setattr(consumers, "EVERY_SECONDS", 0.2)
    session = await router.ask(_sign_in_staff)
    tab = await asyncio.to_thread(
        lambda: chromium.open(base_url=router.url, viewport={"width": 400, "height": 800})
    )

    table = "[aria-label='Table of backends']"
    found = f'document.querySelector("{table}")'

    def look(page) -> None:
        page.context.add_cookies([{"name": "sessionid", "value": session, "url": router.url}])
        page.goto("/admin/")
        page.wait_for_selector("#overview-live[data-connected=yes]")
        page.wait_for_selector(table)
        # In one go: what was found before may have been replaced by newer figures since.
        page.evaluate(f"{{ const one = {found}; one.scrollLeft = 40; one.focus(); }}")

    def look_again(page) -> tuple[int, str]:
        page.get_by_text("weight 77").wait_for()
        focused = "document.activeElement.getAttribute('aria-label')"
        return tuple(page.evaluate(f"[{found}.scrollLeft, {focused}]"))

    try:
        await router.change(_make_gpu)
        await asyncio.to_thread(tab, look)
        await router.change(
            _make_unknown_gpu
        )  # a note about it appears, with a link, above the rest
        await router.user("bob", weight=77)
        assert await asyncio.to_thread(tab, look_again) == (40, "Table of backends")
    finally:
        await asyncio.to_thread(tab.close)


def _make_unknown_gpu() -> None:
    make_backend("gpu-0")  # never polled


def _make_gpu() -> None:
    make_backend("gpu-1")


# ---- time lines


def sampled(minutes_ago: float, group: str, entitled: float, received: float, now=None) -> None:
    at = (now or timezone.now()) - timedelta(minutes=minutes_ago)
    ShareMinute.objects.create(
        at=at, group=group, entitled=entitled, received=received, queued=1, running=1
    )
    ClusterMinute.objects.get_or_create(
        at=at,
        defaults={
            "gap": 500.0,
            "gap_bound": 2000.0,
            "queued": 7.5,
            "running": 2.0,
            "tokens_per_second": 31.0,
        },
    )


@pytest.mark.django_db
def test_the_page_draws_shares_gap_queue_and_token_rate_over_time(client):
    sampled(10, "faculty", 0.75, 0.7)
    sampled(5, "faculty", 0.25, 0.3)
    sampled(100, "student", 1.0, 1.0)
    client.force_login(make_admin())
    hour = client.get("/admin/").content.decode()
    assert "faculty: entitled 25\xa0% to 75\xa0%, last 25\xa0%; received" in hour
    assert "largest gap 500 to 500, last 500; bound 2,000 to 2,000, last 2,000" in hour
    assert "waiting 7.5 to 7.5, last 7.5" in hour
    assert "settled 31 tokens/s to 31 tokens/s" in hour
    assert "student: entitled" not in hour
    six = client.get("/admin/charts/?hours=6").content.decode()
    assert "student: entitled 100\xa0% to 100\xa0%" in six


@pytest.mark.django_db
def test_changes_of_the_configuration_are_marked_in_the_charts(client):
    group = Group.objects.create(name="physics", scheduler_weight=2)
    sampled(5, "physics", 0.5, 0.5)
    group.scheduler_weight = 5
    group.save()
    client.force_login(make_admin())
    page = client.get("/admin/charts/?hours=24").content.decode()
    # In the list, and in the three charts of the cluster and the one of the group.
    assert page.count("group physics: scheduler weight 2 → 5") == 5
    assert page.count('class="mr-lines-marker"') >= 4


@pytest.mark.django_db
def test_time_lines_take_a_fixed_number_of_queries(client, django_assert_max_num_queries):
    client.force_login(make_admin())
    now = timezone.now()
    for minute in range(30):
        for group in range(20):
            sampled(minute, f"g{group}", 0.05, 0.05, now)
    with django_assert_max_num_queries(24):
        page = client.get("/admin/charts/?hours=1").content.decode()
    assert page.count("<figure") == 3 + 12  # the largest groups


@pytest.mark.django_db
def test_the_page_says_how_long_those_served_lately_had_to_wait(client, busy):
    now = timezone.now()
    for seconds in range(1, 21):
        make_decision(
            arrived_at=now - timedelta(seconds=60),
            queued_at=now - timedelta(seconds=60),
            dispatched_at=now - timedelta(seconds=60 - seconds),
        )
    make_decision(arrived_at=now - timedelta(hours=2), queued_at=now, dispatched_at=now)
    assert waits() == Waits(20, 10.0, 19.0)
    client.force_login(make_admin())
    assert "95&nbsp;% within <strong>19.0\xa0s</strong>" in client.get("/admin/").content.decode()
