"""Old decisions leave the log in bounded batches; what they add up to stays."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.db.models import Sum

from scheduler import retention
from scheduler.loading import load
from scheduler.models import Decision, SiteSettings, UsageHour
from scheduler.retention import forget_decisions
from scheduler.spool import Record, Spool
from scheduler.tasks import forget
from tests.factories import make_decision

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 6, 11, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BATCH_ROWS", 3)
    monkeypatch.setattr(retention, "MOST_BATCHES", 2)
    monkeypatch.setattr(retention, "PAUSE", 0.0)


def spooled(folder: Path, moments: list[float]) -> None:
    """Requests of 10 charged tokens that arrived at these times."""
    spool = Spool(folder)
    for moment in moments:
        one = Record(request_id=f"r{moment}", arrived_at=moment, outcome="completed")
        one.charged_tokens = 10.0
        spool.close(one)
    spool.stop()


def left() -> list[str]:
    return list(Decision.objects.order_by("arrived_at").values_list("request_id", flat=True))


def test_without_a_setting_everything_is_kept() -> None:
    make_decision(arrived_at=NOW - timedelta(days=10_000))
    assert forget_decisions(NOW) == 0
    SiteSettings.objects.create(pk=1, decision_retention=1e9)
    assert forget_decisions(NOW) == 0
    assert Decision.objects.count() == 1


def test_a_request_is_kept_for_as_many_days_as_are_set_and_what_is_saved_wins(
    settings: Any,
) -> None:
    settings.DECISION_RETENTION = 2
    make_decision("old", arrived_at=NOW - timedelta(days=2, microseconds=1))
    make_decision("due", arrived_at=NOW - timedelta(days=2))
    make_decision("new", arrived_at=NOW)
    assert forget_decisions(NOW) == 1
    assert left() == ["due", "new"]
    SiteSettings.objects.create(pk=1, decision_retention=1)
    assert forget_decisions(NOW) == 1
    assert left() == ["new"]


def test_a_run_is_bounded_takes_the_oldest_first_and_the_next_one_goes_on(settings: Any) -> None:
    settings.DECISION_RETENTION = 1
    for n in (4, 7, 1, 6, 0, 3, 5, 2):
        make_decision(f"r{n}", arrived_at=NOW - timedelta(days=9) + timedelta(hours=n))
    assert forget_decisions(NOW) == 6
    assert left() == ["r6", "r7"]
    assert forget_decisions(NOW) == 2
    assert forget_decisions(NOW) == 0


def test_a_run_that_dies_has_deleted_its_batches_and_is_gone_on_with(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DECISION_RETENTION = 1
    for n in range(5):
        make_decision(f"r{n}", arrived_at=NOW - timedelta(days=9) + timedelta(hours=n))

    def dies(_: float) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr("scheduler.retention.time.sleep", dies)
        with pytest.raises(SystemExit):
            forget_decisions(NOW)
    assert left() == ["r3", "r4"]
    assert forget_decisions(NOW) == 2


def test_totals_stay_and_nothing_that_was_deleted_comes_back(tmp_path: Path, settings: Any) -> None:
    settings.DECISION_RETENTION = 1
    spooled(tmp_path, [1000.0, 1001.0, 1002.0])
    load(tmp_path)
    assert forget_decisions(NOW) == 3
    assert load(tmp_path) == 0
    assert left() == []
    total = UsageHour.objects.aggregate(requests=Sum("requests"), charged=Sum("charged_tokens"))
    assert total == {"requests": 3, "charged": 30.0}


@pytest.mark.django_db(transaction=True)
def test_records_are_loaded_meanwhile(tmp_path: Path, settings: Any) -> None:
    """Each of 20 runs deletes six old rows, while the recorder inserts sixty new ones."""
    settings.DECISION_RETENTION = 1
    for n in range(120):
        make_decision(f"old{n}", arrived_at=NOW - timedelta(days=9, seconds=n))
    failures = []

    def recorder() -> None:
        try:
            for n in range(20):
                spooled(tmp_path / str(n), [NOW.timestamp() + 3 * n + m for m in range(3)])
                load(tmp_path / str(n))
        except Exception as error:
            failures.append(error)
        finally:
            connection.close()

    thread = threading.Thread(target=recorder)
    thread.start()
    deleted = sum(forget_decisions(NOW) for _ in range(20))
    thread.join(60)
    assert failures == []
    assert deleted == 120
    assert Decision.objects.count() == 60
    assert UsageHour.objects.aggregate(n=Sum("requests"))["n"] == 60


def test_the_worker_forgets_and_the_schedule_has_the_task(settings: Any) -> None:
    settings.DECISION_RETENTION = 1
    make_decision(arrived_at=datetime(2020, 1, 1, tzinfo=UTC))
    forget.apply()
    assert left() == []
    assert forget.name in {entry["task"] for entry in settings.CELERY_BEAT_SCHEDULE.values()}
