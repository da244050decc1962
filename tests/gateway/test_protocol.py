"""What happens below requests: heads that are too large, late or ambiguous, and the like."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mindrouter.gateway import protocol
from tests.running import RawClient, RunningRouter, body, until
from tests.stubs.openai_stub import OpenAIStub, held

pytestmark = pytest.mark.usefixtures("backend")
CHAT = json.dumps(body()).encode()


async def refused(client: RawClient, status: int, within: float = 5.0) -> None:
    """The connection ends after an error in OpenAI's form."""
    got, headers, data = await client.response(within)
    assert got == status, data
    assert headers["content-type"] == "application/json"
    error = json.loads(data)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert await client.to_end() == b""


# ---- the head


@pytest.mark.parametrize(
    "lines",
    [
        ["X: " + "a" * 70_000],
        [f"X-{n}: {'a' * 700}" for n in range(99)],
        [f"X-{n}: a" for n in range(101)],
    ],
    ids=["one long header", "many long headers", "many headers"],
)
async def test_a_head_that_is_too_large_is_refused(router: RunningRouter, lines: list[str]) -> None:
    head = "GET /healthz HTTP/1.1\r\nHost: x\r\n" + "\r\n".join(lines) + "\r\n\r\n"
    async with await router.raw() as client:
        client.writer.write(head.encode())
        await refused(client, 431)


async def test_a_head_without_end_is_cut_at_the_limit(router: RunningRouter) -> None:
    async with await router.raw() as client:
        client.writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: ")
        client.writer.write(b"a" * 66_000)
        await refused(client, 431)


async def test_a_head_just_below_the_limit_is_read(router: RunningRouter) -> None:
    async with await router.raw() as client:
        client.send("GET /healthz", {"X": "a" * 60_000})
        assert (await client.response())[0] == 200
        client.send("GET /healthz?" + "a" * 60_000)
        assert (await client.response())[0] == 200


async def test_a_large_body_is_no_large_head(router: RunningRouter) -> None:
    async with await router.raw() as client:
        for _ in range(2):
            client.post(messages=[{"role": "user", "content": "a" * 200_000}])
            assert (await client.response())[0] == 200


@pytest.mark.parametrize("begun", [b"", b"GET /healthz HTTP/1.1\r\nHost"])
async def test_a_head_that_does_not_come_is_not_waited_for(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.1)
    async with await router.raw() as client:
        client.writer.write(begun)
        await refused(client, 408)


async def test_a_head_that_trickles_has_no_longer_than_one_that_does_not(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)

    async def trickle(client: RawClient) -> None:
        for byte in b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 1000:  # for 20 s
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    async with await router.raw() as client:
        writing = asyncio.create_task(trickle(client))
        await refused(client, 408, within=5.0)
        writing.cancel()


async def test_the_deadline_of_a_head_does_not_end_a_request_that_takes_longer(
    router: RunningRouter, stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 1.0)
    go_on = asyncio.Event()
    stub.then(held(go_on))
    async with await router.raw() as client:
        client.post()
        await stub.until_calls(1)
        await asyncio.sleep(1.2)
        go_on.set()
        assert (await client.response())[0] == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX : y\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
        b"GET /h\xc3\xa4 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET healthz HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
        b"Content-Length: 6\r\n\r\nhello",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
    ],
)
async def test_what_is_no_proper_request_is_refused(router: RunningRouter, raw: bytes) -> None:
    async with await router.raw() as client:
        client.writer.write(raw)
        await refused(client, 400)
    assert await router.records() == []


async def test_http_1_0_needs_no_host(router: RunningRouter) -> None:
    async with await router.raw() as client:
        client.writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert (await client.to_end()).startswith(b"HTTP/1.1 200 ")


# ---- the body


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


async def test_a_body_may_come_in_chunks(router: RunningRouter, stub: OpenAIStub) -> None:
    async with await router.raw() as client:
        client.send("POST /v1/chat/completions", {"Transfer-Encoding": "chunked"})
        for byte in chunked(*(CHAT[i : i + 7] for i in range(0, len(CHAT), 7))):
            client.writer.write(bytes([byte]))
        assert (await client.response())[0] == 200
    assert stub.calls[0].body == body()


async def test_a_client_that_waits_for_leave_to_send_gets_it(router: RunningRouter) -> None:
    async with await router.raw() as client:
        headers = {"Expect": "100-continue", "Content-Length": str(len(CHAT))}
        client.send("POST /v1/chat/completions", headers)
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(CHAT)
        assert (await client.response())[0] == 200


