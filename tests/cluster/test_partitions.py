"""Hosts in network namespaces, cut off from Redis and joined again: nobody acts beside the leader.

Real processes on hosts of their own, each with one wire to Redis and one to clients, backends and
PostgreSQL. Needs root, as network namespaces do.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.cluster.site import SLOTS, ClusterSite, Gateway, Process, until
from tests.scheduler.postgres import PostgreSQL
from tests.scheduler.redis import RedisServer
from tests.stubs.openai_stub import Call, OpenAIStub, ordinary

pytestmark = [
    pytest.mark.alone,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

HOSTS = ("s1", "s2", "g1", "g2")
#: Others may test on this machine as well.
REDIS_NET, FRONT_NET = (f"10.{net}.{os.getpid() % 256}" for net in (177, 178))


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Network:
    """Two switches, ``redis`` and ``front``, and a host on both for each name."""

    def __init__(self) -> None:
        self.mark = f"{os.getpid() % 100_000}"

    def make(self) -> None:
        for net, prefix in (("r", REDIS_NET), ("f", FRONT_NET)):
            ip("link", "add", self._switch(net), "type", "bridge")
            ip("addr", "add", f"{prefix}.1/24", "dev", self._switch(net))
            ip("link", "set", self._switch(net), "up")
        for number, name in enumerate(HOSTS, start=11):
            ip("netns", "add", self.host(name))
            ip("-n", self.host(name), "link", "set", "lo", "up")
            for net, prefix in (("r", REDIS_NET), ("f", FRONT_NET)):
                far = ("peer", "name", net, "netns", self.host(name))
                ip("link", "add", self._plug(name, net), "type", "veth", *far)
                ip("link", "set", self._plug(name, net), "master", self._switch(net), "up")
                ip("-n", self.host(name), "addr", "add", f"{prefix}.{number}/24", "dev", net)
                ip("-n", self.host(name), "link", "set", net, "up")

    def remove(self) -> None:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "del", self.host(name)], check=False)
        for net in ("r", "f"):
            subprocess.run(["ip", "link", "del", self._switch(net)], check=False)

    def host(self, name: str) -> str:
        return f"mr{self.mark}-{name}"

    def address(self, name: str) -> str:
        return f"{FRONT_NET}.{11 + HOSTS.index(name)}"

    def cut(self, name: str) -> None:
        """Pull the wire to Redis: sockets stay open, and nothing comes through."""
        ip("link", "set", self._plug(name, "r"), "down")

    def join(self, name: str) -> None:
        ip("link", "set", self._plug(name, "r"), "up")

    def _switch(self, net: str) -> str:
        return f"mr{self.mark}{net}"

    def _plug(self, name: str, net: str) -> str:
        return f"mr{self.mark}{net}{name}"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and Debian's iproute2")
    network = Network()
    try:
        network.make()
        yield network
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    finally:
        network.remove()


@asynccontextmanager
async def forwarded(address: str, port: int) -> AsyncIterator[int]:
    """A port of ``address`` that leads to ``port`` on loopback."""

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pour(reader, forth), pour(back, writer))

    server = await asyncio.start_server(serve, address, 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


class NamespaceSite(ClusterSite):
    """Two schedulers and two gateways, each on a host of its own."""

    def __init__(self, network: Network, folder: Path, redis: RedisServer, database: str) -> None:
        super().__init__(folder, redis, database)
        self.network = network
        self.schedulers = [Process(self, name, "runscheduler") for name in ("s1", "s2")]
        self.first = Gateway(self, "g1", host=network.address("g1"))
        self.second = Gateway(self, "g2", host=network.address("g2"))
        for process in self.processes:
            process.prefix = ("ip", "netns", "exec", network.host(process.name))

    @property
    def processes(self) -> list[Process]:
        return [*self.schedulers, *self.gateways]


class Held:
    """A backend's streams that last until they are let go; how many ran at once."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.over = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await call.start_stream()
            await call.say("Hello")
            await self.over.wait()
            await call.finish()
            await call.usage()
            await call.end()
        finally:
            self.running -= 1


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def site(
    network: Network,
    redis: RedisServer,
    postgresql: PostgreSQL,
    stub: OpenAIStub,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[NamespaceSite]:
    folder = tmp_path_factory.mktemp("namespaces")
    async with AsyncExitStack() as stack:
        backend, database = [
            await stack.enter_async_context(forwarded(f"{FRONT_NET}.1", port))
            for port in (int(stub.url.rpartition(":")[2]), postgresql.port)
        ]
        port = await stack.enter_async_context(forwarded(f"{REDIS_NET}.1", redis.port))
        site = NamespaceSite(network, folder, redis, postgresql.copy("namespaces"))
        site.environment["DATABASE_URL"] = site.database.replace(
            f"127.0.0.1:{postgresql.port}", f"{FRONT_NET}.1:{database}"
        )
        site.environment["REDIS_URL"] = f"redis://{REDIS_NET}.1:{port}/0"
        await asyncio.to_thread(site.configure, f"http://{FRONT_NET}.1:{backend}")
        stack.push_async_callback(site.close)
        await site.start()
        yield site


async def until_running(held: Held, count: int) -> None:
    async def so_many() -> bool:
        return held.running >= count

    await until(so_many)


async def test_a_leader_cut_off_from_redis_grants_nothing_beside_the_next_one(
    site: NamespaceSite, stub: OpenAIStub
) -> None:
    held = stub.behaviour = Held()
    streams = [asyncio.create_task(site.gateways[n % 2].stream()) for n in range(SLOTS + 10)]
    await until_running(held, SLOTS)  # and ten wait
    old = site.leader()

    site.network.cut(old.name)

    async def another_leads() -> bool:
        return site.leader() is not old and "Scheduling for 2 gateways" in site.leader().log

    await until(another_leads)
    leader = site.leader()
    assert held.most == SLOTS
    more = [asyncio.create_task(site.gateways[n % 2].stream()) for n in range(10)]
    site.network.join(old.name)  # what it had in its buffers comes through now

    async def old_one_stands_by() -> bool:
        return old.log.rfind("No longer leading") > old.log.rfind("Leading in epoch")

    await until(old_one_stands_by)
    held.over.set()
    stub.behaviour = ordinary
    texts = await asyncio.gather(*streams, *more)
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert held.most == SLOTS
    assert site.leader() is leader
    assert (await site.idle())["queue"]["total"] == 0


async def test_a_gateway_cut_off_from_redis_ends_its_streams_whole_and_is_counted_again(
    site: NamespaceSite, stub: OpenAIStub
) -> None:
    held = stub.behaviour = Held()
    streams = [asyncio.create_task(site.gateways[n % 2].stream()) for n in range(20)]
    await until_running(held, 20)

    site.network.cut("g1")

    async def is_given_up() -> bool:
        return "10 jobs end" in site.leader().log

    await until(is_given_up)
    refused = await site.first.chat()
    assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert int(refused.headers["retry-after"]) >= 1
    assert held.running == 20

    held.over.set()
    stub.behaviour = ordinary
    texts = await asyncio.gather(*streams)
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert (await site.second.chat(stream=True)).status_code == httpx.codes.OK

    site.network.join("g1")
    await until(site.first.serves)
    assert (await site.idle())["queue"]["total"] == 0
