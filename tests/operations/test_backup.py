"""``manage.py backup`` and ``restore``: the same site again, on either database, or nothing."""

from __future__ import annotations

import gzip
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from django.core.management import CommandError, call_command

from accounts.models import ApiKey, Group, User, hash_key
from backends.models import Backend
from mindrouter.cli import archive
from scheduler.configuration.exporting import export_text
from scheduler.models import ConfigurationVersion, SiteSettings, UsageHour
from tests.factories import make_api_key, make_backend, make_decision, make_group, make_user

pytestmark = pytest.mark.django_db


@pytest.fixture
def key() -> str:
    """A site with something of everything."""
    ada = make_user(
        "ada", group=make_group("physics", scheduler_weight=2.5), password="opensesame12"
    )
    secret = make_api_key(ada, name="laptop")
    make_backend("a", models=("m",), api_key="sk-backend")
    SiteSettings.objects.create(pk=1, quantum=500)
    row = ApiKey.objects.get(name="laptop")
    hour = datetime(2026, 11, 1, tzinfo=UTC)
    UsageHour.objects.create(
        hour=hour, user_id=ada.pk, group="physics", key_id=row.pk, model="m", charged_tokens=123.5
    )
    make_decision("req-1")
    return secret


def manage(name: str, *arguments: str) -> str:
    out = io.StringIO()
    call_command(name, *arguments, stdout=out)
    return out.getvalue()


def test_a_restored_site_is_the_same(key: str, tmp_path: Path) -> None:
    file = str(tmp_path / "site.backup")
    before, ada = export_text(), User.objects.get(username="ada")
    history = Group.history.count()
    manage("backup", file)
    User.objects.filter(pk=ada.pk).update(email="changed@uni.example")
    Group.objects.create(name="later")
    version = ConfigurationVersion.objects.get().version
    assert manage("restore", file, "--replace").endswith("rows are restored.\n")
    assert export_text() == before
    again = User.objects.get(username="ada")
    assert (again.pk, again.date_joined) == (ada.pk, ada.date_joined)
    assert again.check_password("opensesame12")
    assert ApiKey.objects.get(sha256=hash_key(key)).user == again
    assert Backend.objects.get().api_key == "sk-backend"
    assert UsageHour.objects.get().charged_tokens == 123.5
    assert Group.history.count() == history  # restored itself, and not added to
    assert ConfigurationVersion.objects.get().version > version  # running routers read it anew
    assert make_group("next").pk > Group.objects.get(name="physics").pk


def test_the_file_holds_no_secret_in_the_clear_and_is_its_owners_only(
    key: str, tmp_path: Path
) -> None:
    path = tmp_path / "site.backup"
    manage("backup", str(path))
    text = gzip.decompress(path.read_bytes()).decode()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "physics" in text
    for secret in (key, "sk-backend", "opensesame12", "req-1"):
        assert secret not in text


def test_a_database_with_people_is_not_overwritten_unasked(key: str, tmp_path: Path) -> None:
    file = str(tmp_path / "site.backup")
    manage("backup", file)
    with pytest.raises(CommandError, match=r"Nothing was restored.*--replace"):
        manage("restore", file)


def spoil(path: Path, change: Any) -> None:
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    path.write_bytes(gzip.compress("\n".join(change(lines)).encode()))


def newer(lines: list[str]) -> list[str]:
    header = json.loads(lines[0])
    header["migrations"].append("scheduler.9999_from_the_future")
    return [json.dumps(header), *lines[1:]]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (newer, "newer version, which has scheduler.9999_from_the_future"),
        (lambda lines: ['{"format": 2, "migrations": []}', *lines[1:]], "newer version"),
        (lambda lines: ["{}", *lines[1:]], "not a backup"),
        (lambda lines: lines[:-3], "ends too early"),
        (lambda lines: [*lines[:2], "{", *lines[3:]], "Row 2 cannot be read"),
    ],
)
def test_what_does_not_fit_changes_nothing(key: str, tmp_path: Path, change: Any, why: str) -> None:
    path = tmp_path / "site.backup"
    manage("backup", str(path))
    spoil(path, change)
    before = export_text()
    with pytest.raises(CommandError, match=why):
        manage("restore", str(path), "--replace")
    assert export_text() == before


def test_another_encryption_key_is_named(key: str, tmp_path: Path, settings: Any) -> None:
    file = str(tmp_path / "site.backup")
    manage("backup", file)
    old = settings.FIELD_ENCRYPTION_KEY
    settings.FIELD_ENCRYPTION_KEY = Fernet.generate_key().decode()
    with pytest.raises(CommandError, match="FIELD_ENCRYPTION_KEY"):
        manage("restore", file, "--replace")
    settings.FIELD_ENCRYPTION_OLD_KEYS = [old]
    manage("restore", file, "--replace")
    assert Backend.objects.get().api_key == "sk-backend"


def test_every_table_is_either_kept_or_left_out_on_purpose() -> None:
    labels = {model._meta.label for model in archive.kept_models()}
    assert {"accounts.User", "accounts.HistoricalUser", "scheduler.UsageHour"} <= labels
    assert "scheduler.Decision" not in labels
