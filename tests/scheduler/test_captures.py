"""Captured prompts: how they come into the database, how long they stay, and who is told."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from accounts.captures import captured_keys, delete_captures
from accounts.erasing import erase
from accounts.models import ApiKey
from backends.crypto import encrypt_anew
from scheduler import captures, retention
from scheduler.captures import (
    Captured,
    CaptureSpool,
    capture_of,
    load_captures,
    read_capture,
    text_of,
)
from scheduler.configuration.applying import apply_text
from scheduler.configuration.exporting import export_text
from scheduler.models import Capture
from scheduler.retention import forget_captures
from scheduler.snapshot import load_snapshot
from scheduler.tasks import forget
from tests.factories import make_admin, make_api_key, make_capture, make_user

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 6, 11, 12, tzinfo=UTC)
PROMPT = b'{"messages": "canary-of-a-prompt"}'


@pytest.fixture
def key() -> ApiKey:
    make_api_key(make_user("ada"), name="laptop")
    return ApiKey.objects.get()


def capture(key: ApiKey, **fields: Any) -> None:
    """As an admin does."""
    until = timezone.now() + timedelta(hours=1)
    values = {"capture_until": until, "capture_reason": "a bug", "capture_days": 7} | fields
    for name, value in values.items():
        setattr(key, name, value)
    key.full_clean()
    key.save()


def spooled(folder: Path, key_id: int, *names: str, ago: float = 0.0, kept: float = 100.0) -> None:
    spool, now = CaptureSpool(folder), timezone.now().timestamp()
    for name in names:
        one = Captured(
            request_id=name,
            key_id=key_id,
            at=now - ago,
            delete_at=now - ago + kept,
            request=PROMPT,
            request_bytes=len(PROMPT),
            answer=b"",
            answer_bytes=0,
        )
        spool.put(one)
    spool.write()


def left() -> list[str]:
    return sorted(Capture.objects.values_list("request_id", flat=True))


# ---- the switch


def test_it_is_off_until_an_admin_says_until_when_why_and_for_how_long(key: ApiKey) -> None:
    assert not key.is_captured
    [stored] = load_snapshot().keys.values()
    assert stored.capturing is None
    for given, wrong in (
        ({"capture_until": NOW}, {"capture_reason", "capture_days"}),
        ({"capture_reason": "x"}, {"capture_until"}),
        ({"capture_days": 3}, {"capture_until"}),
        ({"capture_until": NOW, "capture_reason": " ", "capture_days": 3}, {"capture_reason"}),
        ({"capture_until": NOW, "capture_reason": "x", "capture_days": 0}, {"capture_days"}),
        ({"capture_until": NOW, "capture_reason": "x", "capture_days": 91}, {"capture_days"}),
    ):
        with pytest.raises(ValidationError) as refused:
            ApiKey(**{f: getattr(key, f) for f in ("user", "name", "sha256")}, **given).full_clean()
        assert wrong <= set(refused.value.message_dict)


def test_its_end_is_at_most_90_days_off(key: ApiKey) -> None:
    capture(key, capture_until=timezone.now() + timedelta(days=90))
    with pytest.raises(ValidationError, match="At most 90 days from now"):
        capture(key, capture_until=timezone.now() + timedelta(days=90, minutes=1))


@pytest.mark.parametrize("reason", ["", "x"])
def test_the_database_refuses_a_switch_without_reason_or_days(key: ApiKey, reason: str) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        ApiKey.objects.update(capture_until=NOW, capture_reason=reason)


def test_a_gateway_is_told_until_when_and_how_long_it_is_kept(key: ApiKey) -> None:
    capture(key)
    [stored] = load_snapshot().keys.values()
    assert stored.capturing == (key.capture_until.timestamp(), 7 * 86400.0)
    assert list(captured_keys()) == [key]
    ApiKey.objects.update(capture_until=timezone.now() - timedelta(seconds=1))
    [stored] = load_snapshot().keys.values()
    assert stored.capturing is None
    assert list(captured_keys()) == []


def test_a_file_switches_it_on_and_off_and_the_export_tells(key: ApiKey) -> None:
    until = (timezone.now() + timedelta(days=2)).replace(microsecond=0)
    entry = f"api_keys: [{{user: ada, name: laptop, capture_until: '{until.isoformat()}', "
    apply_text(entry + "capture_reason: a bug, capture_days: 7}]")
    key.refresh_from_db()
    assert (key.capture_until, key.capture_reason, key.capture_days) == (until, "a bug", 7)
    exported = export_text()
    assert "capture_reason: a bug" in exported
    assert apply_text(exported).lines == []
    off = "{user: ada, name: laptop, capture_until: null, capture_reason: '', capture_days: null}"
    apply_text(f"api_keys: [{off}]")
    key.refresh_from_db()
    assert not key.is_captured


def test_the_history_says_who_switched_it_and_what_it_was_before(key: ApiKey) -> None:
    capture(key)
    key.stop_capture()
    key.save()
    off, on, made = ApiKey.history.all()
    reasons = [row.capture_reason for row in (made, on, off)]
    assert reasons == ["", "a bug", ""]
    assert [change.field for change in on.diff_against(made).changes] == sorted(ApiKey.CAPTURE)


# ---- loading


def test_a_file_is_loaded_once_and_deleted(key: ApiKey, tmp_path: Path) -> None:
    spooled(tmp_path, key.pk, "r1", "r2")
    assert load_captures(tmp_path) == 2
    assert list(tmp_path.iterdir()) == []
    spooled(tmp_path, key.pk, "r2")
    load_captures(tmp_path)
    assert left() == ["r1", "r2"]
    one = Capture.objects.get(request_id="r1")
    assert (one.request, one.answer, one.request_bytes) == (PROMPT, None, len(PROMPT))
    assert one.delete_at - one.at == timedelta(seconds=100)


def test_without_a_folder_there_is_nothing_to_load(tmp_path: Path) -> None:
    assert load_captures(tmp_path / "captures") == 0


def test_a_file_that_a_process_left_half_written_goes_after_an_hour(tmp_path: Path) -> None:
    file = tmp_path / "half.new"
    file.write_bytes(b"x")
    assert load_captures(tmp_path) == 0
    assert file.exists()
    captures.os.utime(file, (1.0, 1.0))
    load_captures(tmp_path)
    assert not file.exists()


def test_what_is_on_its_way_goes_with_its_key_its_date_and_its_deletion(
    key: ApiKey, tmp_path: Path
) -> None:
    spooled(tmp_path, key.pk, "past its date", ago=200.0)
    spooled(tmp_path, key.pk + 1, "of nobody")
    spooled(tmp_path, key.pk, "deleted with the others")
    make_capture(key, "r0")
    assert delete_captures(key) == 1
    spooled(tmp_path, key.pk, "later")
    load_captures(tmp_path)
    assert left() == ["later"]


def test_many_go_into_several_files(
    key: ApiKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "FILE_ROWS", 2)
    spooled(tmp_path, key.pk, "r1", "r2", "r3")
    assert len(list(tmp_path.iterdir())) == 2
    assert load_captures(tmp_path) == 3


def test_a_full_folder_takes_no_more(
    key: ApiKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spooled(tmp_path, key.pk, "r1")
    monkeypatch.setattr(captures, "MOST_SPOOLED_BYTES", 1)
    spooled(tmp_path, key.pk, "r2")
    load_captures(tmp_path)
    assert left() == ["r1"]


def test_what_no_key_can_read_is_said_and_kept_nowhere(
    key: ApiKey, tmp_path: Path, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    spooled(tmp_path, key.pk, "r1")
    settings.FIELD_ENCRYPTION_KEY = Fernet.generate_key().decode()
    with caplog.at_level(logging.ERROR):
        assert load_captures(tmp_path) == 0
    assert caplog.messages == ["1 captured prompts can be read with no key that is set"]
    assert list(tmp_path.iterdir()) == []


# ---- at rest


def at_rest() -> bytes:
    with connection.cursor() as cursor:
        cursor.execute("SELECT request FROM scheduler_capture")
        return b"".join(bytes(row[0]) for row in cursor.fetchall())


def test_it_goes_over_to_a_new_encryption_key_on_its_way_and_at_rest(
    key: ApiKey, tmp_path: Path, settings: Any
) -> None:
    old, new = settings.FIELD_ENCRYPTION_KEY, Fernet.generate_key().decode()
    make_capture(key, "r1", request=PROMPT, answer=b"\xff\x00")
    spooled(tmp_path, key.pk, "r2")
    assert PROMPT not in at_rest()
    settings.FIELD_ENCRYPTION_KEY, settings.FIELD_ENCRYPTION_OLD_KEYS = new, [old]
    out = StringIO()
    call_command("encryptanew", stdout=out)
    assert out.getvalue() == "2 values are encrypted with the key in force.\n"
    load_captures(tmp_path)
    settings.FIELD_ENCRYPTION_OLD_KEYS = []
    assert [one.request for one in Capture.objects.order_by("request_id")] == [PROMPT, PROMPT]
    assert Capture.objects.get(request_id="r1").answer == b"\xff\x00"
    settings.FIELD_ENCRYPTION_KEY = old
    assert [one.request for one in Capture.objects.all()] == [None, None]


def test_one_that_is_deleted_while_keys_are_changed_does_not_stop_that(
    key: ApiKey, settings: Any
) -> None:
    old, new = settings.FIELD_ENCRYPTION_KEY, Fernet.generate_key().decode()
    for name in ("r1", "r2"):
        make_capture(key, name, request=PROMPT)
    gone = Capture.objects.get(request_id="r1").pk

    def first_delete(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith('SELECT "scheduler_capture"."request"') and gone in params:
            execute("DELETE FROM scheduler_capture WHERE id = %s", [gone], many, context)
        return execute(sql, params, many, context)

    settings.FIELD_ENCRYPTION_KEY, settings.FIELD_ENCRYPTION_OLD_KEYS = new, [old]
    with connection.execute_wrapper(first_delete):
        assert encrypt_anew() == (1, 0)
    settings.FIELD_ENCRYPTION_OLD_KEYS = []
    assert [one.request for one in Capture.objects.all()] == [PROMPT]


def test_what_waits_is_written_by_one_thread_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, alone = [threading.Event(), threading.Event()], []

    def seal(data: bytes) -> bytes:
        first, second = begun
        if first.is_set():
            second.set()
        else:
            first.set()
            alone.append(not second.wait(0.3))
        return b"sealed"

    monkeypatch.setattr(captures, "seal", seal)
    monkeypatch.setattr(captures, "FILE_ROWS", 1)
    spool = CaptureSpool(tmp_path)
    for name in ("r1", "r2"):
        spool.put(
            Captured(
                request_id=name,
                key_id=1,
                at=0.0,
                delete_at=1.0,
                request=b"",
                request_bytes=0,
                answer=b"",
                answer_bytes=0,
            )
        )
    writing = threading.Thread(target=spool.write)
    writing.start()
    begun[0].wait()
    spool.write()  # as at the end
    writing.join()
    assert alone == [True]
    assert len(list(tmp_path.glob("*.sealed"))) == 2


def test_a_file_that_is_gone_while_the_folder_is_measured_loses_nothing(
    key: ApiKey, tmp_path: Path
) -> None:
    gone = tmp_path / "1.new"
    gone.symlink_to(tmp_path / "nowhere")  # listed, and not to be found
    spooled(tmp_path, key.pk, "r1")
    gone.unlink()
    assert load_captures(tmp_path) == 1


# ---- reading


def test_each_reading_is_noted_in_the_history_of_the_key(key: ApiKey) -> None:
    make_capture(key, "r1", request=PROMPT)
    read = read_capture("r1")
    assert read is not None
    assert read.request == PROMPT
    assert read_capture("r2") is None
    noted = ApiKey.history.first()
    assert noted.history_change_reason == "captured prompt of r1 read"
    assert (noted.history_type, noted.name, noted.history_actor != "") == ("~", "laptop", True)
    assert ApiKey.history.count() == 2


def test_what_is_past_its_date_is_not_read_though_no_worker_has_deleted_it(key: ApiKey) -> None:
    make_capture(key, "r1", delete_at=timezone.now())
    assert capture_of("r1") is None
    assert read_capture("r1") is None
    assert ApiKey.history.count() == 1


def test_what_cannot_be_noted_is_not_read(key: ApiKey, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise IntegrityError

    make_capture(key, "r1")
    monkeypatch.setattr(captures, "note", refused)
    with pytest.raises(IntegrityError):
        read_capture("r1")


@pytest.mark.parametrize(
    ("data", "text"),
    [(None, None), (b"abc", "abc"), ("abcé".encode()[:-1], "abc"), (b"RIFF\xff\xfe ", None)],
)
def test_a_character_cut_at_the_bound_leaves_a_text_a_text(
    data: bytes | None, text: str | None
) -> None:
    assert text_of(data) == text


# ---- the end


def test_each_is_deleted_at_its_own_date_whatever_became_of_the_switch(
    key: ApiKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH_ROWS", 2)
    monkeypatch.setattr(retention, "MOST_BATCHES", 2)
    monkeypatch.setattr(retention, "PAUSE", 0.0)
    for n in range(5):
        make_capture(key, f"old{n}", delete_at=NOW - timedelta(hours=n))
    make_capture(key, "due later", delete_at=NOW + timedelta(microseconds=1))
    assert not key.is_captured
    assert forget_captures(NOW) == 4
    assert left() == ["due later", "old0"]
    assert forget_captures(NOW) == 1
    assert left() == ["due later"]


def test_the_worker_deletes_them(key: ApiKey) -> None:
    make_capture(key, "r1", delete_at=datetime(2020, 1, 1, tzinfo=UTC))
    make_capture(key, "r2")
    forget.apply()
    assert left() == ["r2"]


def test_a_key_takes_its_captures_along_and_no_others(key: ApiKey) -> None:
    make_api_key(key.user, name="other")
    other = ApiKey.objects.get(name="other")
    make_capture(key, "r1")
    make_capture(other, "r2")
    key.delete()
    assert left() == ["r2"]


def test_erasing_a_person_erases_prompts_and_why_they_were_captured(
    key: ApiKey, tmp_path: Path
) -> None:
    make_admin("root")
    capture(key, capture_reason="Ada was suspected")
    make_capture(key, "r1")
    spooled(tmp_path, key.pk, "on its way")
    erase(key.user)
    load_captures(tmp_path)
    assert left() == []
    assert set(ApiKey.history.values_list("capture_reason", flat=True)) == {""}


def test_all_of_a_key_is_deleted_at_once_and_that_is_noted(key: ApiKey) -> None:
    for n in range(3):
        make_capture(key, f"r{n}")
    assert delete_captures(key) == 3
    assert left() == []
    assert ApiKey.history.first().history_change_reason == "all captured prompts deleted: 3"
