"""One number in the database tells every process that the configuration has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.apps import apps
from django.db import connection, models

from accounts.models import ApiKey, Boost, Group, ModelLimits, Quota, User
from backends.models import (
    Alias,
    Backend,
    BackendModel,
    BackendStatus,
    ModelStrategy,
    Node,
)
from mindrouter.management.commands.start import Command as Start
from scheduler.models import ConfigurationVersion, SiteSettings
from scheduler.triggers import CONFIGURATION_TABLES, install_triggers
from tests.factories import make_api_key, make_backend, make_boost, make_decision, make_user

pytestmark = pytest.mark.django_db


def version() -> int:
    return ConfigurationVersion.objects.get(pk=1).version


def raises_version(change: Callable[[], Any]) -> bool:
    before = version()
    change()
    return version() > before


def one_of_each() -> dict[type[models.Model], models.Model]:
    user = make_user("ada", group=Group.objects.get(name="faculty"))
    make_api_key(user)
    backend = make_backend("a", models=("m",))
    return {
        Group: Group.objects.get(name="faculty"),
        User: user,
        Quota: Quota.objects.create(user=user),
        ApiKey: ApiKey.objects.get(),
        Boost: make_boost(user=user),
        ModelLimits: ModelLimits.objects.create(model_name="m"),
        Node: Node.objects.create(name="n"),
        Backend: backend,
        BackendModel: backend.models.get(),
        Alias: Alias.objects.create(name="small", targets=["m"]),
        ModelStrategy: ModelStrategy.objects.create(model_name="m"),
        SiteSettings: SiteSettings.objects.create(pk=1),
    }


#: A column of each configuration table.
COLUMNS: dict[type[models.Model], tuple[str, Any]] = {
    Group: ("scheduler_weight", 4),
    User: ("is_active", False),
    Quota: ("max_queued", 1),
    ApiKey: ("enabled", False),
    Boost: ("factor", 3),
    ModelLimits: ("max_queued", 1),
    Node: ("telemetry_url", "http://gpu-1:9400/metrics"),
    Backend: ("enabled", False),
    BackendModel: ("vision", True),
    Alias: ("targets", ["n"]),
    ModelStrategy: ("strategy", "affinity"),
    SiteSettings: ("share_mode", "group"),
}


def test_the_watched_tables_are_those_of_the_configuration() -> None:
    assert sorted(model._meta.db_table for model in COLUMNS) == sorted(CONFIGURATION_TABLES)


@pytest.mark.parametrize("model", COLUMNS, ids=lambda model: model.__name__)
def test_every_way_of_changing_a_configuration_table_raises_the_version(
    model: type[models.Model],
) -> None:
    row = one_of_each()[model]
    manager = model._default_manager
    column, value = COLUMNS[model]
    assert raises_version(row.save)
    assert raises_version(lambda: manager.filter(pk=row.pk).update(**{column: value}))
    assert raises_version(lambda: manager.bulk_update([row], [column]))

    def by_sql() -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"UPDATE {model._meta.db_table} SET id = id WHERE id = {row.pk}")  # noqa: S608

    assert raises_version(by_sql)
    if model is Group:
        User.objects.all().delete()  # a group in use cannot go
    assert raises_version(row.delete)


def test_what_is_no_configuration_leaves_the_version_alone() -> None:
    backend = make_backend("a")
    before = version()
    make_decision()
    BackendStatus.objects.update_or_create(backend=backend, defaults={"reachable": True})
    BackendStatus.objects.update(running=3)
    apps.get_model("sessions", "Session").objects.all().delete()
    assert version() == before


def test_installing_the_triggers_again_changes_nothing() -> None:
    before = version()
    install_triggers()
    install_triggers()
    assert version() == before
    before = version()
    Group.objects.filter(name="faculty").update(scheduler_weight=5)
    assert version() == before + 1


def test_a_rolled_back_change_leaves_the_version_alone() -> None:
    from django.db import transaction

    before = version()
    with transaction.atomic():
        Group.objects.filter(name="faculty").update(scheduler_weight=5)
        transaction.set_rollback(True)
    assert version() == before


def test_a_start_makes_up_for_what_came_after_the_migrations_of_one_that_was_stopped() -> None:
    ConfigurationVersion.objects.all().delete()
    Start()._migrate()
    assert version() == 1
