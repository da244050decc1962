"""What-if: from the form over the replay of recorded decisions to saved weights."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from django.conf import settings
from django.test import Client
from django.utils import timezone
from kombu.exceptions import OperationalError

from accounts.models import Group, Quota, Role
from backends.models import Backend
from scheduler import simulation, tasks, what_if
from scheduler.models import SiteSettings, WhatIf
from scheduler.pages import what_if as page_module
from scheduler.snapshot import load_snapshot
from tests.factories import (
    make_admin,
    make_backend,
    make_decision,
    make_group,
    make_quota,
    make_user,
)

pytestmark = pytest.mark.django_db

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


@pytest.fixture
def people() -> dict[str, int]:
    """Faculty 3 and student 1 over one backend with one slot; ids by name."""
    Group.objects.all().delete()
    found = {}
    for name, weight in (("faculty", 3), ("student", 1)):
        group = make_group(name, scheduler_weight=weight)
        found[name] = group.pk
        found[f"{name}-user"] = make_user(f"{name}-user", group=group).pk
    found["gpu-1"] = make_backend("gpu-1", models=("m",), max_concurrent=1, max_queue=999).pk
    return found


def record(people, who: str, number: int, *, waited: float, seconds: float = 1.0, **fields):
    """A request of 200 tokens that arrived just after noon."""
    arrived = NOON + timedelta(microseconds=number)
    sent = arrived + timedelta(seconds=waited)
    values = {
        "user_id": people[f"{who}-user"],
        "user": f"{who}-user",
        "user_group": who,
        "model_requested": "m",
        "model_served": "m",
        "prompt_tokens": 100,
        "completion_tokens": 100,
        "arrived_at": arrived,
        "queued_at": arrived,
        "dispatched_at": sent,
        "ended_at": sent + timedelta(seconds=seconds),
        "selected_backend_id": people["gpu-1"],
    }
    return make_decision(**(values | fields))


@pytest.fixture
def traffic(people) -> None:
    """40 requests at once, 20 of each; recorded as served 3 : 1."""
    turn, served = 0, {"faculty": 0, "student": 0}
    for turn in range(40):
        who = "student" if turn % 4 == 3 and served["student"] < 20 else "faculty"
        if served[who] == 20:
            who = "student"
        served[who] += 1
        record(people, who, turn, waited=float(turn))


def make_what_if(**fields) -> WhatIf:
    values = {"name": "try", "since": NOON, "until": NOON + timedelta(hours=1)}
    return WhatIf.objects.create(**(values | fields))


def replayed(**changes) -> dict:
    row = make_what_if(changes=what_if.Changes(**changes).as_json())
    tasks.replay(row.pk)
    row.refresh_from_db()
    assert (row.state, row.error, row.progress) == ("done", "", 1.0)
    return row.result


# ---- replaying decisions


def test_with_nothing_changed_the_recorded_shares_come_out(people, traffic):
    result = replayed()
    assert result["requests"] == 40
    assert result["error"]["share"] == 0.0
    assert result["error"]["p50"] <= 1.0
    assert result["before"] == result["after"]
    assert result["recorded"]["groups"]["faculty"]["served"] == 20
    assert result["before"]["utilisation"] == {"gpu-1": pytest.approx(1.0)}


def test_equal_weights_let_students_wait_less_and_faculty_longer(people, traffic):
    result = replayed(groups={str(people["student"]): "3"})
    before, after = result["before"]["groups"], result["after"]["groups"]
    assert before["faculty"]["p50"] < before["student"]["p50"]
    assert after["faculty"]["p95"] > before["faculty"]["p95"]
    assert after["student"]["p50"] < before["student"]["p50"]


def test_more_slots_shorten_every_wait(people, traffic):
    result = replayed(slots={str(people["gpu-1"]): 4})
    assert result["before"]["total"]["p99"] == pytest.approx(39, rel=0.02)
    assert result["after"]["total"]["p99"] == pytest.approx(9, rel=0.02)


def test_a_backend_added_serves_as_the_one_that_it_is_like(people, traffic):
    as_with_more_slots = replayed(slots={str(people["gpu-1"]): 2})["after"]
    result = replayed(added={"gpu-2": "gpu-1"})["after"]
    assert sorted(result["utilisation"]) == ["gpu-1", "gpu-2"]
    assert result["total"] == as_with_more_slots["total"]
    assert result["groups"] == as_with_more_slots["groups"]


def test_without_its_only_backend_everything_is_refused_in_the_end(people, traffic):
    result = replayed(slots={str(people["gpu-1"]): 0})
    assert result["after"]["total"]["refused"] == {"queue_timeout": 40}


def test_a_request_refused_for_want_of_room_is_served_where_there_is_room(people):
    record(people, "faculty", 0, waited=0.0)
    record(
        people, "student", 1, waited=0, outcome="refused", reason="queue_full", queued_at=None,
        dispatched_at=None, ended_at=NOON, completion_tokens=None,
    )  # fmt: skip
    result = replayed()
    assert result["recorded"]["total"]["refused"] == {"queue_full": 1}
    assert result["before"]["total"]["served"] == 2


def test_what_never_competed_for_a_slot_is_left_out(people):
    record(people, "faculty", 0, waited=0.0)
    record(people, "student", 1, waited=0, outcome="refused", reason="invalid_request",
           queued_at=None, dispatched_at=None)  # fmt: skip
    record(people, "student", 2, waited=0, user_id=None)
    assert replayed()["requests"] == 1


def test_a_client_that_left_the_queue_counts_as_gone(people):
    record(people, "faculty", 0, waited=0.0, seconds=9.0)
    record(people, "student", 1, waited=0, outcome="cancelled", reason="client_disconnected",
           dispatched_at=None, ended_at=NOON + timedelta(seconds=2))  # fmt: skip
    result = replayed()
    for run in ("recorded", "before", "after"):
        assert result[run]["total"]["left"] == 1


def test_somebody_deleted_since_is_replayed_with_the_recorded_weight(people, traffic):
    record(people, "student", 50, waited=40.0, user_id=987654, user="gone", user_weight=2.0)
    found = what_if.scenario(load_snapshot(), NOON, NOON + timedelta(hours=1))
    assert (found.users[987654].username, found.users[987654].weight) == ("gone", 2.0)
    assert replayed()["before"]["users"]["gone"]["served"] == 1


def test_an_override_counts_more_than_a_groups_new_weight(people):
    make_quota(what_if.User.objects.get(username="student-user"), weight_override=7)
    changes = what_if.Changes(groups={str(people["student"]): "2"})
    now = what_if.scenario(load_snapshot(), NOON, NOON)
    spec = what_if.with_changes(now, changes).users[people["student-user"]]
    assert (spec.weight, spec.group_weight) == (7.0, 2.0)
    changes = what_if.Changes(users={"student-user": None})
    assert what_if.with_changes(now, changes).users[people["student-user"]].weight == 1.0


def test_a_scenario_is_replayed_once_however_often_the_message_comes(people, traffic, monkeypatch):
    row, runs = make_what_if(), []
    monkeypatch.setattr(what_if, "replay", runs.append)
    tasks.replay(row.pk)
    tasks.replay(row.pk)
    assert len(runs) == 1


def test_a_replay_that_fails_says_why(people, traffic):
    row = make_what_if(changes={"points": {"score_unheard_of": 1.0}})
    with pytest.raises(TypeError):
        tasks.replay(row.pk)
    row.refresh_from_db()
    assert row.state == "failed"
    assert "score_unheard_of" in row.error


LATER = what_if.LOST_AFTER + timedelta(seconds=1)


def looked_at(row: WhatIf, later: timedelta = LATER) -> tuple[str, str]:
    """Its state and error when somebody looks so much later."""
    what_if.fail_lost(timezone.now() + later)
    row.refresh_from_db()
    return row.state, row.error


def test_a_replay_whose_worker_died_ends_as_failed_and_says_so(people):
    row = make_what_if()
    assert what_if.take(row.pk) is not None
    assert looked_at(row, what_if.LOST_AFTER / 2) == ("running", "")
    assert looked_at(row) == ("failed", what_if.WORKER_GONE)


def test_a_replay_that_no_worker_took_ends_as_failed_and_its_message_comes_too_late(people):
    row = make_what_if()
    assert looked_at(row, what_if.LOST_AFTER / 2) == ("queued", "")
    assert looked_at(row) == ("failed", what_if.NOT_TAKEN)
    tasks.replay(row.pk)
    assert looked_at(row) == ("failed", what_if.NOT_TAKEN)


def test_a_replay_waits_for_its_turn_while_a_worker_is_busy_and_a_while_after(people):
    busy, waits = make_what_if(), make_what_if()
    long_ago = timezone.now() - LATER
    WhatIf.objects.filter(pk=waits.pk).update(alive_at=long_ago)
    what_if.take(busy.pk)
    assert looked_at(waits, timedelta()) == ("queued", "")
    tasks.what_if._note(WhatIf.objects.get(pk=busy.pk), state="done", ended_at=timezone.now())
    assert looked_at(waits, timedelta()) == ("queued", "")
    assert looked_at(waits) == ("failed", what_if.NOT_TAKEN)


def test_each_report_of_progress_is_a_sign_of_life(people, traffic, monkeypatch):
    monkeypatch.setattr(simulation, "REPORT_EVERY", 10)
    row, signs = make_what_if(), set()
    note = what_if._note

    def noted(row, **values):
        note(row, **values)
        signs.add(WhatIf.objects.get(pk=row.pk).alive_at)

    monkeypatch.setattr(what_if, "_note", noted)
    tasks.replay(row.pk)
    assert len(signs) >= 5  # of 40 requests, reported each 10


def test_a_worker_that_was_given_up_changes_nothing_of_what_was_started_again(people, traffic):
    row = make_what_if()
    given_up = what_if.take(row.pk)
    assert given_up is not None
    assert looked_at(row)[0] == "failed"
    assert what_if.start_again(row.pk)
    what_if.replay(given_up)
    row.refresh_from_db()
    assert (row.state, row.result, row.started_at) == ("queued", None, None)
    tasks.replay(row.pk)
    what_if.replay(given_up)
    row.refresh_from_db()
    assert (row.state, row.error, row.replayed) == ("done", "", 80)
    assert not what_if.start_again(row.pk)


# ---- the pages


def test_a_pages_thread_sends_replays_to_the_sites_own_worker() -> None:
    """In a process of its own, as only what the server imports counts."""
    code = (
        "import mindrouter.asgi\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from scheduler.pages.what_if import replay\n"
        "with ThreadPoolExecutor() as pages:\n"
        "    print(pages.submit(lambda: replay.app.conf.broker_url).result())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=settings.BASE_DIR, capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == settings.CELERY_BROKER_URL


@pytest.fixture
def root(client: Client, monkeypatch) -> Client:
    """Signed in as superuser; replays run at once."""
    monkeypatch.setattr(page_module.transaction, "on_commit", lambda step: step())
    monkeypatch.setattr(page_module.replay, "delay", tasks.replay)
    client.force_login(make_admin("root"))
    return client


def form_fields(client: Client, query: str = "") -> dict[str, str]:
    """The form as a browser would send it untouched."""
    form = client.get(f"/admin/what-if/{query}").context["form"]
    fields = {name: form[name].value() for name in form.fields}
    return {name: "" if value is None else str(value) for name, value in fields.items()}


def send(client: Client, **changes: str):
    fields = form_fields(client) | {
        "name": "more for students",
        "period": "",
        "since": "2026-06-01T12:00",
        "until": "2026-06-01T13:00",
    }
    return client.post("/admin/what-if/", fields | changes)


def test_on_its_page_a_lost_replay_has_failed_and_can_be_started_again(root, people, traffic):
    row = make_what_if(alive_at=timezone.now() - LATER)
    for page in ("", f"{row.pk}/", f"{row.pk}/progress/"):
        WhatIf.objects.update(state="queued", ended_at=None)
        answer = root.get(f"/admin/what-if/{page}")
        row.refresh_from_db()
        assert (row.state, row.error) == ("failed", what_if.NOT_TAKEN)
    assert answer["HX-Refresh"] == "true"
    page = root.get(f"/admin/what-if/{row.pk}/").content.decode()
    assert "The replay failed: No worker took it" in page
    assert f'action="/admin/what-if/{row.pk}/again/"' in page
    assert root.post(f"/admin/what-if/{row.pk}/again/")["Location"] == f"/admin/what-if/{row.pk}/"
    row.refresh_from_db()
    assert (row.state, row.error, row.progress) == ("done", "", 1.0)
    assert "Start again" not in root.get(f"/admin/what-if/{row.pk}/").content.decode()


def test_a_replay_that_no_worker_can_be_told_of_fails_at_once(root, people, monkeypatch):
    def away(pk: int) -> None:
        raise OperationalError("Connection refused")

    monkeypatch.setattr(page_module.replay, "delay", away)
    send(root)
    row = WhatIf.objects.get()
    assert (row.state, row.error) == (
        "failed", "No worker could be told of it: Connection refused"
    )  # fmt: skip
    root.post(f"/admin/what-if/{row.pk}/again/")
    row.refresh_from_db()
    assert row.state == "failed"


def test_only_who_may_make_scenarios_may_start_them_again(client, people):
    row = make_what_if(state="failed")
    client.force_login(make_user("auditor", is_staff=True, role=Role.AUDITOR))
    assert "Start again" not in client.get(f"/admin/what-if/{row.pk}/").content.decode()
    assert client.post(f"/admin/what-if/{row.pk}/again/").status_code == 403
    row.refresh_from_db()
    assert row.state == "failed"


def test_from_the_form_to_the_comparison_to_saved_weights(root, people, traffic):
    answer = send(root, **{f"weight-{people['student']}": "3", "overrides": "faculty-user = 2.5"})
    row = WhatIf.objects.get()
    assert answer["Location"] == f"/admin/what-if/{row.pk}/"
    assert row.changes == {
        "groups": {str(people["student"]): "3"},
        "users": {"faculty-user": "2.5"},
        "share_mode": None,
        "points": {},
        "slots": {},
        "added": {},
    }
    page = root.get(f"/admin/what-if/{row.pk}/").content.decode()
    assert "40 requests" in page
    assert "Weight of student" in page
    assert Group.objects.get(name="student").scheduler_weight == 1

    root.post(f"/admin/what-if/{row.pk}/save/")
    student = Group.objects.get(name="student")
    assert student.scheduler_weight == 3
    newest = student.history.first()
    assert newest.history_user.username == "root"
    assert newest.history_change_reason == f"What-if {row.pk}: more for students"
    assert Quota.objects.get().weight_override == Decimal("2.5")
    row.refresh_from_db()
    assert row.saved_at is not None
    again = root.post(f"/admin/what-if/{row.pk}/save/", follow=True).content.decode()
    assert "in force already" in again


def test_backends_are_added_by_the_form_and_never_saved(root, people):
    send(root, added="gpu-2 = gpu-1\ngpu = 3 = gpu-1")
    row = WhatIf.objects.get()
    assert row.changes["added"] == {"gpu-2": "gpu-1", "gpu = 3": "gpu-1"}
    assert "gpu-2, like gpu-1" in root.get(f"/admin/what-if/{row.pk}/").content.decode()
    root.post(f"/admin/what-if/{row.pk}/save/")
    assert [backend.name for backend in Backend.objects.all()] == ["gpu-1"]


@pytest.mark.parametrize(
    ("added", "error"),
    [
        ("gpu-2", "is not of the form new name = like which."),
        ("= gpu-1", "is not of the form new name = like which."),
        ("gpu-2 = gpu-9", "There is no backend gpu-9."),
        ("gpu-1 = gpu-1", "There is a backend gpu-1 already."),
        ("gpu-2 = gpu-1\ngpu-2 = gpu-1", "There is a backend gpu-2 already."),
    ],
)
def test_a_backend_that_cannot_be_added_is_refused_and_named(root, people, added, error):
    assert error in send(root, added=added).content.decode()
    assert not WhatIf.objects.exists()


def test_mode_points_and_slots_are_taken_from_the_form(root, people):
    backend = Backend.objects.get()
    send(root, share_mode="group", score_latency="0", **{f"slots-{backend.pk}": "8"})
    row = WhatIf.objects.get()
    assert (row.changes["share_mode"], row.changes["points"], row.changes["slots"]) == (
        "group",
        {"score_latency": 0.0},
        {str(backend.pk): 8},
    )
    root.post(f"/admin/what-if/{row.pk}/save/")
    site = SiteSettings.objects.get()
    assert (site.share_mode, site.score_latency) == ("group", 0.0)
    assert Backend.objects.get().max_concurrent == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"since": ""},
        {"until": "2026-06-01T11:00"},
        {"since": "yesterday"},
        {"share_mode": "nobody"},
        {"score_latency": "-1"},
        {"score_latency": "nan"},
        {"overrides": "nobody = 3"},
        {"overrides": "faculty-user"},
        {"overrides": "faculty-user = -3"},
        {"period": "99"},
    ],
)
def test_a_wrong_field_comes_back_with_its_error_and_nothing_is_made(root, people, wrong):
    answer = send(root, **wrong)
    assert answer.status_code == 200
    assert "errorlist" in answer.content.decode()
    assert not WhatIf.objects.exists()


def test_weights_edited_on_the_groups_page_are_tried_before_they_are_saved(root, people):
    page = root.get("/admin/groups/").content.decode()
    assert re.search(r'formaction="/admin/what-if/try/"', page)
    answer = root.post(
        "/admin/what-if/try/",
        {f"group-{people['faculty']}-scheduler_weight": "5", "group-x-scheduler_weight": "9"},
    )
    assert answer["Location"] == f"/admin/what-if/?w-{people['faculty']}=5"
    fields = form_fields(root, f"?w-{people['faculty']}=5")
    assert fields[f"weight-{people['faculty']}"] == "5"
    assert fields[f"weight-{people['student']}"] == "1"
    assert Group.objects.get(name="faculty").scheduler_weight == 3


def test_while_it_runs_there_is_progress_and_the_page_reloads_at_the_end(root, people):
    row = make_what_if(state="running", replayed=30, total=120)
    page = root.get(f"/admin/what-if/{row.pk}/").content.decode()
    assert 'value="25.00"' in page
    answer = root.get(f"/admin/what-if/{row.pk}/progress/")
    assert "HX-Refresh" not in answer
    WhatIf.objects.update(state="done")
    assert root.get(f"/admin/what-if/{row.pk}/progress/")["HX-Refresh"] == "true"


def test_an_empty_period_has_a_page_too_and_a_scenario_can_be_deleted(root, people):
    send(root)
    row = WhatIf.objects.get()
    assert "Nobody sent anything" in root.get(f"/admin/what-if/{row.pk}/").content.decode()
    root.post(f"/admin/what-if/{row.pk}/delete/")
    assert not WhatIf.objects.exists()


@pytest.mark.parametrize("role", [Role.AUDITOR, Role.OPERATOR])
def test_who_may_only_read_sees_results_and_starts_and_saves_nothing(client, people, role):
    client.force_login(make_user("reader", is_staff=True, role=role))
    row = make_what_if()
    for address in ("/admin/what-if/", f"/admin/what-if/{row.pk}/"):
        answer = client.get(address)
        assert answer.status_code == 200
        assert "Replay</button>" not in answer.content.decode()
    for address in ("", "try/", f"{row.pk}/save/", f"{row.pk}/delete/"):
        assert client.post(f"/admin/what-if/{address}").status_code == 403


def test_the_list_takes_as_many_queries_for_many_scenarios_as_for_one(
    root, people, django_assert_num_queries
):
    admin = make_admin("other")
    for number in range(30):
        make_what_if(name=f"scenario {number}", created_by=admin)
    with django_assert_num_queries(7):  # session, user, lost, groups, backends, settings, all
        page = root.get("/admin/what-if/").content.decode()
    assert page.count("scenario ") >= 30
