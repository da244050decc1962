"""The test's database: migrated once for all processes, until a migration changes, and emptied in
a tenth of the time that Django takes for it."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from django.apps import apps
from django.conf import settings
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.db import connection, connections, transaction
from django.test.utils import setup_databases, teardown_databases

from scheduler.triggers import install_triggers


def made(folder: Path) -> Callable[[], None]:
    """Make it as Django does; ``folder`` keeps what the migrations have made of SQLite. Returns
    what takes it away again."""
    how = {"verbosity": 0, "interactive": False, "serialized_aliases": ()}
    if connection.vendor != "sqlite":
        databases = setup_databases(**how)
        return lambda: teardown_databases(databases, verbosity=0)
    name = Path(settings.DATABASES["default"]["TEST"]["NAME"])
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{_digest()}.sqlite3"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait for the first one's
        if kept.exists():
            shutil.copyfile(kept, name)
        setup_databases(**how, keepdb=kept.exists())
        if not kept.exists():
            _keep(name, kept)
    # While one is connected, the end of another connection is not the last one's, with which
    # SQLite would tidy up each time.
    last = sqlite3.connect(name)
    last.execute("SELECT 1 FROM django_migrations").fetchall()
    return last.close  # the file goes with the process


def _digest() -> str:
    """Of all that decides what the migrations make."""
    digest = hashlib.sha256(repr(sorted(settings.INSTALLED_APPS)).encode())
    digest.update((settings.BASE_DIR / "requirements.txt").read_bytes())
    for app in apps.get_app_configs():
        if Path(app.path).is_relative_to(settings.BASE_DIR):
            for path in sorted(Path(app.path).glob("migrations/*.py")):
                digest.update(str(path.relative_to(settings.BASE_DIR)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _keep(name: Path, kept: Path) -> None:
    before = sorted(kept.parent.glob("*.sqlite3"), key=lambda path: path.stat().st_mtime)
    for older in before[:-2]:
        older.unlink()
    unfinished = kept.with_suffix(".new")
    with closing(sqlite3.connect(name)) as source, closing(sqlite3.connect(unfinished)) as target:
        source.backup(target)
    unfinished.rename(kept)


def emptied(self: Any) -> None:
    """What ``flush`` does, in place of ``TransactionTestCase._fixture_teardown``: nothing is left
    but what ``post_migrate`` makes. Most of that stays, since nothing here changes it."""
    stays = {Permission._meta.db_table, ContentType._meta.db_table}
    for alias in self._databases_names(include_mirrors=False):
        one = connections[alias]
        tables = one.introspection.django_table_names(only_existing=True, include_views=False)
        with transaction.atomic(using=alias), one.cursor() as cursor:
            for table in sorted({*tables} - stays):
                cursor.execute(f"DELETE FROM {one.ops.quote_name(table)}")  # noqa: S608
            install_triggers(using=alias)
