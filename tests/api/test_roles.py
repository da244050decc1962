"""What each role may do with the management API."""

from __future__ import annotations

from typing import Any

import pytest

from accounts.models import Role
from tests.api.conftest import Api
from tests.factories import make_api_key, make_decision, make_user

pytestmark = pytest.mark.django_db

PEOPLE = ("groups", "users", "quotas", "boosts", "model-limits", "model-prices", "api-keys")
CLUSTER = ("backends", "backend-models", "nodes", "aliases", "model-strategies")
NONE = "999999"  # no row has this number: what is allowed is then not found

READ = [
    *(("GET", resource) for resource in (*PEOPLE, *CLUSTER)),
    *(("GET", f"{resource}/{NONE}") for resource in (*PEOPLE, *CLUSTER)),
    ("GET", f"users/{NONE}/history"),
    ("GET", "settings"),
    ("GET", "settings/history"),
    ("GET", "decisions"),
    ("GET", "decisions/req-1"),
    ("GET", "scheduler/stats"),
    ("GET", "queue"),
    ("GET", "advice"),
    ("GET", "shares"),
    ("GET", "reports/groups"),
    ("GET", "reports/users"),
    ("GET", "reports/causes"),
    ("GET", "usage"),
    ("GET", "reports/groups"),
    ("GET", "reports/users"),
    ("GET", "reports/causes"),
    ("GET", "limits"),
    ("GET", "schema/"),
    ("GET", "docs/"),
    ("POST", f"backends/{NONE}/poll"),
]


def changes(resources: tuple[str, ...]) -> list[tuple[str, str]]:
    return [
        *(("POST", resource) for resource in resources),
        *(("PATCH", f"{resource}/{NONE}") for resource in resources),
        *(("DELETE", f"{resource}/{NONE}") for resource in resources),
    ]


OPERATE = changes(CLUSTER) + [
    ("POST", f"backends/{NONE}/{action}")
    for action in ("detect", "test", "enable", "disable", "drain", "pause", "resume")
]
OPERATE.append(("DELETE", "queue/none"))
MANAGE = [
    *changes(PEOPLE),
    ("PATCH", "settings"),
    ("POST", f"api-keys/{NONE}/rotate"),
    ("POST", f"api-keys/{NONE}/revoke"),
    ("DELETE", f"api-keys/{NONE}/captures"),
    ("GET", "captures"),
    ("GET", f"captures/{NONE}"),
]
CALLS = {"read": READ, "operate": OPERATE, "manage": MANAGE}

#: role -> (what is a user of it, which calls are allowed)
ROLES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "superuser": ({"is_superuser": True}, {"read", "operate", "manage"}),
    "operator": ({"role": Role.OPERATOR}, {"read", "operate"}),
    "auditor": ({"role": Role.AUDITOR}, {"read"}),
    "staff": ({"is_staff": True}, {"read"}),
    "user": ({}, set()),
}


@pytest.mark.parametrize("role", ROLES)
def test_each_role_does_what_it_may_and_nothing_else(role: str) -> None:
    make_decision("req-1")
    fields, allowed = ROLES[role]
    api = Api(make_api_key(make_user("somebody", **fields)))
    calls = {call: kind in allowed for kind, calls in CALLS.items() for call in calls}
    found = {call: status_of(api, *call) for call in calls}
    assert found == {call: expected(*call) if may else 403 for call, may in calls.items()}


def status_of(api: Api, method: str, path: str) -> int:
    body = {} if method in ("POST", "PATCH") else None
    status: int = api(method, path, body).status_code
    return status


def expected(method: str, path: str) -> int:
    """Of one who may."""
    if path in ("scheduler/stats", "shares", "queue", "queue/none"):
        return 503  # no scheduler runs here
    if NONE in path:
        return 404
    return 400 if method == "POST" else 200


def test_the_table_knows_every_operation() -> None:
    api = Api(make_api_key(make_user("root", is_superuser=True)))
    paths = api.ok("GET", "schema/?format=json")["paths"]
    described = {
        (method.upper(), path.removeprefix("/api/admin/"))
        for path, methods in paths.items()
        for method in methods
    }
    known = {
        (method, path.replace(NONE, "{id}").replace("req-1", "{request_id}"))
        for method, path in READ + OPERATE + MANAGE
    }
    known |= {("DELETE", "queue/{request_id}"), ("GET", "captures/{request_id}")}
    missing = {one for one in described - known if not one[1].endswith("/history")}
    assert missing == set()
