"""Lists of the admin cost the same few queries with one row as with thousands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import connection, models
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accounts.models import ModelLimits
from backends.models import Alias, Backend, BackendModel, BackendStatus, ModelStrategy, Node
from scheduler.models import Decision, ModelPrice, Outcome
from tests.factories import make_admin

pytestmark = pytest.mark.django_db

MANY = 5000


def nodes(count: int) -> None:
    Node.objects.bulk_create(
        Node(name=f"node-{n}", telemetry_url=f"http://node-{n}:9400/metrics") for n in range(count)
    )


def backends(count: int) -> None:
    """Each on a node, polled, and with a model."""
    nodes(min(count, 50))
    hosts = list(Node.objects.all())
    made = Backend.objects.bulk_create(
        Backend(name=f"b-{n}", base_url=f"http://b-{n}:8000", node=hosts[n % len(hosts)])
        for n in range(count)
    )
    now = timezone.now()
    BackendStatus.objects.bulk_create(
        BackendStatus(
            backend=backend,
            attempted_at=now,
            answered_at=now,
            observed_at=now,
            reachable=True,
            detected_engine="vllm",
            loaded_models={"m": None},
        )
        for backend in made
    )
    BackendModel.objects.bulk_create(
        BackendModel(backend=backend, name="m", listed=True) for backend in made
    )


def aliases(count: int) -> None:
    backends(min(count, 50))
    Alias.objects.bulk_create(Alias(name=f"a-{n}", targets=["m", "gone"]) for n in range(count))


def strategies(count: int) -> None:
    ModelStrategy.objects.bulk_create(
        ModelStrategy(model_name=f"m-{n}", strategy="affinity") for n in range(count)
    )


def decisions(count: int) -> None:
    Decision.objects.bulk_create(
        Decision(
            request_id=f"{n:032}",
            user=f"u-{n % 100}",
            model_requested="m",
            dialect="openai",
            endpoint="chat.completions",
            outcome=Outcome.COMPLETED,
            selected_backend=f"b-{n % 100}",
            arrived_at=timezone.now(),
        )
        for n in range(count)
    )


def prices(count: int) -> None:
    ModelPrice.objects.bulk_create(
        ModelPrice(model_name=f"m-{n}", prompt=1, completion=2) for n in range(count)
    )


def limits(count: int) -> None:
    ModelLimits.objects.bulk_create(ModelLimits(model_name=f"m-{n}") for n in range(count))


LISTS: dict[type[models.Model], Callable[[int], None]] = {
    Node: nodes,
    Backend: backends,
    BackendModel: backends,
    Alias: aliases,
    ModelStrategy: strategies,
    Decision: decisions,
    ModelPrice: prices,
    ModelLimits: limits,
}
EMPTIED = (Decision, ModelPrice, ModelLimits, ModelStrategy, Alias, Backend, Node)


@pytest.mark.parametrize("model", LISTS, ids=lambda model: model.__name__)
def test_a_list_costs_the_same_few_queries_whatever_its_length(
    client: Client, model: type[models.Model]
) -> None:
    client.force_login(make_admin("root"), backend="accounts.authentication.RoleBackend")
    address = f"/admin/{model._meta.app_label}/{model._meta.model_name}/"
    client.get(address)  # fills what is kept, like the content types
    costs = []
    for count in (0, 1, MANY):
        for kind in EMPTIED:
            kind.objects.all()._raw_delete("default")
        BackendModel.objects.all()._raw_delete("default")
        BackendStatus.objects.all()._raw_delete("default")
        LISTS[model](count)
        with CaptureQueriesContext(connection) as queries:
            page = client.get(address)
        assert page.status_code == 200
        costs.append(len(queries))
    assert costs[1] == costs[2], [query["sql"][:200] for query in queries]
    assert costs[0] <= costs[1] <= 16
