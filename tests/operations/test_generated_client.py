"""A client that a public tool generates from the description of the management API works."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.factories import make_admin, make_api_key
from tests.running import RunningRouter

TOOL = Path(sys.executable).with_name("openapi-python-client")
CONFIG = "post_hooks: []\npackage_name_override: mindrouter_api\n"


class Made:
    """The package, and a client of its kind for a superuser of the router."""

    def __init__(self, url: str, key: str) -> None:
        package = import_module("mindrouter_api")
        self._client: Any = package.AuthenticatedClient(
            base_url=url, token=key, raise_on_unexpected_status=True
        )

    async def __call__(self, operation: str, *arguments: Any, **fields: Any) -> Any:
        """E.g. "groups.groups_list"; what it parsed the answer into."""
        call = import_module(f"mindrouter_api.api.{operation}").asyncio
        return await call(*arguments, client=self._client, **fields)

    def model(self, name: str, /, **fields: Any) -> Any:
        return getattr(import_module("mindrouter_api.models"), name)(**fields)


def generate(schema: dict[str, Any], folder: Path) -> None:
    (folder / "schema.json").write_text(json.dumps(schema))
    (folder / "config.yaml").write_text(CONFIG)
    done = subprocess.run(
        [TOOL, "generate", "--path", "schema.json", "--config", "config.yaml", "--meta", "none",
         "--fail-on-warning"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
async def made(router: RunningRouter, tmp_path: Path) -> AsyncIterator[Made]:
    key = await router.ask(lambda: make_api_key(make_admin("root")))
    headers = {"Authorization": f"Bearer {key}"}
    answer = await router.client.get("/api/admin/schema/?format=json", headers=headers)
    await asyncio.to_thread(generate, answer.json(), tmp_path)
    sys.path.insert(0, str(tmp_path))
    yield Made(router.url, key)
    sys.path.remove(str(tmp_path))
    for name in [one for one in sys.modules if one.startswith("mindrouter_api")]:
        del sys.modules[name]


async def test_rows_are_made_listed_changed_and_acted_on(
    router: RunningRouter, made: Made, backend: int
) -> None:
    group = await made(
        "groups.groups_create",
        body=made.model("GroupRequest", name="physics", scheduler_weight=2.5),
    )
    assert (group.name, group.scheduler_weight, group.members) == ("physics", 2.5, 0)
    found = await made("groups.groups_list", name="physics")
    assert [one.id for one in found.results] == [group.id]
    new = await made(
        "api_keys.api_keys_create", body=made.model("ApiKeyRequest", user="ada", name="x")
    )
    assert (await router.chat(key=new.key)).status_code in (200, 401)  # known within a second
    drained = await made("backends.backends_drain_create", backend)
    assert drained.draining is True


async def test_live_figures_and_records_are_read(
    router: RunningRouter, made: Made, backend: int
) -> None:
    request_id = (await router.chat()).headers["x-request-id"]
    await router.record()
    shares = await made("shares.shares_retrieve")
    assert [one.username for one in shares.users] == ["ada"]
    told = await made("decisions.decisions_retrieve", request_id)
    assert (told.request_id, told.user, told.outcome.value) == (request_id, "ada", "completed")
    advice = await made("advice.advice_list")
    assert {one.weight.value for one in advice} <= {"problem", "warning", "hint"}
    queue = await made("queue.queue_list")
    assert (queue.count, queue.results) == (0, [])
