"""A site's configuration, people, history and totals as one file, for any database.

A gzipped file of JSON lines: a header, then one row each with its number, so that totals still
belong to the same people. Passwords and keys are there as the hashes they are stored as; backends'
own keys as they are encrypted, so that ``FIELD_ENCRYPTION_KEY`` has to be kept beside it. Left out
is what is measured anew (states of backends, telemetry, curves of the last days), the log of single
requests, and captured prompts.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any, TextIO, cast

from django.apps import apps
from django.core import serializers
from django.core.management.color import no_style
from django.core.serializers.base import DeserializationError
from django.db import connection, models, transaction
from django.db.migrations.loader import MigrationLoader

from accounts.models import User
from backends.crypto import EncryptedTextField
from backends.models import Backend

FORMAT = 1
_APPS = ("accounts", "backends", "scheduler", "audit")
_LEFT_OUT = {
    "backends.NodeStatus",
    "backends.BackendStatus",
    "backends.GpuSample",
    "backends.BackendSample",
    "scheduler.Decision",
    "scheduler.Capture",
    "scheduler.ClusterMinute",
    "scheduler.ShareMinute",
    "scheduler.SpoolCursor",
    "scheduler.ConfigurationVersion",
    "scheduler.WhatIf",
}
#: They refer to users and keys, of which others may have the same numbers.
_GO_WITH_USERS = ("django_admin_log", "django_session", "scheduler_capture")


class Unfit(Exception):  # noqa: N818  what is wrong with a file or a database
    """Nothing was restored; the text says why."""


def kept_models() -> list[type[models.Model]]:
    """What an archive holds, in the order of the applications."""
    found = (model for name in _APPS for model in apps.get_app_config(name).get_models())
    return [model for model in found if model._meta.label not in _LEFT_OUT]


def count_rows() -> int:
    return sum(model._base_manager.count() for model in kept_models())  # noqa: SLF001  Django's name


def write(path: Path) -> Iterator[int]:
    """Write the archive, readable by its owner only; yields the number of rows so far.

    One transaction: the rows are those of one moment. A file that is there is replaced at the end.
    """
    new = path.with_name(path.name + ".new")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as raw, gzip.open(raw, "wt", encoding="utf-8") as packed:
        file = cast("TextIO", packed)
        is_outermost = not connection.in_atomic_block
        with transaction.atomic():
            if is_outermost and connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            file.write(json.dumps(_header()) + "\n")
            count = 0
            for count, row in enumerate(_rows(), start=1):
                file.write(json.dumps(row, default=_as_text) + "\n")
                yield count
        file.write(json.dumps({"rows": count}) + "\n")  # a file that was cut lacks it
    new.replace(path)


def _header() -> dict[str, Any]:
    return {"format": FORMAT, "rows": count_rows(), "migrations": sorted(_migrations())}


def _migrations() -> set[str]:
    """Those that this version knows: "app.name"."""
    known = MigrationLoader(None, ignore_no_migrations=True).graph.nodes
    return {f"{app}.{name}" for app, name in known if app in _APPS}


def _rows() -> Iterator[dict[str, Any]]:
    for model in kept_models():
        secret = _secrets(model)
        for row in model._base_manager.order_by("pk").iterator(2000):  # noqa: SLF001  as above
            (written,) = serializers.serialize("python", [row])
            for column in secret:
                plain = written["fields"][column.name]
                written["fields"][column.name] = column.get_prep_value(plain)
            yield written


def _as_text(value: Any) -> str:
    """Times to the microsecond, which Django's own encoder cuts off."""
    return value.isoformat() if isinstance(value, date | datetime) else str(value)


def _secrets(model: type[models.Model]) -> list[EncryptedTextField]:
    return [one for one in model._meta.concrete_fields if isinstance(one, EncryptedTextField)]


def read_header(path: Path) -> dict[str, Any]:
    """Raises: Unfit where the file is none of ours, or of a newer version."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            header = json.loads(file.readline())
        number, migrations = header["format"], set(header["migrations"])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise Unfit(f"{path} is not a backup of MindRouter: {error}") from error
    newer = sorted(migrations - _migrations())
    if number != FORMAT or newer:
        told = f", which has {newer[-1]}" if newer else ""
        raise Unfit(f"{path} was made by a newer version{told}. Restore it with that one.")
    return cast("dict[str, Any]", header)


def restore(path: Path, *, replace: bool = False) -> Iterator[int]:
    """Bring the database to what the archive holds; yields the number of rows so far.

    All or nothing. Raises: Unfit where it is not a whole archive, where a key is missing, or where
    the database has people or backends already and ``replace`` is not set.
    """
    read_header(path)
    if not replace and (User.objects.exists() or Backend.objects.exists()):
        raise Unfit("This database has users or backends already: --replace deletes them first.")
    with transaction.atomic():
        _empty()
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from _insert(cast("TextIO", file))
        with connection.cursor() as cursor:
            for statement in connection.ops.sequence_reset_sql(no_style(), kept_models()):
                cursor.execute(statement)


def _empty() -> None:
    """By SQL, as the history would otherwise note each row."""
    tables = [*(model._meta.db_table for model in kept_models()), *_GO_WITH_USERS]
    with connection.cursor() as cursor:
        for table in tables:
            quoted = connection.ops.quote_name(table)
            cursor.execute(f"DELETE FROM {quoted}")  # noqa: S608  our own names


def _insert(file: TextIO) -> Iterator[int]:
    count, ended = 0, False
    file.readline()  # the header
    try:
        for line in file:
            row = json.loads(line)
            if "model" not in row:
                ended = row["rows"] == count
                break
            _insert_one(row)
            count += 1
            yield count
    except (EOFError, OSError, ValueError, KeyError, DeserializationError) as error:
        raise Unfit(f"Row {count + 1} cannot be read: {error}") from error
    if not ended:
        raise Unfit("The file ends too early: it is not whole.")


def _insert_one(row: dict[str, Any]) -> None:
    for column in _secrets(apps.get_model(row["model"])):
        sealed = row["fields"][column.name]
        plain = column.from_db_value(sealed, None, connection)
        if sealed and plain is None:
            raise Unfit(
                "A backend's key is encrypted with another FIELD_ENCRYPTION_KEY: set that here, "
                "or name it in FIELD_ENCRYPTION_OLD_KEYS."
            )
        row["fields"][column.name] = plain
    for one in serializers.deserialize("python", [row]):
        one.save(force_insert=True)  # as it is: no history, no times of now
