"""What every test may use."""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django
import hypothesis
import pytest
import pytest_django
import uvloop
from django.apps import apps
from django.db.models.signals import post_migrate
from django.test import TransactionTestCase

# Before Django reads its settings: nothing of a test may touch a real data folder.
# (They are named and read here: pytest-django reads those named in pyproject.toml before this.)
os.environ["DJANGO_SETTINGS_MODULE"] = "mindrouter.settings"
os.environ["MINDROUTER_DATA"] = tempfile.mkdtemp(prefix="mindrouter-test-")
atexit.register(shutil.rmtree, os.environ["MINDROUTER_DATA"], ignore_errors=True)
for _name in ("DATABASE_URL", "REDIS_URL"):
    if _name in os.environ and "MINDROUTER_TEST_KEEP_URLS" not in os.environ:
        del os.environ[_name]
django.setup()

from accounts import attempts  # noqa: E402
from accounts.models import Group  # noqa: E402
from tests import database  # noqa: E402

# No test is to fail because others use the machine as well.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from tests.running import RunningRouter
    from tests.scheduler.redis import RedisServer
    from tests.stubs.openai_stub import OpenAIStub

# Emptying the database after a test would be refused; ``tests/audit`` makes the triggers itself.
post_migrate.disconnect(sender=apps.get_app_config("scheduler"), dispatch_uid="append-only")

_SERVED = {"gateway", "faults", "e2e", "operations"}


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What serves requests is tested on the loop that it runs on."""
    if _SERVED & set(item.path.parts):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(scope="session")
def django_db_setup(
    request: pytest.FixtureRequest,
    django_test_environment: None,
    django_db_modify_db_settings: None,  # a database of its own for each of several processes
    django_db_blocker: pytest_django.DjangoDbBlocker,
) -> Iterator[None]:
    """Instead of pytest-django's."""
    TransactionTestCase._fixture_teardown = database.emptied
    with django_db_blocker.unblock():
        take_away = database.made(request.config.rootpath / ".pytest_cache" / "database")
    yield
    with django_db_blocker.unblock():
        take_away()


@pytest.fixture(autouse=True)
def no_failed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong keys that other tests have sent within the minute are none of this one's."""
    monkeypatch.setattr(attempts, "failed", attempts.FailedAttempts())


@pytest.fixture(autouse=True)
def default_groups(request: pytest.FixtureRequest) -> None:
    """The groups of a new site are there for every test in a transaction of its own, whatever ran
    before it: a test without one empties the database at its end, the migrations' rows too."""
    marker = request.node.get_closest_marker("django_db")
    names = request.fixturenames
    alone = "transactional_db" in names or (marker and marker.kwargs.get("transaction"))
    if alone or not (marker or "db" in names):
        return
    request.getfixturevalue("django_db_setup")
    with request.getfixturevalue("django_db_blocker").unblock():
        if not Group.objects.exists():
            groups = import_module("accounts.migrations.0002_default_groups").GROUPS
            Group.objects.bulk_create(  # without a history, as the migration's
                Group(name=name, scheduler_weight=weight) for name, weight in groups
            )


@pytest.fixture
def protocol() -> type[HttpToolsProtocol]:
    """What the router is reached through: its own protocol, or uvicorn's and then its consumer."""
    from mindrouter.gateway.protocol import GatewayProtocol

    return GatewayProtocol


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """A Redis for the tests of one file."""
    from tests.scheduler.redis import redis_server

    try:
        with redis_server() as server:
            yield server
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def mode() -> str:
    """Whether the router schedules by itself ("embedded") or over the bus ("cluster")."""
    return "embedded"


@pytest.fixture
def patient_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy for some seconds passes for neither a dead scheduler nor gateway."""
    from scheduler.bus import gateway, leader, redis, wire

    monkeypatch.setattr(leader, "LEASE_SECONDS", 60.0)
    monkeypatch.setattr(redis, "GATEWAY_SECONDS", 60.0)
    monkeypatch.setattr(wire, "SILENT_SECONDS", 60.0)
    for name in ("ADMISSION", "OUT_OF_TOUCH", "GIVE_UP", "ANSWER"):
        monkeypatch.setattr(gateway, f"{name}_SECONDS", 60.0)


@pytest.fixture
async def router(
    request: pytest.FixtureRequest,
    transactional_db: None,
    settings: Any,
    tmp_path: Path,
    protocol: type[HttpToolsProtocol],
    mode: str,
) -> AsyncIterator[RunningRouter]:
    """The real router, in the test's own event loop, with a database and spool of its own."""
    from tests.running import running_router

    settings.SPOOL_DIR = tmp_path / "spool"
    settings.STATE_DIR = tmp_path / "state"
    cluster = mode == "cluster"
    if cluster:
        request.getfixturevalue("patient_bus")
        settings.REDIS_URL = request.getfixturevalue("redis").url
    async with running_router(settings.SPOOL_DIR, protocol, cluster=cluster) as running:
        yield running


@pytest.fixture
async def stub() -> AsyncIterator[OpenAIStub]:
    """A fake LLM server with the model "m"."""
    from tests.stubs.openai_stub import OpenAIStub

    async with await OpenAIStub.start() as server:
        yield server


@pytest.fixture
async def backend(router: RunningRouter, stub: OpenAIStub) -> int:
    """The stub, registered with the router under the name "a", with 4 slots."""
    return await router.backend(stub, "a")
