"""Several gateways and schedulers as processes: killed, stopped, and with Redis taken away."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest

from tests.cluster.site import POOL_SIZE, SLOTS, ClusterSite, Gateway, Process, until
from tests.running import events
from tests.stubs.openai_stub import Behaviour, Call, OpenAIStub, either, ordinary
from tests.stubs.scripted import ClientGone

pytestmark = [
    pytest.mark.alone,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),  # the first one starts seven processes
]


CONNECTIONS = """
    SELECT application_name, count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name <> '' GROUP BY application_name
"""
STREAMS_OF_WORDS = """
    SELECT count(*), sum(completion_tokens) FROM (
        SELECT * FROM scheduler_decision WHERE stream AND outcome = 'completed'
        ORDER BY arrived_at DESC LIMIT 200
    ) AS latest
"""
NEW_COLUMNS = """
    SELECT count(*), every(next_count = 7), every(next_note IS NULL) FROM scheduler_decision
    WHERE outcome = 'completed'
"""
#: How long new requests wait for a scheduler, less what a busy machine takes to tell them.
PATIENCE = timedelta(seconds=2.5)


class Load:
    """Requests one after another on both gateways, and streams that take a while."""

    def __init__(self, site: ClusterSite, streams: int, clients: int) -> None:
        self.statuses: list[int] = []
        self.failures: list[str] = []
        self._stop = False
        self._streams = [asyncio.create_task(site.gateways[n % 2].stream()) for n in range(streams)]
        self._clients = [
            asyncio.create_task(self._ask(site.gateways[n % 2])) for n in range(clients)
        ]

    async def _ask(self, gateway: Gateway) -> None:
        while not self._stop:
            response = await gateway.chat()
            self.statuses.append(response.status_code)
            if response.status_code != httpx.codes.OK:
                self.failures.append(response.text)

    async def until_answered(self, count: int) -> None:
        async def enough() -> bool:
            return len(self.statuses) >= count

        await until(enough)

    async def end(self) -> list[str]:
        """The streams' texts."""
        self._stop = True
        await asyncio.gather(*self._clients)
        return await asyncio.gather(*self._streams)


def streaming_until(over: asyncio.Event) -> Behaviour:
    """Streams say a word each 0.1 s until then; everything else is answered at once."""

    async def behave(call: Call) -> None:
        if not call.is_stream:
            await ordinary(call)
            return
        await call.start_stream()
        said = 0
        while not over.is_set():
            await call.say("word ")
            said += 1
            await either(over, call.connection.gone, within=0.1)
            if call.connection.gone.is_set():
                raise ClientGone
        await call.finish()
        await call.usage(output=said)
        await call.end()
        call.body["said"] = said

    return behave


async def stands_by(scheduler: Process) -> bool:
    return scheduler.log.count("Standing by") == scheduler.starts


async def charged(site: ClusterSite) -> float:
    stats = await site.idle()
    return float(sum(user["recent_tokens"] for user in stats["fair_share"]["user_stats"]))


async def test_a_next_release_adds_to_every_table_while_this_one_serves(
    site: ClusterSite, stub: OpenAIStub
) -> None:
    """The tests after this one run on those tables."""
    over = asyncio.Event()
    stub.behaviour = streaming_until(over)
    load = Load(site, streams=20, clients=8)
    await load.until_answered(50)
    await asyncio.to_thread(
        site.manage, "migrate", "-v0", "--skip-checks",
        DJANGO_SETTINGS_MODULE="tests.cluster.next_release.settings",
    )  # fmt: skip
    await load.until_answered(len(load.statuses) + 50)
    over.set()
    texts = await load.end()
    assert load.failures == []
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)

    async def all_recorded() -> bool:
        return await asyncio.to_thread(site.select, NEW_COLUMNS) == [(len(stub.calls), True, True)]

    await until(all_recorded)


