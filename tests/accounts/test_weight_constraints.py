"""What a weight may be is kept by the database too, whoever writes it."""

from __future__ import annotations

from decimal import Decimal

import pytest
from django.core.exceptions import ValidationError
from django.db import DatabaseError, connection, transaction

from accounts.models import Group, Quota
from tests.factories import make_group, make_quota, make_user

pytestmark = pytest.mark.django_db

TABLES = [("groups", "scheduler_weight"), ("accounts_quota", "weight_override")]


@pytest.fixture(autouse=True)
def rows() -> None:
    Group.objects.all().delete()
    make_group(scheduler_weight=1)
    make_quota(make_user(), weight_override=1)


def write(table: str, column: str, value: str) -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"UPDATE {table} SET {column} = {value}")  # noqa: S608


@pytest.mark.parametrize(("table", "column"), TABLES)
@pytest.mark.parametrize("value", ["-1", "-0.000001", "'NaN'", "1000000001", "'Infinity'", "'x'"])
def test_odd_weights_are_refused_by_the_database(table: str, column: str, value: str) -> None:
    with pytest.raises(DatabaseError):
        write(table, column, value)
    assert Group.objects.get().scheduler_weight == 1
    assert Quota.objects.get().weight_override == 1


@pytest.mark.parametrize(("table", "column"), TABLES)
@pytest.mark.parametrize("value", ["NULL", "0", "0.5", "1000000000"])
def test_usual_weights_are_taken_by_the_database(table: str, column: str, value: str) -> None:
    write(table, column, value)
    stored = (
        Group.objects.get().scheduler_weight
        if table == "groups"
        else (Quota.objects.get().weight_override)
    )
    assert stored == (None if value == "NULL" else Decimal(value))


@pytest.mark.parametrize("value", [Decimal(-1), Decimal("NaN"), Decimal(10**9 + 1)])
def test_odd_weights_are_refused_by_the_models(value: Decimal) -> None:
    with pytest.raises(ValidationError, match="scheduler_weight"):
        Group(name="g", scheduler_weight=value).full_clean()
    with pytest.raises(ValidationError, match="weight_override"):
        Quota(user=Quota.objects.get().user, weight_override=value).full_clean()
