"""Answers that leave by the end of a turn of the event loop: behind their records, and whatever
happens to their connection meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from backends.outbox import Outbox
from scheduler.spool import MARKER, decode
from tests.running import RawClient, RunningRouter, until
from tests.stubs.openai_stub import Call, OpenAIStub, ordinary

TOGETHER = 48  # more than leave with one flush
REFUSED = b"HTTP/1.1 400 "


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The turn never ends: what is not hurried stays where it is."""
    monkeypatch.setattr(Outbox, "_end_turn", lambda self: None)
    yield
    monkeypatch.undo()


async def refused(router: RunningRouter, client: RawClient) -> None:
    """A request whose refusal waits in the outbox."""
    router.runtime.outbox._has_sent = True
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


@pytest.mark.usefixtures("held_back")
async def test_a_refusal_never_overtakes_the_answer_that_waits(router: RunningRouter) -> None:
    async with await router.raw() as client:
        await refused(router, client)
        client.writer.write(b"nonsense\r\n\r\n")
        answers = await client.to_end()
    assert answers.startswith(REFUSED)
    assert answers.count(REFUSED) == 2
    assert answers.index(b"x-request-id") < answers.index(b"Invalid HTTP request")


@pytest.mark.usefixtures("held_back")
async def test_an_answer_that_ends_its_connection_waits_for_nothing(router: RunningRouter) -> None:
    router.runtime.outbox._has_sent = True
    async with await router.raw() as client:
        client.send(
            "POST /v1/chat/completions", {"Connection": "close", "Content-Length": "2"}, b"{}"
        )
        answer = await client.to_end()
    assert answer.startswith(REFUSED)
    assert b"connection: close" in answer
