"""Database triggers that count configuration changes.

Any change of a configuration table, also by ``QuerySet.update`` or plain SQL, raises the one row
of ``ConfigurationVersion``; every process polls that row and reloads when it has changed. The
triggers are made after each ``migrate`` and not by a migration, because SQLite drops a table's
triggers whenever a later migration rebuilds the table.
"""

from __future__ import annotations

from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

CONFIGURATION_TABLES = (
    "groups",
    "accounts_user",
    "accounts_quota",
    "accounts_apikey",
    "accounts_boost",
    "accounts_modellimits",
    "backends_node",
    "backends_backend",
    "backends_backendmodel",
    "backends_alias",
    "backends_modelstrategy",
    "scheduler_sitesettings",
)
_BUMP = "UPDATE scheduler_configurationversion SET version = version + 1 WHERE id = 1"


def install_triggers(using: str = "default", **_: Any) -> None:
    """Create or replace the triggers on the database ``using``; safe to repeat."""
    connection = connections[using]
    tables = set(connection.introspection.table_names())
    if "scheduler_configurationversion" not in tables:
        return
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO scheduler_configurationversion (id, version) VALUES (1, 1) "
            "ON CONFLICT (id) DO NOTHING"
        )
        for statement in _statements(connection, tables):
            cursor.execute(statement)


def _statements(connection: BaseDatabaseWrapper, tables: set[str]) -> list[str]:
    present = [table for table in CONFIGURATION_TABLES if table in tables]
    if connection.vendor == "postgresql":
        return [_POSTGRESQL_FUNCTION, *(s for table in present for s in _postgresql(table))]
    return [s for table in present for s in _sqlite(table)]


_POSTGRESQL_FUNCTION = f"""
CREATE OR REPLACE FUNCTION bump_configuration_version() RETURNS trigger AS $$
BEGIN
    {_BUMP};
    RETURN NULL;
END $$ LANGUAGE plpgsql
"""


def _postgresql(table: str) -> list[str]:
    name = f"{table}_configuration"
    return [
        f"DROP TRIGGER IF EXISTS {name} ON {table}",
        f"CREATE TRIGGER {name} AFTER INSERT OR UPDATE OR DELETE ON {table} "
        "FOR EACH STATEMENT EXECUTE FUNCTION bump_configuration_version()",
    ]


def _sqlite(table: str) -> list[str]:
    return [
        f"CREATE TRIGGER IF NOT EXISTS {table}_configuration_{event.lower()} "
        f"AFTER {event} ON {table} BEGIN {_BUMP}; END"
        for event in ("INSERT", "UPDATE", "DELETE")
    ]
