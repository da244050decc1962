"""What a request costs, in counts that no busy machine can change: calls, writes, queries, garbage.

A bound is what was measured and a tenth on top. Whoever needs more raises it on purpose.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import django
import pytest

import backends
import mindrouter
import scheduler
from tests.running import RawClient, RunningRouter
from tests.stubs.openai_stub import Call, OpenAIStub

pytestmark = pytest.mark.usefixtures("backend")

OURS = tuple(
    str(Path(package.__file__ or "").parent) for package in (mindrouter, backends, scheduler)
)
DJANGOS_DATABASE = str(Path(django.__file__).parent / "db")
REQUESTS = 50
#: As vLLM writes it.
WORD = (
    b'data: {"id":"c1","object":"chat.completion.chunk","model":"m","choices":[{"index":0,'
    b'"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)


class Costs:
    """Calls of Python functions in the event loop's thread, by name; a coroutine that goes on
    counts as called again."""

    def __init__(self) -> None:
        self.python: Counter[str] = Counter()
        self.database = 0

    def of_each(self, count: int) -> Counter[str]:
        """What was called for each of so many requests or chunks, and how often for one. What runs
        by the clock or now and then is left out: a slow machine sees more of it."""
        return Counter({name: n // count for name, n in self.python.items() if n >= count})

    def note(self, frame: FrameType, event: str, arg: Any) -> None:
        code: CodeType = frame.f_code
        if event == "call":
            if code.co_filename.startswith(DJANGOS_DATABASE):
                self.database += 1
            elif code.co_filename.startswith(OURS):
                self.python[f"{Path(code.co_filename).stem}.{code.co_qualname}"] += 1


class Counted:
    """A transport whose writes are counted."""

    def __init__(self, transport: Any) -> None:
        self.writes = 0
        self._transport = transport

    def write(self, data: bytes) -> None:
        self.writes += 1
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def count_to_client(router: RunningRouter) -> Counted:
    (connection,) = router._state.connections
    counted = connection.transport = Counted(connection.transport)  # type: ignore
    return counted


def count_to_backend(router: RunningRouter) -> Counted:
    ((connection,),) = router.runtime.upstream._open.values()
    counted = connection._transport = Counted(connection._transport)  # type: ignore
    return counted


@contextmanager
def counting() -> Iterator[Costs]:
    costs = Costs()
    sys.setprofile(costs.note)
    try:
        yield costs
    finally:
        sys.setprofile(None)


async def ask(client: RawClient, count: int) -> None:
    for _ in range(count):
        client.post()
        assert (await client.response(within=60.0))[0] == 200


async def test_a_request_takes_few_calls_and_two_writes_and_no_query(
    router: RunningRouter,
) -> None:
    async with await router.raw() as client:
        await ask(client, 5)
        to_client, to_backend = count_to_client(router), count_to_backend(router)
        with counting() as costs:
            await ask(client, REQUESTS)
    assert costs.database == 0
    assert (to_client.writes, to_backend.writes) == (REQUESTS, REQUESTS)
    assert costs.of_each(REQUESTS).total() <= 205, costs.of_each(REQUESTS).most_common()


async def test_a_request_on_a_known_connection_is_not_parsed_nor_its_answer(
    router: RunningRouter,
) -> None:
    async with await router.raw() as client:
        await ask(client, 2)
        with counting() as costs:
            await ask(client, REQUESTS)
    assert costs.python["protocol.GatewayProtocol.on_header"] == 0
    assert costs.python["incoming.Incoming.on_header"] == 0
    assert costs.python["opening.Opening.body_of"] == 2 * REQUESTS  # and its answer


async def test_a_chunk_takes_few_calls_and_one_write_and_wakes_nobody(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    seen: asyncio.Queue[None] = asyncio.Queue()
    costs = Costs()
    writes = 0

    async def word_by_word(call: Call) -> None:
        nonlocal costs, writes
        await call.start_stream()
        await call.role()
        for _ in range(3):
            await call.say("begun")
            await seen.get()
        before = to_client.writes
        with counting() as costs:
            for _ in range(REQUESTS):
                await call.connection.chunk(WORD)
                await seen.get()
        writes = to_client.writes - before
        await call.finish()
        await call.usage()
        await call.end()

    async with await router.raw() as client:
        await ask(client, 1)
        to_client = count_to_client(router)
        stub.then(word_by_word)
        client.post(stream=True)
        for _ in range(3):
            await client.until(b"begun")
            seen.put_nowait(None)
        for _ in range(REQUESTS):
            await client.until(b"word")
            seen.put_nowait(None)
        await client.until(b"0\r\n\r\n")
    assert writes == REQUESTS
    each = costs.of_each(REQUESTS)
    assert each.total() <= 7, each


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_served_leaves_nothing_for_the_collector(
    router: RunningRouter, *, stream: bool
) -> None:
    read: Callable[[RawClient], Any] = stream_to_end if stream else RawClient.response
    async with await router.raw() as client:
        await ask(client, 5)
        gc.collect()
        gc.disable()
        try:
            for _ in range(REQUESTS):
                client.post(stream=stream)
                await read(client)
            await router.idle(within=60.0)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = Counter(type(one).__qualname__ for one in gc.garbage if is_ours(one))
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not left


async def stream_to_end(client: RawClient) -> None:
    await client.until(b"0\r\n\r\n", within=60.0)


def is_ours(one: object) -> bool:
    return type(one).__module__.startswith(("mindrouter.", "backends.", "scheduler."))
