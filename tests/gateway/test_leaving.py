"""Answers that leave by the end of a turn of the event loop: behind their records, and whatever
happens to their connection meanwhile."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from backends.outbox import Outbox
from backends.pace import SAMPLE_EVENTS
from mindrouter.gateway.client import Asgi, Client
from mindrouter.gateway.heads import Head
from mindrouter.gateway.wire import LARGE_PART_BYTES, Wire
from scheduler.spool import MARKER, decode
from tests.running import RawClient, RunningRouter, body, said, until
from tests.stubs.openai_stub import Call, OpenAIStub, held, ordinary, reset

TOGETHER = 48  # more than leave with one flush
REFUSED = b"HTTP/1.1 400 "


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn never ends: what is not hurried stays where it is."""
    monkeypatch.setattr(Outbox, "_end_turn", lambda self: None)


@pytest.fixture
def gathered(router: RunningRouter) -> None:
    """So many events come that they wait for the others of their turn."""
    router.runtime.outbox.pace.is_batching = True


async def refused(router: RunningRouter, client: RawClient) -> None:
    """A request whose refusal waits in the outbox."""
    router.runtime.outbox._turn_ends = True
    client.post({})
    await until(lambda: bool(router.runtime.outbox._waiting))


async def test_nothing_leaves_before_what_is_written_of_it(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, "wide", max_concurrent=TOGETHER, max_queue=TOGETHER)
    folder = router.runtime.spool.directory

    def written() -> list[bytes]:
        return [line for path in folder.iterdir() for line in path.read_bytes().splitlines()]

    unmarked: list[str] = []

    async def looking(call: Call) -> None:
        request_id = call.headers["x-request-id"]
        if not any(one.startswith(MARKER) and request_id.encode() in one for one in written()):
            unmarked.append(request_id)
        await ordinary(call)

    stub.behaviour = looking
    unrecorded: list[str] = []

    async def ask() -> None:
        answer = await router.chat()
        assert answer.status_code == 200
        lines = [one for one in written() if one and not one.startswith(MARKER)]
        if answer.headers["x-request-id"] not in [decode(one).request_id for one in lines]:
            unrecorded.append(answer.headers["x-request-id"])

    await asyncio.gather(*(ask() for _ in range(TOGETHER)))
    assert unmarked == unrecorded == []
    assert len(stub.calls) == TOGETHER


@pytest.mark.usefixtures("held_back")
async def test_a_client_that_sends_no_more_gets_the_answer_that_waits(
    router: RunningRouter,
) -> None:
    async with await router.raw() as client:
        await refused(router, client)
        client.writer.write_eof()
        assert (await client.to_end()).startswith(REFUSED)


@pytest.mark.usefixtures("held_back")
async def test_a_server_that_shuts_down_sends_the_answer_that_waits(router: RunningRouter) -> None:
    async with await router.raw() as client:
        await refused(router, client)
        for connection in list(router._state.connections):
            connection.shutdown()
        assert (await client.to_end()).startswith(REFUSED)


def request(*headers: bytes, body: bytes = b"") -> bytes:
    lines = (b"POST /v1/chat/completions HTTP/1.1", b"Host: x", *headers, b"", body)
    return b"\r\n".join(lines)


