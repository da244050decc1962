"""A real Prometheus that scrapes a loaded router finds the shares of the decision log.

Opt-in, since it takes its time: MINDROUTER_TEST_PROMETHEUS is the path of the program.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.conf import settings as django_settings

from tests.operations.test_metrics import record_all
from tests.running import NO_TLS, RunningRouter
from tests.stubs.openai_stub import OpenAIStub

PROGRAM = os.environ.get("MINDROUTER_TEST_PROMETHEUS", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="MINDROUTER_TEST_PROMETHEUS is not set")
REQUESTS = 200


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prometheus:
    """The program, with our own configuration and rules, scraping one router."""

    def __init__(self, port: int) -> None:
        self.client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=NO_TLS
        )

    async def ask(self, query: str) -> list[tuple[dict[str, str], float]]:
        response = await self.client.get("/api/v1/query", params={"query": query})
        found = response.raise_for_status().json()["data"]["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    async def until(self, query: str, value: float) -> None:
        async with asyncio.timeout(60):
            while True:
                try:
                    if [found for _, found in await self.ask(query)] == [value]:
                        return
                except httpx.TransportError:
                    pass  # it is starting
                await asyncio.sleep(0.5)


@pytest.fixture
async def prometheus(router: RunningRouter, tmp_path: Path) -> AsyncIterator[Prometheus]:
    deploy = django_settings.BASE_DIR / "deploy" / "prometheus"
    configuration = (deploy / "prometheus.yml").read_text()
    configuration = configuration.replace("127.0.0.1:8000", f"127.0.0.1:{router.port}")
    (tmp_path / "prometheus.yml").write_text(configuration.replace("15s", "1s"))
    (tmp_path / "alerts.yml").write_text((deploy / "alerts.yml").read_text())
    port = _free_port()
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    running = Prometheus(port)
    try:
        yield running
    finally:
        await running.client.aclose()
        process.terminate()
        await process.wait()


async def test_prometheus_finds_the_shares_of_the_decision_log(
    router: RunningRouter, stub: OpenAIStub, backend: int, settings: Any, prometheus: Prometheus
) -> None:
    keys = {"ada": router.key, "bob": await router.user("bob", weight=3)}
    # Ada asks for one thing in four.
    order = ["ada", "bob", "bob", "bob"] * (REQUESTS // 4)
    answers = await asyncio.gather(*(router.chat(key=keys[name]) for name in order))
    assert {one.status_code for one in answers} == {200}
    await record_all(router, settings)

    await prometheus.until("sum(mindrouter_requests_total)", REQUESTS)
    charged = await prometheus.ask("sum by (group) (mindrouter_charged_tokens_total)")
    total = sum(value for _, value in charged)
    shares = {labels["group"]: value / total for labels, value in charged}

    records = await router.records()
    logged = {
        name: sum(one.charged_tokens for one in records if one.group == name) for name in keys
    }
    assert shares == pytest.approx({k: v / sum(logged.values()) for k, v in logged.items()})
    assert shares == pytest.approx({"ada": 0.25, "bob": 0.75})

    waits = await prometheus.ask("sum(mindrouter_wait_seconds_sum)")
    waited = sum((o.dispatched_at - o.queued_at).total_seconds() for o in records)  # type: ignore[operator]
    assert waits[0][1] == pytest.approx(waited, abs=0.01)
    assert [value for _, value in await prometheus.ask("up")] == [1]
    rules = (await prometheus.client.get("/api/v1/rules")).json()["data"]["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
