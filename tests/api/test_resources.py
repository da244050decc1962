"""Every resource: made, read, listed, changed, deleted, with its history; and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from accounts.models import ApiKey, Group, User, hash_key
from backends.models import Backend, Node
from scheduler.models import SiteSettings
from tests.api.conftest import Api
from tests.factories import (
    make_admin,
    make_api_key,
    make_backend,
    make_group,
    make_quota,
    make_user,
)

LATER, PAST = "2030-01-01T00:00:00Z", "2020-01-01T00:00:00Z"
#: {resource: (what makes a row, what changes it)}
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "groups": (
        {"name": "physics", "scheduler_weight": 2.5, "allowed_models": ["m"]},
        {"scheduler_weight": 0, "max_concurrent": 3, "allowed_models": None},
    ),
    "users": (
        {"username": "bob", "group": "faculty", "email": "bob@a.example"},
        {"group": None, "role": "auditor"},
    ),
    "quotas": (
        {"user": "ada", "weight_override": 0.5},
        {"token_budget": 9, "budget_period": "day"},
    ),
    "boosts": (
        {"name": "project", "group": "faculty", "factor": 2, "ends_at": LATER},
        {"group": None, "user": "ada", "factor": 0.5},
    ),
    "api-keys": ({"user": "ada", "name": "desktop"}, {"enabled": False}),
    "backends": (
        {"name": "b", "base_url": "http://gpu-2:8000", "node": "gpu-1", "gpu_indexes": [0, 1]},
        {"max_concurrent": 2, "node": None, "gpu_indexes": None},
    ),
    "backend-models": (
        {"backend": "a", "name": "n", "vision": True, "vram_mb": 100.5},
        {"vision": None, "context_length": 4096},
    ),
    "nodes": ({"name": "gpu-2"}, {"telemetry_url": "http://gpu-2:9400/metrics"}),
    "aliases": ({"name": "small", "targets": ["m", "n"]}, {"targets": ["n"]}),
    "model-limits": ({"model_name": "m"}, {"max_concurrent": 2}),
    "model-prices": ({"model_name": "m", "prompt": 0.5, "completion": 2}, {"cached": 0.1}),
    "model-strategies": ({"model_name": "m"}, {"strategy": "affinity"}),
}


@pytest.fixture
def _others(db: None) -> None:
    make_user("ada")
    make_backend("a")
    Node.objects.create(name="gpu-1")


@pytest.mark.usefixtures("_others")
@pytest.mark.parametrize("resource", ROWS)
def test_a_row_is_made_read_changed_and_deleted(api: Api, resource: str) -> None:
    new, change = ROWS[resource]
    made = api("POST", resource, new)
    assert made.status_code == 201, made.content
    row = made.json()
    assert {name: row[name] for name in new} == new
    own = f"{resource}/{row['id']}"
    assert api.ok("GET", own) == {name: row[name] for name in row if name != "key"}
    changed = api.ok("PATCH", own, change)
    assert {name: changed[name] for name in change} == change
    kept = set(new) - set(change)
    assert {name: changed[name] for name in kept} == {name: new[name] for name in kept}
    assert changed["id"] in [one["id"] for one in api.ok("GET", resource)["results"]]
    assert api("DELETE", own).status_code == 204
    assert api("GET", own).status_code == 404


def test_the_history_says_who_when_why_before_and_after(api: Api) -> None:
    group, physics = api.ok("POST", "groups", {"name": "x", "scheduler_weight": 3}), make_group("p")
    own = f"groups/{group['id']}"
    api.ok("PATCH", own, {"scheduler_weight": 5})
    api("DELETE", own)
    deleted, changed, created = api.ok("GET", f"{own}/history")["results"]
    assert (deleted["kind"], changed["kind"], created["kind"]) == ("deleted", "changed", "created")
    assert (changed["user"], changed["reason"]) == ("root", "management API")
    assert changed["changes"] == [{"field": "scheduler_weight", "before": 3, "after": 5}]
    assert {"field": "name", "before": None, "after": "x"} in created["changes"]
    user = api.ok("POST", "users", {"username": "bob"})
    api.ok("PATCH", f"users/{user['id']}", {"group": "p"})
    newest = api.ok("GET", f"users/{user['id']}/history")["results"][0]
    assert newest["changes"] == [{"field": "group", "before": None, "after": physics.name}]
    assert api("GET", "groups/999/history").status_code == 404


def test_a_long_history_comes_in_pages_of_few_queries(api: Api) -> None:
    group = make_group("x")
    for weight in range(2, 12):
        group.scheduler_weight = weight
        group.save()
    own = f"groups/{group.pk}/history"
    first = api.ok("GET", f"{own}?limit=4")
    assert [one["changes"][0]["after"] for one in first["results"]] == [11, 10, 9, 8]
    assert first["results"][-1]["changes"][0]["before"] == 7
    second = api.ok("GET", first["next"].partition("/api/admin/")[2])
    assert [one["changes"][0]["after"] for one in second["results"]] == [7, 6, 5, 4]
    with CaptureQueriesContext(connection) as queries:
        api.ok("GET", own)
    assert len(queries) == 3  # key, whether there is any, the page


# ---- secrets


def test_a_new_key_is_answered_once_and_works(api: Api) -> None:
    made = api("POST", "api-keys", {"user": "root", "name": "laptop"})
    assert made["Cache-Control"] == "no-store"
    row = made.json()
    stored = ApiKey.objects.get(name="laptop")
    assert (stored.sha256, stored.prefix) == (hash_key(row["key"]), row["prefix"])
    assert Api(row["key"])("GET", "groups").status_code == 200
    assert "key" not in api.ok("GET", f"api-keys/{row['id']}")
    text = json.dumps(api.ok("GET", "api-keys")) + json.dumps(
        api.ok("GET", f"api-keys/{row['id']}/history")
    )
    assert row["key"] not in text
    assert stored.sha256 not in text


def test_a_rotated_key_replaces_the_old_one_at_once(api: Api) -> None:
    row = api.ok("POST", "api-keys", {"user": "root", "name": "laptop"})
    rotated = api("POST", f"api-keys/{row['id']}/rotate")
    assert rotated["Cache-Control"] == "no-store"
    new = rotated.json()
    assert (new["id"], new["name"]) == (row["id"], "laptop")
    assert Api(row["key"])("GET", "groups").status_code == 401
    assert Api(new["key"])("GET", "groups").status_code == 200
    assert api.ok("POST", f"api-keys/{row['id']}/revoke")["enabled"] is False
    assert Api(new["key"])("GET", "groups").status_code == 401
    newest = api.ok("GET", f"api-keys/{row['id']}/history")["results"][0]
    assert newest["reason"] == "management API: key revoked"


def test_a_key_keeps_its_user(api: Api) -> None:
    make_user("eve")
    row = api.ok("POST", "api-keys", {"user": "root", "name": "laptop"})
    assert problem(api("PATCH", f"api-keys/{row['id']}", {"user": "eve"})) == {
        "user": "A key keeps its user."
    }
    api.ok("PATCH", f"api-keys/{row['id']}", {"user": "root"})


def test_a_backends_and_a_nodes_key_are_stored_and_never_shown(api: Api) -> None:
    backend = api.ok(
        "POST", "backends", {"name": "a", "base_url": "http://b:1", "api_key": "sk-secret"}
    )
    node = api.ok("POST", "nodes", {"name": "n", "telemetry_key": "tk-secret"})
    assert Backend.objects.get().api_key == "sk-secret"
    assert Node.objects.get().telemetry_key == "tk-secret"
    assert (backend["has_api_key"], node["has_telemetry_key"]) == (True, True)
    everything = [backend, node, api.ok("GET", "backends"), api.ok("GET", "nodes")]
    everything += [api.ok("GET", f"backends/{backend['id']}/history")]
    assert "secret" not in json.dumps(everything)
    assert api.ok("PATCH", f"backends/{backend['id']}", {"priority": 1})["has_api_key"] is True
    removed = api.ok("PATCH", f"backends/{backend['id']}", {"api_key": None})
    assert removed["has_api_key"] is False


def test_a_password_is_checked_stored_as_a_hash_and_never_shown(api: Api) -> None:
    short = api("POST", "users", {"username": "bob", "password": "short"})
    assert "too short" in problem(short)["password"]
    made = api.ok("POST", "users", {"username": "bob", "password": "a-long-enough-one"})
    bob = User.objects.get(username="bob")
    assert bob.check_password("a-long-enough-one")
    assert "password" not in made
    carol = api.ok("POST", "users", {"username": "carol"})
    assert not User.objects.get(pk=carol["id"]).has_usable_password()


# ---- what is refused


def problem(answer: Any, status: int = 400) -> dict[str, str]:
    """{field: what is wrong with it}"""
    assert answer.status_code == status, answer.content
    assert answer["Content-Type"] == "application/problem+json"
    document = answer.json()
    assert (document["type"], document["status"]) == ("about:blank", status)
    assert document["title"]
    assert document["detail"]
    return {one["field"]: one["detail"] for one in document.get("errors", [])}


@pytest.mark.usefixtures("_others")
@pytest.mark.parametrize(
    ("resource", "body", "field"),
    [
        ("groups", {"name": "x", "scheduler_weight": -1}, "scheduler_weight"),
        ("groups", {"name": "x", "scheduler_weight": "NaN"}, "scheduler_weight"),
        ("groups", {"name": "x", "max_wait": "inf"}, "max_wait"),
        ("groups", {"name": "x", "max_concurrent": True}, "max_concurrent"),
        ("groups", {"name": "faculty"}, "name"),
        ("groups", {}, "name"),
        ("groups", {"name": "x", "budget_period": ""}, "budget_period"),
        ("groups", {"name": "x", "allowed_models": ["m", 1]}, "allowed_models.1"),
        ("users", {"username": "bob", "group": "nobody"}, "group"),
        ("users", {"username": "a b"}, "username"),
        ("users", {"username": "bob", "role": "king"}, "role"),
        ("boosts", {"name": "x", "group": "faculty", "factor": -1, "ends_at": LATER}, "factor"),
        ("boosts", {"name": "x", "group": "faculty", "factor": 2, "ends_at": PAST}, "ends_at"),
        ("boosts", {"name": "x", "factor": 2, "ends_at": LATER}, "group"),
        ("backends", {"name": "x", "base_url": "http://169.254.169.254"}, "base_url"),
        ("backends", {"name": "x", "base_url": "http://u:p@gpu-1"}, "base_url"),
        ("backends", {"name": "x", "base_url": "http://b", "priority": 1e7}, "priority"),
        ("backends", {"name": "x", "base_url": "http://b", "gpu_indexes": [0, 0]}, "gpu_indexes"),
        ("backends", {"name": "x", "base_url": "http://b", "enabled": "yes"}, "enabled"),
        ("aliases", {"name": "x", "targets": []}, "targets"),
        ("model-strategies", {"model_name": "x", "strategy": "best"}, "strategy"),
    ],
)
def test_what_the_forms_refuse_is_refused_here_too(
    api: Api, resource: str, body: dict[str, Any], field: str
) -> None:
    assert field in problem(api("POST", resource, body))


def test_a_number_that_is_none_in_json_is_refused(api: Api) -> None:
    group = make_group("x")
    answer = Client(headers={"Authorization": f"Bearer {make_api_key(make_admin())}"}).patch(
        f"/api/admin/groups/{group.pk}", '{"max_wait": 1e999}', content_type="application/json"
    )
    assert "max_wait" in problem(answer)


def test_a_group_in_use_is_kept_and_who_uses_it_is_said(api: Api) -> None:
    group = make_group("x")
    make_user("ada", group=group)
    answer = api("DELETE", f"groups/{group.pk}")
    problem(answer, 409)
    assert answer.json()["detail"] == "Still used by ada."
    assert Group.objects.filter(pk=group.pk).exists()


def test_the_last_superuser_is_neither_demoted_nor_disabled_nor_deleted(api: Api) -> None:
    root = f"users/{User.objects.get(username='root').pk}"
    for change in ({"is_superuser": False}, {"is_active": False}):
        assert "last active superuser" in problem(api("PATCH", root, change))[""]
    answer = api("DELETE", root)
    problem(answer, 409)
    assert "last active superuser" in answer.json()["detail"]
    make_admin("second")
    assert api.ok("PATCH", root, {"first_name": "R"})["first_name"] == "R"


def test_unknown_addresses_methods_types_and_bodies_are_problems(api: Api) -> None:
    problem(api("GET", "nothing/here"), 404)
    problem(api("GET", "groups/999"), 404)
    problem(api("PUT", "groups"), 405)
    client = Client(headers={"Authorization": f"Bearer {make_api_key(make_admin())}"})
    problem(client.post("/api/admin/groups", {"name": "x"}), 415)
    problem(client.post("/api/admin/groups", "{", content_type="application/json"))
    problem(Client().get("/api/admin/groups"), 401)
    assert Client().get("/api/admin/groups")["WWW-Authenticate"] == "Bearer"
    problem(Client(headers={"Authorization": "Bearer no"}).get("/api/admin/groups"), 401)
    problem(Client().get("/api/admin/nothing"), 401)


def test_a_session_needs_the_token_against_forged_requests(db: None) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_admin("root"), "accounts.authentication.RoleBackend")
    body = json.dumps({"name": "x"})
    problem(client.post("/api/admin/groups", body, content_type="application/json"), 403)
    client.get("/admin/groups/")
    token = client.cookies["csrftoken"].value
    answer = client.post(
        "/api/admin/groups", body, content_type="application/json", headers={"X-CSRFToken": token}
    )
    assert answer.status_code == 201


# ---- lists


def test_lists_are_filtered_searched_ordered_and_paged(api: Api) -> None:
    physics = make_group("physics")
    for number in range(5):
        make_user(f"u{number}", group=physics if number % 2 else None, email=f"{9 - number}@a.ex")

    def names(query: str) -> list[str]:
        return [one["username"] for one in api.ok("GET", f"users?{query}")["results"]]

    assert names("group=physics") == ["u1", "u3"]
    assert names("search=u&ordering=email") == ["u4", "u3", "u2", "u1", "u0"]
    assert names("is_superuser=true") == ["root"]
    assert names("username=u2") == ["u2"]
    page = api.ok("GET", "users?limit=2&ordering=-username")
    assert (page["count"], page["previous"]) == (6, None)
    assert [one["username"] for one in page["results"]] == ["u4", "u3"]
    page = api.ok("GET", page["next"].partition("/api/admin/")[2])
    assert [one["username"] for one in page["results"]] == ["u2", "u1"]


@pytest.mark.parametrize(
    "query", ["gruop=x", "limit=0", "limit=1001", "offset=-1", "ordering=password", "role=king"]
)
def test_a_query_that_is_not_understood_is_refused(api: Api, query: str) -> None:
    assert query.partition("=")[0] in problem(api("GET", f"users?{query}"))


@pytest.mark.parametrize("resource", ROWS)
def test_a_list_costs_the_same_queries_whatever_its_length(api: Api, resource: str) -> None:
    costs = []
    for count in (0, 1, 20):
        for number in range(count):
            name = f"{count}-{number}"
            user = make_user(name, group=make_group(name))
            make_quota(user)
            make_api_key(user)
            make_backend(name, models=("m",), node=Node.objects.create(name=name))
        with CaptureQueriesContext(connection) as queries:
            api.ok("GET", resource)
        costs.append(len(queries))
    assert costs[1] == costs[2] <= 3  # key, count, rows


# ---- settings


def test_settings_say_where_each_value_comes_from(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCHEDULER_DEBT_CAP", "8192")
    before = api.ok("GET", "settings")
    assert before["quantum"] == {
        "value": 1000,
        "source": "default",
        "saved": None,
        "variable": "SCHEDULER_QUANTUM",
    }
    assert before["debt_cap"]["source"] == "environment"
    assert not SiteSettings.objects.exists()
    after = api.ok("PATCH", "settings", {"quantum": 500, "share_mode": "group"})
    assert (after["quantum"]["value"], after["quantum"]["source"]) == (500, "saved")
    assert after["share_mode"]["value"] == "group"
    back = api.ok("PATCH", "settings", {"quantum": None})
    assert (back["quantum"], back["share_mode"]["value"]) == (before["quantum"], "group")
    newest = api.ok("GET", "settings/history")["results"][0]
    assert newest["changes"] == [{"field": "quantum", "before": 500, "after": None}]
    assert newest["user"] == "root"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"quantum": 0}, "quantum"),
        ({"share_mode": "x"}, "share_mode"),
        ({"debt_cap": "nan"}, "debt_cap"),
    ],
)
def test_a_setting_out_of_range_is_refused(api: Api, change: dict[str, Any], field: str) -> None:
    assert field in problem(api("PATCH", "settings", change))
    assert not SiteSettings.objects.exists()