@pytest.mark.usefixtures("held_back")
@pytest.mark.parametrize(
    "behind",
    [
        b"nonsense\r\n\r\n",
        request(b"Transfer-Encoding: chunked", body=b"zz\r\n"),
        request(b"Content-Length: 2", body=b"{}nonsense\r\n\r\n"),
        request(b"Content-Length: 2", body=b"{}") * 40,
        b"GET /ws/live HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["nonsense", "bad chunk", "nonsense behind it", "too many ahead", "websocket", "proxy"],
)
async def test_nothing_sent_behind_overtakes_the_answer_that_waits(
    router: RunningRouter, behind: bytes
) -> None:
    async with await router.raw() as client:
        await refused(router, client)
        client.writer.write(behind)
        status, headers, _ = await client.response()
        assert (status, "x-request-id" in headers) == (400, True)


@pytest.mark.usefixtures("held_back")
async def test_a_client_that_ends_within_its_next_request_gets_the_answer_that_waits(
    router: RunningRouter,
) -> None:
    async with await router.raw() as client:
        await refused(router, client)
        client.writer.write(request(b"Content-Length: 20", body=b"{"))
        client.writer.write_eof()
        assert (await client.to_end()).startswith(REFUSED)


@pytest.mark.usefixtures("held_back")
async def test_an_answer_leaves_before_the_next_request_sent_ahead_is_begun(
    router: RunningRouter,
) -> None:
    router.runtime.outbox._turn_ends = True
    async with await router.raw() as client:
        client.post({})
        client.post()  # it never leaves, as the turn never ends
        status, _, _ = await client.response()
        assert status == 400


@pytest.mark.usefixtures("held_back")
async def test_answers_to_requests_sent_ahead_keep_their_order(router: RunningRouter) -> None:
    router.runtime.outbox._turn_ends = True
    async with await router.raw() as client:
        for number in range(5):
            data = b'{"model":"unknown-%d","messages":[{"role":"user","content":"x"}]}' % number
            client.send("POST /v1/chat/completions", {"Content-Length": str(len(data))}, data)
        await until(lambda: bool(router.runtime.outbox._waiting))
        client.writer.write_eof()
        told = await client.to_end()
    found = [told.find(b"unknown-%d" % number) for number in range(5)]
    assert -1 not in found
    assert found == sorted(found)


async def test_answers_of_one_turn_are_recorded_with_fewer_writes(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, "wide", max_concurrent=TOGETHER, max_queue=TOGETHER)
    go_on = asyncio.Event()
    stub.behaviour = held(go_on)
    asking = [asyncio.create_task(router.chat()) for _ in range(TOGETHER)]
    await stub.until_calls(TOGETHER)
    written: list[int] = []
    write = router.runtime.spool._write
    router.runtime.spool._write = lambda lines: written.append(len(lines)) or write(lines)  # type: ignore
    go_on.set()
    assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
    assert sum(written) == TOGETHER
    assert len(written) <= TOGETHER // 2


async def test_behind_any_other_server_nothing_leaves_before_what_is_written_of_it() -> None:
    done: list[str] = []

    async def send(message: dict[str, Any]) -> None:
        done.append(message["type"])

    async def receive() -> dict[str, Any]:
        raise AssertionError("nothing is to be read")

    client = Client(Head("POST", "/", []), Asgi(receive, send, ""))
    client.outbox = Outbox(lambda: done.append("written"))
    await client.respond(200, [], b"{}")
    assert done == ["written", "http.response.start", "http.response.body"]


@pytest.mark.usefixtures("held_back")
async def test_an_answer_that_ends_its_connection_waits_for_nothing(router: RunningRouter) -> None:
    router.runtime.outbox._turn_ends = True
    async with await router.raw() as client:
        client.send(
            "POST /v1/chat/completions", {"Connection": "close", "Content-Length": "2"}, b"{}"
        )
        answer = await client.to_end()
    assert answer.startswith(REFUSED)
    assert b"connection: close" in answer


@pytest.mark.usefixtures("gathered")
async def test_gathered_events_of_many_streams_arrive_whole_and_in_order(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, "wide", max_concurrent=TOGETHER, max_queue=TOGETHER)

    async def telling(call: Call) -> None:
        await call.start_stream()
        for number in range(40):
            await call.say(f"{number} ")
        await call.finish()
        await call.end()

    stub.behaviour = telling
    answers = await asyncio.gather(*(router.chat(stream=True) for _ in range(TOGETHER)))
    expected = "".join(f"{number} " for number in range(40))
    assert {said(answer.text) for answer in answers} == {expected}
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)


@pytest.mark.usefixtures("gathered", "held_back")
async def test_the_end_of_a_stream_takes_along_what_waits_of_it(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub)
    async with await router.raw() as client:
        client.post(stream=True)
        told = await client.response_or_stream(20)
    assert told.startswith(b"HTTP/1.1 200 ")
    assert told.count(b"data: {") == len(stub.words) + 2  # its role and its finish
    assert told.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.usefixtures("gathered", "held_back")
