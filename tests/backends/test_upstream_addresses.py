"""What a name stands for is looked at with each connection, by the relay and by the polls."""

from __future__ import annotations

import pytest

from backends import dial
from backends.addresses import objection
from backends.engines.replies import Question
from backends.fetch import UnansweredError, ask, new_client
from backends.upstream import ConnectFailed
from tests.backends.conftest import Client
from tests.stubs.scripted import ScriptedStub, StubConnection

FORBIDDEN = ["169.254.169.254", "100.100.100.200", "168.63.129.16", "0.0.0.0", "224.0.0.1"]
FORBIDDEN_6 = [
    "fe80::1",
    "fe80::1%eth0",
    "::",
    "fd00:ec2::254",
    "::ffff:169.254.169.254",
    "2002:a9fe:a9fe::1",
    "64:ff9b::a9fe:a9fe",
]


def stands_for(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    async def lookup(host: str, port: int) -> list[dial.Address]:
        return [found for one in hosts for found in dial.literal_address(one, port)]

    monkeypatch.setattr(dial, "_lookup", lookup)


async def hello(conn: StubConnection) -> None:
    async for _ in conn:
        await conn.stream([b"hello"])


@pytest.mark.parametrize("address", [*FORBIDDEN, *FORBIDDEN_6])
async def test_a_name_that_stands_for_a_forbidden_address_is_not_connected_to(
    client: Client, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    stands_for(monkeypatch, address)
    with pytest.raises(ConnectFailed, match="not backends"):
        await client.send("http://looks-harmless:8000")
    async with new_client(connect_timeout=5) as polls:
        with pytest.raises(UnansweredError, match="not backends"):
            await ask(polls, "http://looks-harmless:8000", Question("/health"))


@pytest.mark.parametrize("address", FORBIDDEN)
async def test_a_forbidden_literal_is_refused_even_if_it_was_stored_somehow(
    client: Client, address: str
) -> None:
    with pytest.raises(ConnectFailed, match="not backends"):
        await client.send(f"http://{address}:8000")
    async with new_client(connect_timeout=5) as polls:
        with pytest.raises(UnansweredError, match="not backends"):
            await ask(polls, f"http://{address}:8000", Question("/health"))


async def test_a_name_that_changes_what_it_stands_for_is_refused_from_then_on(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await ScriptedStub.start(hello) as stub:
        url = f"http://rebound:{stub.port}"
        stands_for(monkeypatch, "127.0.0.1")
        response = await client.send(url)
        assert await response.read_all(10) == b"hello"
        async with new_client(connect_timeout=5) as polls:
            assert (await ask(polls, url, Question("/health"))).status == 200
        for connection in stub.connections:
            connection.reset()
        await client.until_open(url, 0)
        stands_for(monkeypatch, "169.254.169.254")
        with pytest.raises(ConnectFailed, match="not backends"):
            await client.send(url)


async def test_of_several_addresses_only_the_permitted_ones_are_tried(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await ScriptedStub.start(hello) as stub:
        stands_for(monkeypatch, "169.254.169.254", "127.0.0.1")
        assert [one.sockaddr[0] for one in await dial.look_up("two", stub.port)] == ["127.0.0.1"]
        response = await client.send(f"http://two:{stub.port}")
        assert await response.read_all(10) == b"hello"


async def test_redirects_are_answers_and_nothing_is_asked_elsewhere(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        async for _ in conn:
            await conn.write(
                b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/latest\r\n"
                b"content-length: 0\r\n\r\n"
            )

    async with await ScriptedStub.start(script) as stub:
        assert (await client.send(stub.url)).status == 302
        async with new_client(connect_timeout=5) as polls:
            reply = await ask(polls, f"http://127.0.0.1:{stub.port}", Question("/health"))
        assert reply.status == 302


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "192.168.0.7", "::1", "fd12::7"])
def test_private_and_loopback_addresses_are_where_backends_live(address: str) -> None:
    assert objection(address) is None