async def test_the_leader_is_killed_and_no_request_fails(
    site: ClusterSite, stub: OpenAIStub
) -> None:
    before, calls = await charged(site), len(stub.calls)
    over = asyncio.Event()
    stub.behaviour = streaming_until(over)
    load = Load(site, streams=SLOTS - 4, clients=8)
    await load.until_answered(50)
    leader = site.leader()
    killed_at = datetime.now()  # noqa: DTZ005  as in the logs
    await leader.kill()
    answered = len(load.statuses)
    await load.until_answered(answered + 200)
    assert site.leader() is not leader
    over.set()
    texts = await load.end()
    without_leader = site.leader().moment_of("Scheduling for") - killed_at
    if without_leader < PATIENCE:  # on a machine that has nothing to do it takes half of that
        assert load.failures == []
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert stub.most_running <= SLOTS
    used = sum(7 + call.body.get("said", 3) for call in stub.calls[calls:])
    assert await charged(site) - before == pytest.approx(used)
    await leader.start()
    await until(lambda: stands_by(leader))


async def test_a_gateway_is_killed_and_only_its_own_streams_end(
    site: ClusterSite, stub: OpenAIStub
) -> None:
    await site.idle()
    over = asyncio.Event()
    stub.behaviour = streaming_until(over)
    calls = len(stub.calls)
    dying = [asyncio.create_task(site.first.stream()) for _ in range(SLOTS - 10)]
    living = [asyncio.create_task(site.second.stream()) for _ in range(10)]
    await stub.until_calls(calls + SLOTS, 60.0)
    waits = asyncio.create_task(site.second.chat())
    await site.first.kill()
    for ended in await asyncio.gather(*dying, return_exceptions=True):
        assert isinstance(ended, httpx.TransportError)
    assert (await waits).status_code == 200  # in a slot that the dead one had held
    over.set()
    texts = await asyncio.gather(*living)
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    await site.first.start()
    await until(site.first.serves)
    await site.idle()


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_without_redis_streams_go_on_and_newcomers_are_told_soon(
    site: ClusterSite, stub: OpenAIStub, fault: str
) -> None:
    await site.idle()
    over = asyncio.Event()
    stub.behaviour = streaming_until(over)
    calls = len(stub.calls)
    streams = [asyncio.create_task(gateway.stream()) for gateway in site.gateways * 2]
    await stub.until_calls(calls + 4, 60.0)
    if fault == "killed":
        site.redis.kill()
    else:
        site.redis.freeze()
    for gateway in site.gateways * 2:
        response = await gateway.chat()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_backend_available"
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert (await gateway.client.get("/healthz")).status_code == 200
    assert await site.first.stats() is None
    if fault == "killed":
        await asyncio.to_thread(site.redis.start)
    else:
        site.redis.thaw()
    for gateway in site.gateways:
        await until(gateway.serves)
    over.set()
    assert all(text.endswith("data: [DONE]\n\n") for text in await asyncio.gather(*streams))
    await site.idle()
    assert stub.most_running <= SLOTS


async def test_a_worker_that_dies_is_started_again(site: ClusterSite) -> None:
    workers = site.second.children()
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)

    async def both_again() -> bool:
        return len(set(site.second.children()) - {workers[0]}) == 2

    await until(both_again)
    await until(site.second.serves)


async def test_a_key_disabled_with_sql_is_refused_by_every_process(site: ClusterSite) -> None:
    """Each connection may be another worker's; with a key that no other test uses, as there may be
    a worker that was asked by none of them."""
    headers = {"Authorization": f"Bearer {site.spare}", "Connection": "close"}

    async def all_say(status: int) -> bool:
        asked = (site.first, *[site.second] * 12)
        answers = [await gateway.client.get("/v1/models", headers=headers) for gateway in asked]
        return {answer.status_code for answer in answers} == {status}

    assert await all_say(200)
    site.change("UPDATE accounts_apikey SET enabled = false WHERE name = 'spare'")
    await until(lambda: all_say(401))
    site.change("UPDATE accounts_apikey SET enabled = true WHERE name = 'spare'")
    await until(lambda: all_say(200))


async def test_a_gateway_without_pages_and_one_with_them_know_the_same_scheduler(
    site: ClusterSite,
) -> None:
    stats = await site.first.stats()
    assert [backend["name"] for backend in stats["backends"]] == ["a"]
    assert (await site.first.client.get("/admin/login/")).status_code == 200
    assert (await site.second.client.get("/admin/login/")).status_code == 404


