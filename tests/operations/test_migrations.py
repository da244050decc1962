"""Processes of the release before serve on the tables of the next one: docs/upgrading.md."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.db import migrations, models
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ModelState, ProjectState
from django.db.models.fields import NOT_PROVIDED

from mindrouter.settings import BASE_DIR

#: The last ones that were written for new sites, when nobody had an older release.
FIRST_RELEASE = {"accounts": 5, "backends": 9, "scheduler": 12, "audit": 0}
HARMLESS = (
    migrations.CreateModel,
    migrations.AddIndex,
    migrations.RemoveIndex,
    migrations.AlterModelOptions,
    migrations.AlterModelManagers,
)


#: What a column may become: old values and rows without it stay possible.
FREER = {"null", "max_length", "default", *models.Field.non_db_attrs} - {"db_column"}


@cache
def loader() -> MigrationLoader:
    return MigrationLoader(None)


def later_ones() -> list[migrations.Migration]:
    ours = (one for one in loader().disk_migrations.values() if one.app_label in FIRST_RELEASE)
    return [one for one in ours if int(one.name[:4]) > FIRST_RELEASE[one.app_label]]


def in_the_way(migration: migrations.Migration, before: ProjectState) -> list[str]:
    """What of it processes of the release before could stumble over.

    A migration that removes what the release before no longer uses, or fills what it leaves empty,
    says so: ``contracts = "unused since 1.2"``.
    """
    if getattr(migration, "contracts", ""):
        return []
    added = {
        (one.model_name_lower, one.name)
        for one in migration.operations
        if isinstance(one, migrations.AddField)
    }
    return [
        f"{migration}: {one.describe()}"
        for one in migration.operations
        if not (
            is_freer(one, before.models[migration.app_label, one.model_name_lower])
            if isinstance(one, migrations.AlterField)
            else is_additive(one, added)
        )
    ]


def is_additive(one: Operation, added: set[tuple[str, str]]) -> bool:
    if isinstance(one, migrations.AddField):
        return fills_itself(one.field)
    if isinstance(one, migrations.AddConstraint):
        return {(one.model_name_lower, name) for name in fields_of(one.constraint)} <= added
    return isinstance(one, HARMLESS)


def is_freer(one: migrations.AlterField, model: ModelState) -> bool:
    """Whether the table takes all that it took, and more perhaps."""
    was, is_now = model.fields[one.name], one.field
    kinds = [
        (path, {name: value for name, value in options.items() if name not in FREER})
        for _, path, _, options in (was.deconstruct(), is_now.deconstruct())
    ]
    longer = (is_now.max_length or math.inf) >= (was.max_length or math.inf)
    return kinds[0] == kinds[1] and is_now.null >= was.null and longer


def fills_itself(field: models.Field[Any, Any]) -> bool:
    """Whether those who do not know the column may insert rows."""
    return bool(field.null or field.many_to_many or field.db_default is not NOT_PROVIDED)


def fields_of(constraint: models.BaseConstraint) -> set[str]:
    condition = getattr(constraint, "condition", None) or models.Q()
    return {*getattr(constraint, "fields", ()), *condition.referenced_base_fields}


def test_the_migrations_of_every_app_of_ours_are_looked_at() -> None:
    ours = {one.label for one in apps.get_app_configs() if Path(one.path).parent == BASE_DIR}
    assert ours & loader().migrated_apps == FIRST_RELEASE.keys()


def test_what_came_after_the_first_release_only_adds() -> None:
    found = [
        line
        for one in later_ones()
        for line in in_the_way(one, loader().project_state((one.app_label, one.name), at_end=False))
    ]
    assert found == [], "expand first and contract a release later: docs/postgresql.md"


def migration(*operations: Operation, **attributes: Any) -> migrations.Migration:
    one = migrations.Migration("0099_next", "scheduler")
    one.operations = list(operations)
    vars(one).update(attributes)
    return one


NEW = migrations.AddField("decision", "new", models.TextField(null=True))
IF_NEW = models.CheckConstraint(condition=models.Q(new__gt=""), name="c")


@pytest.mark.parametrize(
    "operations",
    [
        [NEW],
        [migrations.AddField("decision", "new", models.IntegerField(db_default=0))],
        [NEW, migrations.AddConstraint("decision", IF_NEW)],
        [migrations.CreateModel("New", [("id", models.AutoField(primary_key=True))])],
        [
            migrations.AlterField(
                "decision", "dialect", models.CharField(max_length=20, help_text="?")
            )
        ],
        [migrations.AlterField("decision", "dialect", models.CharField(max_length=99, null=True))],
    ],
)
def test_additions_are_let_pass(operations: list[Operation]) -> None:
    assert in_the_way(migration(*operations), loader().project_state()) == []


@pytest.mark.parametrize(
    "operation",
    [
        migrations.AddField("decision", "new", models.IntegerField(default=0)),
        migrations.AlterField("decision", "dialect", models.CharField(max_length=2)),
        migrations.AlterField("decision", "status", models.PositiveSmallIntegerField()),
        migrations.AddConstraint("decision", IF_NEW),
        migrations.RemoveField("decision", "cause"),
        migrations.RenameField("decision", "cause", "reason"),
        migrations.RenameModel("Decision", "Record"),
        migrations.DeleteModel("Decision"),
        migrations.RunSQL("UPDATE scheduler_decision SET cause = ''"),
    ],
)
def test_what_the_release_before_would_stumble_over_is_found_unless_it_is_said_why_not(
    operation: Operation,
) -> None:
    head = loader().project_state()
    assert len(in_the_way(migration(operation), head)) == 1
    assert in_the_way(migration(operation, contracts="unused since 0.2"), head) == []
