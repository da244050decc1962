"""Every change says who made it, from where and how; and nobody rewrites what it says."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import call_command
from django.db import DatabaseError, connection, transaction
from django.test import Client

from accounts.erasing import erase
from accounts.models import ApiKey, Boost, Group, Role, User
from audit.models import Deed
from audit.records import Audited
from audit.triggers import histories, install_append_only, remove_append_only
from backends.models import Alias, Backend, BackendModel, ModelStrategy, Node
from backends.trial import Trial
from scheduler.changes import PAGE_ROWS, TRACKED, every_change
from scheduler.models import ModelPrice, SiteSettings
from tests.factories import (
    make_admin,
    make_api_key,
    make_backend,
    make_boost,
    make_group,
    make_user,
)

pytestmark = pytest.mark.django_db


def newest(model: Any) -> Any:
    return model.history.latest("history_id")


def said(row: Any) -> tuple[str, str, str]:
    return row.history_actor, row.history_address, row.history_via


# ---- what is said


def test_a_change_on_a_page_says_who_from_where_and_on_which_page(client: Client) -> None:
    client.force_login(make_admin("root"))
    group = make_group("physics")
    fields = {f"group-{group.pk}-scheduler_weight": "4.5", "reason": "new hires"}
    client.post("/admin/groups/", fields, REMOTE_ADDR="192.0.2.7")
    assert said(newest(Group)) == ("root", "192.0.2.7", "POST /admin/groups/")
    page = client.get("/admin/history/").content.decode()
    assert "192.0.2.7" in page
    assert "POST /admin/groups/" in page


def test_a_change_by_the_api_says_with_which_key(client: Client) -> None:
    key = make_api_key(make_admin("root"))
    group = make_group("physics")
    client.patch(
        f"/api/admin/groups/{group.pk}",
        json.dumps({"scheduler_weight": 4}),
        content_type="application/json",
        headers={"Authorization": f"Bearer {key}"},
        REMOTE_ADDR="192.0.2.8",
    )
    who, address, via = said(newest(Group))
    assert (who, address) == ("root", "192.0.2.8")
    assert via == f"PATCH /api/admin/groups/{group.pk} with key {ApiKey.objects.get().prefix}…"
    assert key not in via


def test_a_change_by_a_command_says_which_and_who_ran_it(monkeypatch: pytest.MonkeyPatch) -> None:
    make_user("ada")
    monkeypatch.setattr("sys.argv", ["manage.py", "key", "create", "ada", "--name", "laptop"])
    monkeypatch.setattr("getpass.getuser", lambda: "operator-7")
    call_command("key", "create", "ada", "--name", "laptop", stdout=io.StringIO())
    assert said(newest(ApiKey)) == ("operator-7", "", "manage.py key")


def test_what_is_done_with_keys_is_recorded_without_the_keys(client: Client) -> None:
    ada = make_user("ada")
    client.force_login(ada)
    page = client.post("/account/keys/", {"name": "laptop", "expires": ""}).content.decode()
    key = ApiKey.objects.get()
    client.post(f"/account/keys/{key.pk}/revoke/")
    assert [row.history_type for row in ApiKey.history.order_by("history_id")] == ["+", "~"]
    assert [row.history_actor for row in ApiKey.history.all()] == ["ada", "ada"]
    columns = {column.name for column in ApiKey.history.model._meta.concrete_fields}
    assert not columns & {"sha256", "previous_sha256"}
    assert "mr-" in page


def test_what_changes_no_row_is_said_with_who_did_it_from_where(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, backend = make_admin("root"), make_backend("gpu-1", models=("m",))
    monkeypatch.setattr(
        "backends.trial.run",
        lambda *_: Trial(backend="gpu-1", model_name="m", path="/v1", seconds=0.1),
    )
    client.force_login(root)
    client.post(
        f"/admin/backends/backend/{backend.pk}/test/",
        {"model": "m", "prompt": "Hi"},
        REMOTE_ADDR="192.0.2.9",
    )
    [told] = [one for one in every_change(root) if one.kind == "deed"]
    assert (told.what, told.action) == ("backend gpu-1, model m", "tested")
    assert (told.who, told.address) == ("root", "192.0.2.9")
    assert told.via == f"POST /admin/backends/backend/{backend.pk}/test/"
    page = client.get("/admin/history/?kind=deed").content.decode()
    assert "backend gpu-1, model m" in page


def test_who_changed_something_is_still_said_when_the_account_is_deleted(client: Client) -> None:
    root = make_admin("root")
    make_admin("other")
    client.force_login(root)
    group = make_group("physics")
    client.post("/admin/groups/", {f"group-{group.pk}-scheduler_weight": "4.5", "reason": ""})
    root.delete()
    row = newest(Group)
    assert (row.history_user, row.history_actor) == (None, "root")


def test_every_kind_of_row_that_admins_change_has_such_a_history() -> None:
    kept = {model for model, _ in TRACKED.values()}
    assert all(issubclass(model.history.model, Audited) for model in kept)
    assert {model.history.model for model in kept} == set(histories())


# ---- that it stays


@pytest.fixture
def append_only() -> Iterator[None]:
    install_append_only()
    yield
    remove_append_only()


def one_of_each() -> list[Any]:
    user = make_user("ada", group=make_group("physics"))
    make_api_key(user)
    make_boost(user=user)
    backend = make_backend("a", models=("m",))
    Node.objects.create(name="n")
    Alias.objects.create(name="small", targets=["m"])
    ModelStrategy.objects.create(model_name="m")
    SiteSettings.objects.create(pk=1)
    ModelPrice.objects.create(model_name="m", prompt=1, completion=1)
    assert backend.pk
    BackendModel.objects.get().save()
    Deed.note("request 1", "removed")
    models = (Group, User, ApiKey, Boost, Backend, BackendModel, Node, Alias, ModelStrategy, Deed)
    return [*models, SiteSettings, ModelPrice]


def refused(statement: Any) -> bool:
    try:
        with transaction.atomic():
            statement()
    except DatabaseError as error:
        return "append-only" in str(error)
    return False


def test_no_history_is_changed_or_deleted_not_by_plain_sql_either(append_only: None) -> None:
    for model in one_of_each():
        history = model.history
        table = history.model._meta.db_table
        assert history.exists(), table
        assert refused(lambda rows=history: rows.all().delete()), table
        assert refused(lambda rows=history: rows.update(history_type="-")), table
        assert refused(lambda rows=history: rows.update(history_address="")), table
        assert refused(lambda rows=history: rows.update(history_via="elsewhere")), table
        with connection.cursor() as cursor:
            assert refused(lambda name=table: cursor.execute(f"DELETE FROM {name}")), table  # noqa: S608


def test_before_and_after_are_not_rewritten(append_only: None) -> None:
    one_of_each()
    assert refused(lambda: Group.history.update(scheduler_weight=9))
    assert refused(lambda: User.history.update(is_superuser=False))
    assert refused(lambda: ApiKey.history.update(enabled=True))
    assert refused(lambda: Backend.history.update(base_url="http://elsewhere"))


def test_changes_go_on_and_people_are_erased_and_deleted(append_only: None, client: Client) -> None:
    one_of_each()
    root, ada = make_admin("root"), User.objects.get(username="ada")
    client.force_login(ada)
    client.post("/account/keys/", {"name": "ada's own", "expires": ""})
    erase(ada)
    assert "ada" not in set(User.history.values_list("username", flat=True))
    assert not ApiKey.history.filter(history_actor="ada").exists()
    assert not ApiKey.history.filter(name="ada's own").exists()
    ada.delete()
    install_append_only()  # again, as each migrate does
    assert refused(lambda: User.history.all().delete())
    assert root.pk


# ---- export


def test_all_of_it_is_exported_by_those_who_may_read_it(client: Client) -> None:
    root = make_admin("root")
    group = make_group("=SUM(A1)", scheduler_weight=1)
    for weight in range(2, PAGE_ROWS + 12):
        group.scheduler_weight = weight
        group.save()
    client.force_login(make_user("audrey", role=Role.AUDITOR))
    count = len(list(every_change(root)))
    rows = client.get("/admin/history.json").json()
    assert len(rows) == count > PAGE_ROWS
    [first] = [row for row in rows if row["kind"] == "group" and row["values"]][:1]
    assert first["values"] == [{"name": "scheduler weight", "before": "60", "after": "61"}]
    text = client.get("/admin/history.csv?kind=group").content.decode()
    table = list(csv.DictReader(io.StringIO(text)))
    assert len(table) == PAGE_ROWS + 11
    assert {row["what"] for row in table} >= {"'=SUM(A1)"}
    client.force_login(make_user("ada"))
    assert client.get("/admin/history.json").status_code == 302


def test_rows_of_one_instant_are_exported_once_each() -> None:
    root = make_admin("root")
    groups = [make_group(f"g-{number}") for number in range(PAGE_ROWS + 9)]
    at = Group.history.latest("history_id").history_date
    Group.history.update(history_date=at)
    found = [one.what for one in every_change(root, "group") if one.what.startswith("g-")]
    assert len(found) == len(set(found)) >= PAGE_ROWS
    assert len(groups) > PAGE_ROWS