async def test_a_gateway_that_is_stopped_ends_its_streams_and_leaves_nothing(
    site: ClusterSite, stub: OpenAIStub
) -> None:
    over = asyncio.Event()
    stub.behaviour = streaming_until(over)
    calls = len(stub.calls)
    streams = [asyncio.create_task(site.second.stream()) for _ in range(6)]
    await stub.until_calls(calls + 6, 60.0)
    stopping = asyncio.create_task(site.second.stop())
    await asyncio.sleep(0.5)
    over.set()
    assert await stopping == 0
    for task in streams:
        assert events(await task)[-1] is not None
        assert task.result().endswith("data: [DONE]\n\n")
    await site.idle()
    await site.second.start()
    await until(site.second.serves)


async def test_a_leader_that_is_stopped_hands_over(site: ClusterSite) -> None:
    leader = site.leader()
    assert await leader.stop() == 0
    for gateway in site.gateways:
        assert (await gateway.chat()).status_code == 200
    assert site.leader() is not leader
    await leader.start()
    await until(lambda: stands_by(leader))


async def test_over_several_gateways_exactly_the_allowed_number_passes_also_after_a_failover(
    site: ClusterSite, stub: OpenAIStub
) -> None:
    async def usage() -> dict[str, Any]:
        told: dict[str, Any] = (await site.first.client.get("/v1/usage/me")).json()
        return told

    async def is_limited() -> bool:
        limits = (await site.first.client.get("/v1/limits/me")).json()["limits"]
        return any((one["holder"], one["value"]) == ("group", 20) for one in limits)

    stub.behaviour = ordinary
    await site.idle()
    site.change("UPDATE groups SET total_requests_per_minute = 20")
    try:
        await until(is_limited)
        used = (await usage())["used"]
        answers = await asyncio.gather(*(site.gateways[n % 2].chat() for n in range(200)))
        assert sum(one.status_code == httpx.codes.OK for one in answers) == 20
        assert sum(one.status_code == httpx.codes.TOO_MANY_REQUESTS for one in answers) == 180
        site.change("UPDATE groups SET total_requests_per_minute = NULL")
        await site.idle()
        assert (await usage())["used"] == used + 20 * 10
        leader = site.leader()
        await leader.kill()
        asked = len(stub.calls)
        await until(site.first.serves)
        await site.idle()
        told = await usage()
        assert told["used"] == used + 20 * 10 + (len(stub.calls) - asked) * 10
        assert told["reserved"] == 0
        await leader.start()
        await until(lambda: stands_by(leader))
    finally:
        site.change("UPDATE groups SET total_requests_per_minute = NULL")


async def test_with_200_streams_postgresql_has_no_more_connections_than_the_processes_may(
    site: ClusterSite, stub: OpenAIStub
) -> None:
    """As docs/postgresql.md says; and the recorder has all of them, each once."""
    await site.idle()
    over = asyncio.Event()
    stub.behaviour = streaming_until(over)
    calls = len(stub.calls)
    site.change("UPDATE backends_backend SET max_concurrent = 200")
    streams = [asyncio.create_task(site.gateways[n % 2].stream()) for n in range(200)]
    await stub.until_calls(calls + 200, 60.0)
    pages = [asyncio.create_task(site.first.administer("decisions")) for _ in range(20)]
    most: Counter[str] = Counter()
    while not all(page.done() for page in pages):
        most |= Counter(dict(await asyncio.to_thread(site.select, CONNECTIONS)))
    over.set()
    texts = await asyncio.gather(*streams)
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert {(await page).status_code for page in pages} == {httpx.codes.OK}
    assert most["gateway"] >= 1
    schedulers = {scheduler.name: 2 for scheduler in site.schedulers}
    assert most <= Counter(gateway=POOL_SIZE, workers=2 * POOL_SIZE, recorder=1, **schedulers)

    words = sum(call.body["said"] for call in stub.calls[calls:])

    async def all_recorded() -> bool:
        return await asyncio.to_thread(site.select, STREAMS_OF_WORDS) == [(200, words)]

    await until(all_recorded)
