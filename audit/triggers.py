"""Histories are append-only: the database refuses to change or delete what they say.

Two things may still be written: the names of a person who is erased, and the reference to an
account that is deleted. A data migration that has to change a history drops the triggers first;
they are made again after each ``migrate``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.db import connections, models

#: Columns of histories that erasing a person empties.
PERSONAL = {
    "accounts_historicaluser": {"username", "first_name", "last_name", "email"},
    "accounts_historicalapikey": {"name", "prefix", "capture_reason"},
    "accounts_historicalboost": {"name", "reason"},
}
_ALWAYS = {"history_user_id", "history_actor"}
_REFUSAL = "histories are append-only"


def histories() -> Iterator[type[models.Model]]:
    """Every table of a history."""
    for model in apps.get_models():
        if hasattr(model, "history_actor"):
            yield model


def install_append_only(using: str = "default", **_: Any) -> None:
    """Create or replace the triggers on the database ``using``; safe to repeat."""
    connection = connections[using]
    present = set(connection.introspection.table_names())
    tables = [model for model in histories() if model._meta.db_table in present]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(_POSTGRESQL_FUNCTION)
        for model in tables:
            for statement in _statements(model, connection.vendor):
                cursor.execute(statement)


def remove_append_only(using: str = "default") -> None:
    """Take the triggers away, for what has to change a history."""
    connection = connections[using]
    with connection.cursor() as cursor:
        for model in histories():
            table = model._meta.db_table
            for name in _names(table):
                on = f" ON {table}" if connection.vendor == "postgresql" else ""
                cursor.execute(f"DROP TRIGGER IF EXISTS {name}{on}")


def _statements(model: type[models.Model], vendor: str) -> Iterator[str]:
    table = model._meta.db_table
    free = _ALWAYS | PERSONAL.get(table, set())
    columns = (field.column for field in model._meta.concrete_fields)
    kept = ", ".join(f'"{column}"' for column in columns if column not in free)
    update, delete = _names(table)
    for name, event in ((update, f"UPDATE OF {kept}"), (delete, "DELETE")):
        if vendor == "postgresql":
            yield f"DROP TRIGGER IF EXISTS {name} ON {table}"
            yield (
                f"CREATE TRIGGER {name} BEFORE {event} ON {table} "
                "FOR EACH ROW EXECUTE FUNCTION refuse_to_change_history()"
            )
        else:
            yield f"DROP TRIGGER IF EXISTS {name}"
            yield (
                f"CREATE TRIGGER {name} BEFORE {event} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{_REFUSAL}'); END"
            )


def _names(table: str) -> tuple[str, str]:
    return f"{table}_no_update", f"{table}_no_delete"


_POSTGRESQL_FUNCTION = f"""
CREATE OR REPLACE FUNCTION refuse_to_change_history() RETURNS trigger AS $$
BEGIN
    RAISE EXCEPTION '{_REFUSAL}' USING ERRCODE = 'integrity_constraint_violation';
END $$ LANGUAGE plpgsql
"""