async def test_a_stream_that_breaks_off_ends_with_its_error_behind_what_waits(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    async def dying(call: Call) -> None:
        await call.start_stream()
        await call.say("half")
        await reset(call)

    stub.behaviour = dying
    await router.backend(stub)
    async with await router.raw() as client:
        client.post(stream=True)
        told = await client.to_end()
    assert 0 < told.find(b"half") < told.find(b"upstream_ended_early")


@pytest.mark.usefixtures("gathered", "held_back")
async def test_an_answer_of_http_1_0_ends_with_what_waits_of_it(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub)
    data = json.dumps(body(stream=True)).encode()
    async with await router.raw() as client:
        client.writer.write(
            b"POST /v1/chat/completions HTTP/1.0\r\nAuthorization: Bearer %b\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (router.key.encode(), len(data), data)
        )
        told = await client.to_end()
    assert told.endswith(b"data: [DONE]\n\n")


@pytest.mark.usefixtures("gathered", "held_back")
async def test_what_is_large_enough_for_a_write_of_its_own_leaves_behind_what_waits(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    go_on = asyncio.Event()
    large = "x" * LARGE_PART_BYTES

    async def telling(call: Call) -> None:
        await call.start_stream()
        await call.say("first")
        await until(lambda: bool(router.runtime.outbox._waiting))
        await call.say(large)
        await go_on.wait()
        await call.end()

    stub.behaviour = telling
    await router.backend(stub)
    async with await router.raw() as client:
        client.post(stream=True)
        told = await client.until(large.encode())
        go_on.set()
    assert 0 < told.find(b"first") < told.find(large.encode())


class Recorder:
    """A transport that keeps what was done to it."""

    def __init__(self) -> None:
        self.done: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.done.append("close")

    def abort(self) -> None:
        self.done.append("abort")

    def is_closing(self) -> bool:
        return "close" in self.done or "abort" in self.done


def streaming() -> tuple[Wire, Outbox, list[bytes | str]]:
    """(a stream that has begun, its outbox, what its connection was made to do)."""
    transport, outbox = Recorder(), Outbox()
    outbox.pace.is_batching = True
    flow = SimpleNamespace(write_paused=False)
    connection = SimpleNamespace(
        flow=flow, transport=transport, on_response_complete=lambda: None, loop=None
    )
    head = Head("POST", "/", [])
    wire = Wire(connection, head, keep_alive=True, takes_chunks=False)  # type: ignore[arg-type]
    wire.start(200, [], outbox)
    wire._head = b"head "
    return wire, outbox, transport.done


async def test_events_of_one_turn_are_one_write_and_nothing_is_written_twice() -> None:
    wire, _, done = streaming()
    assert wire.write_now(b"a ")
    assert wire.write_now(b"b ")
    await asyncio.sleep(0)
    assert done == [b"head a b "]
    assert wire.write_now(b"c ")
    wire.end(b"d")
    await asyncio.sleep(0)
    assert done == [b"head a b ", b"c d"]


@pytest.mark.parametrize(("method", "word"), [("abort", "abort"), ("finish", "close")])
async def test_what_waits_leaves_before_its_connection_is_broken_off(
    method: str, word: str
) -> None:
    wire, _, done = streaming()
    wire.write_now(b"a")
    assert done == []
    getattr(wire, method)()
    await asyncio.sleep(0)
    assert done == [b"head a", word]


async def test_what_waits_for_a_client_that_has_left_is_dropped() -> None:
    wire, outbox, done = streaming()
    wire.write_now(b"a")
    done.append("close")
    outbox.flush()
    assert done == ["close"]


async def test_a_client_that_takes_nothing_more_is_given_nothing_more() -> None:
    wire, _, done = streaming()
    assert wire.write_now(b"a")
    assert done == []
    wire._flow.write_paused = True
    assert not wire.write_now(b"b")
    await asyncio.sleep(0)
    assert done == [b"head a"]


async def test_events_leave_one_by_one_until_many_come_and_large_parts_are_no_events() -> None:
    wire, outbox, done = streaming()
    outbox.pace.is_batching = False
    large = b"x" * (LARGE_PART_BYTES + 1)
    for _ in range(SAMPLE_EVENTS - 1):
        wire.write_now(b"a")
        wire.write_now(large)
    assert len(done) == 2 * (SAMPLE_EVENTS - 1)
    wire.write_now(b"last")
    assert len(done) == 2 * (SAMPLE_EVENTS - 1)
    await asyncio.sleep(0)
    assert done[-1] == b"last"
