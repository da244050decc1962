"""All that an expanding release may do to the tables while the one before serves: to every one a
column that may be null, one that the database fills, and an index made without locking it."""

from django.apps.registry import Apps
from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor


def expand(apps: Apps, schema_editor: BaseDatabaseSchemaEditor) -> None:
    with schema_editor.connection.cursor() as cursor:
        for table in schema_editor.connection.introspection.table_names(cursor):
            cursor.execute(f"ALTER TABLE {table} ADD COLUMN next_note text")
            cursor.execute(f"ALTER TABLE {table} ADD COLUMN next_count integer DEFAULT 7 NOT NULL")
            cursor.execute(f"CREATE INDEX CONCURRENTLY ON {table} (next_count)")


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("scheduler", "0001_initial")]
    operations = [migrations.RunPython(expand)]