async def test_a_client_that_waits_is_refused_without_having_to_send(
    router: RunningRouter,
) -> None:
    async with await router.raw() as client:
        headers = {"Expect": "100-continue", "Content-Length": str(10**12)}
        client.send("POST /v1/chat/completions", headers)
        status, _, data = await client.response()
        assert (status, json.loads(data)["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("ending", [b"5;" + b"x" * 300_000, b"0\r\nX: " + b"x" * 300_000])
async def test_a_body_of_anything_but_body_is_cut_off(router: RunningRouter, ending: bytes) -> None:
    async with await router.raw() as client:
        headers = {"Transfer-Encoding": "chunked"}
        client.send("POST /v1/chat/completions", headers, b"1\r\n{\r\n" + ending)
        await refused(client, 400)


async def test_trailers_are_passed_over(router: RunningRouter, stub: OpenAIStub) -> None:
    data = chunked(CHAT)[:-2] + b"Authorization: Bearer other\r\nX-Api-Key: x\r\n\r\n"
    async with await router.raw() as client:
        client.send("POST /v1/chat/completions", {"Transfer-Encoding": "chunked"}, data)
        assert (await client.response())[0] == 200


async def test_a_broken_body_is_refused_and_recorded_as_a_client_that_left(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    async with await router.raw() as client:
        client.send("POST /v1/chat/completions", {"Transfer-Encoding": "chunked"}, b"5\r\nhel")
        await until(lambda: bool(router.runtime.serving))  # it waits for the rest
        client.writer.write(b"loXX\r\nnonsense")
        await refused(client, 400)
    record = await router.record()
    assert (record.outcome, record.reason) == ("cancelled", "client_disconnected")
    assert stub.calls == []


async def test_an_offer_of_http_2_does_not_lose_the_body(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    offer = {
        "Connection": "Upgrade, HTTP2-Settings",
        "Upgrade": "h2c",
        "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
        "Content-Length": str(len(CHAT)),
    }
    async with await router.raw() as client:
        for cut in (0, 10, len(CHAT)):  # the body with the head, in two parts, after it
            client.send("POST /v1/chat/completions", offer, CHAT[:cut])
            await asyncio.sleep(0.02)
            client.writer.write(CHAT[cut:])
            assert (await client.response())[0] == 200
        client.send("GET /healthz", {"Connection": "Upgrade", "Upgrade": "h2c"})
        assert (await client.response())[0] == 200
    assert len(stub.calls) == 3


async def test_a_connection_ends_as_asked_for_whatever_else_is_offered(
    router: RunningRouter,
) -> None:
    offer = b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n"
    for first in (b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"GET /healthz HTTP/1.0\r\n"):
        async with await router.raw() as client:
            client.writer.write(first + offer)
            answer = await client.to_end(within=60)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer


async def test_the_router_is_no_proxy(router: RunningRouter) -> None:
    async with await router.raw() as client:
        client.writer.write(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n")
        data = await client.to_end()
    assert data[:13] in (b"HTTP/1.1 400 ", b"HTTP/1.1 405 ")


# ---- several requests on one connection


async def test_nonsense_behind_a_request_is_never_taken_for_its_answer(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    go_on = asyncio.Event()
    stub.then(held(go_on))
    async with await router.raw() as client:
        client.post()
        await stub.until_calls(1)
        client.writer.write(b"nonsense\r\n\r\n")
        assert await client.to_end() == b""
    assert (await router.record()).outcome == "cancelled"


async def test_a_client_that_sent_ahead_is_still_seen_leaving(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(held(asyncio.Event()))
    async with await router.raw() as client:
        client.post()
        client.post()
        call = await stub.until_calls(1)
        client.close()
        await asyncio.wait_for(call.connection.gone.wait(), 10.0)
    assert [r.outcome for r in await router.records()] == ["cancelled"]


async def test_no_more_than_a_few_requests_may_be_sent_ahead(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(held(asyncio.Event()))
    async with await router.raw() as client:
        client.post()
        await stub.until_calls(1)
        for _ in range(protocol.MAX_PIPELINED + 1):
            client.send("GET /healthz")
        assert await client.to_end() == b""


@pytest.mark.parametrize("offer", [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
async def test_of_too_many_requests_ahead_the_rest_is_not_even_read(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch, offer: bytes
) -> None:
    read: list[str] = []
    ask = protocol.GatewayProtocol._ask_gateway

    def noted(connection: Any, path: str) -> None:
        read.append(path)
        ask(connection, path)

    monkeypatch.setattr(protocol.GatewayProtocol, "_ask_gateway", noted)
    async with await router.raw() as client:
        client.writer.write((b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + offer + b"\r\n") * 200)
        assert await client.to_end() == b""
    assert len(read) == 1 + protocol.MAX_PIPELINED + 1


async def test_an_idle_connection_is_kept_for_a_while_and_then_closed(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await router.raw() as client:
        client.send("GET /healthz")
        await client.response()
        (connection,) = router._state.connections
        connection.timeout_keep_alive = 0.05  # type: ignore[union-attr]
        client.send("GET /healthz")
        await client.response()
        assert await client.to_end() == b""


async def test_vanished_clients_are_noticed_by_the_kernel(router: RunningRouter) -> None:
    import socket

    async with await router.raw() as client:
        client.send("GET /healthz")
        await client.response()
        (connection,) = router._state.connections
        sock: Any = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 20
