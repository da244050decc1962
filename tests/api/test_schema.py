"""The description of the management API, and that the API keeps to it whatever it is sent."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import schemathesis
from django.core.wsgi import get_wsgi_application
from django.test import Client
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks as openapi

from accounts.models import ApiKey, ModelLimits
from backends import services, trial
from backends.models import Alias, BackendModel, ModelStrategy, Node
from backends.probe import ProbeResult
from backends.trial import Trial
from scheduler import serving
from scheduler.core.scheduler import Scheduler
from scheduler.core.tunables import Tunables
from scheduler.models import ModelPrice, SiteSettings
from scheduler.serving import LiveView, QueuePicture
from tests.factories import (
    make_admin,
    make_api_key,
    make_backend,
    make_boost,
    make_decision,
    make_group,
    make_quota,
    make_user,
)

SCHEMA_URL = "/api/admin/schema/?format=json"


@pytest.fixture
def root_key(transactional_db: None) -> str:
    return make_api_key(make_admin("root"), name="root's")


@pytest.fixture
def document(root_key: str) -> dict[str, Any]:
    answer = Client().get(SCHEMA_URL, headers={"Authorization": f"Bearer {root_key}"})
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that are made up here are on machines that must not be asked."""

    def answered(name: str, target: Any, model: str, *_: Any) -> Trial:
        return Trial(backend=name, model_name=model, path="/", seconds=0.1, error="Not asked.")

    async def asked(*arguments: Any) -> Trial:
        return answered(*arguments)

    async def polled(*_: Any) -> None:
        return None

    async def found(targets: Any) -> list[Any]:
        return [ProbeResult(reachable=True, engine="vllm") for _ in targets]

    monkeypatch.setattr(services, "_probe_all", found)
    monkeypatch.setattr(services, "poll", polled)
    monkeypatch.setattr(trial, "_try", asked)


@pytest.fixture
def _idle_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """One on which nothing waits or runs."""
    idle = Scheduler(Tunables())
    stats = idle.stats(0.0)
    view = LiveView(
        taken_at=0.0,
        stats=stats,
        backends=[],
        shares=[],
        gap=0.0,
        gap_bound=0.0,
        configuration_version=1,
    )
    running = SimpleNamespace(
        view=lambda: view,
        waiting=list,
        queue_picture=lambda: QueuePicture(0.0, []),
        evict=lambda request_id: False,
        limits_of=lambda holders: [],
    )
    monkeypatch.setattr(serving, "_current", running)


@pytest.fixture
def rows(root_key: str) -> dict[str, int]:
    """{resource: the number of one of its rows}"""
    ada = make_user("ada", group=make_group("physics"))
    make_api_key(ada, name="laptop")
    backend = make_backend("a", models=("m",))
    make_decision("req-1")
    SiteSettings.objects.create(pk=1, quantum=500)
    return {
        "groups": make_group("unused").pk,
        "users": ada.pk,
        "quotas": make_quota(ada, weight_override=2).pk,
        "boosts": make_boost(user=ada, name="project").pk,
        "model-prices": ModelPrice.objects.create(model_name="m", prompt=1, completion=2).pk,
        "model-limits": ModelLimits.objects.create(model_name="m").pk,
        "api-keys": ApiKey.objects.get(name="laptop").pk,
        "backends": backend.pk,
        "backend-models": BackendModel.objects.get().pk,
        "nodes": Node.objects.create(name="gpu-1").pk,
        "aliases": Alias.objects.create(name="small", targets=["m"]).pk,
        "model-strategies": ModelStrategy.objects.create(model_name="m").pk,
    }


CHECKS = [
    schemathesis.checks.not_a_server_error,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_headers_conformance,
    openapi.response_schema_conformance,
    openapi.negative_data_rejection,
]


NEGATIVE, POSITIVE = GenerationMode.NEGATIVE, GenerationMode.POSITIVE


@pytest.mark.usefixtures("_no_network", "_idle_scheduler")
@pytest.mark.timeout(300)
def test_whatever_is_sent_the_answer_is_as_described(
    document: dict[str, Any], root_key: str, rows: dict[str, int]
) -> None:
    """Business rules (a name that is taken, the last superuser) refuse some of what the schema
    allows, so that refusals of valid data count as well."""
    schema = schemathesis.openapi.from_dict(document)
    schema.app = get_wsgi_application()
    operations = [found.ok() for found in schema.get_all_operations()]
    operations.sort(key=lambda one: one.method == "delete")  # what is gone is no more to be tried
    assert len(operations) > 70
    for operation in operations:
        for mode in (POSITIVE, NEGATIVE):
            try_out(operation, mode, root_key, rows)


def try_out(operation: Any, mode: GenerationMode, key: str, rows: dict[str, int]) -> None:
    _, _, _, resource, *rest = operation.path.split("/")
    known: dict[str, Any] = {}
    if rest[:1] == ["{id}"]:
        known = {"path_parameters": {"id": rows[resource]}}
    elif resource == "decisions" and rest:
        known = {"path_parameters": {"request_id": "req-1"}}

    @settings(
        max_examples=3,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode, **known))
    def run(case: Any) -> None:
        case.call_and_validate(headers={"Authorization": f"Bearer {key}"}, checks=CHECKS)

    run()


def test_secrets_are_taken_and_never_shown(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name, secret in (("Backend", "api_key"), ("Node", "telemetry_key"), ("User", "password")):
        assert secret in schemas[f"{name}Request"]["properties"]
        assert secret not in schemas[name]["properties"]
    shown = {name for schema in schemas.values() for name in schema.get("properties", {})}
    assert "sha256" not in shown
    assert {name for name, one in schemas.items() if "key" in one.get("properties", {})} == {
        "NewApiKey"
    }


def test_the_page_to_try_it_on_loads_nothing_from_elsewhere(client: Client, db: None) -> None:
    client.force_login(make_admin("root"))
    page = client.get("/api/admin/docs/")
    assert page.status_code == 200
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page.content.decode())
    assert any("swagger-ui-bundle" in address for address in addresses)
    assert all(address.startswith("/") for address in addresses), addresses
    for address in addresses:
        assert client.get(address).status_code == 200, address
