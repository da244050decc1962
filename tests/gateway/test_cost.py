"""What a request costs, in counts that no busy machine can change: calls, awaits, allocations,
copies, writes, queries, garbage.

A bound is what was measured and a tenth on top. Whoever needs more raises it on purpose.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import django
import pytest

import backends
import mindrouter
import scheduler
from tests.running import RawClient, RunningRouter
from tests.stubs.openai_stub import Call, OpenAIStub, ordinary

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("backend")]

OURS = tuple(
    str(Path(package.__file__ or "").parent) for package in (mindrouter, backends, scheduler)
)
DJANGOS_DATABASE = str(Path(django.__file__).parent / "db")
REQUESTS = 50
TOGETHER = 4
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
        self.coroutines: set[str] = set()
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
                name = f"{Path(code.co_filename).stem}.{code.co_qualname}"
                self.python[name] += 1
                if code.co_flags & inspect.CO_COROUTINE:
                    self.coroutines.add(name)


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


class Swallowing:
    """A transport that nothing leaves."""

    def write(self, data: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return False


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


@contextmanager
def allocating() -> Iterator[Callable[[], int]]:
    """How many of the blocks that our code has allocated meanwhile are still held."""
    tracemalloc.start()
    ours = [tracemalloc.Filter(True, f"{folder}/*") for folder in OURS]

    def held() -> int:
        traces = tracemalloc.take_snapshot().filter_traces(ours)
        return sum(one.count for one in traces.statistics("filename"))

    try:
        yield held
    finally:
        tracemalloc.stop()


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
    assert costs.of_each(REQUESTS).total() <= 215, costs.of_each(REQUESTS).most_common()


async def test_a_connection_has_no_table_of_fields_of_its_own(router: RunningRouter) -> None:
    """Python makes one where there are more than 30; see ``GatewayProtocol.__slots__``."""
    async with await router.raw() as client:
        await ask(client, 1)
        (connection,) = router._state.connections
        assert len(vars(connection)) <= 30


async def test_a_request_awaits_little(router: RunningRouter) -> None:
    async with await router.raw() as client:
        await ask(client, 5)
        with counting() as costs:
            await ask(client, REQUESTS)
    each = costs.of_each(REQUESTS)
    awaits = {name: each[name] for name in costs.coroutines & each.keys()}
    assert sum(awaits.values()) <= 25, awaits


async def test_a_request_that_is_served_holds_few_allocations(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await router.raw()) for _ in range(TOGETHER)]
        for client in clients:  # connections and what else is kept are there
            client.post()
        for client in clients:
            await client.response(within=60.0)
        # What runs by the clock may fall into a round, and holds something of its own then.
        held = min([await held_while_served(clients, stub) for _ in range(4)])
    assert held / TOGETHER <= 80


async def held_while_served(clients: list[RawClient], stub: OpenAIStub) -> int:
    """What our code holds while a request of each client waits for its answer."""
    everybody_waits, go_on = asyncio.Event(), asyncio.Event()
    count = 0

    async def wait(call: Call) -> None:
        nonlocal count
        count += 1
        if count == len(clients):
            everybody_waits.set()
        await go_on.wait()
        await ordinary(call)

    stub.behaviour = wait
    gc.collect()
    with allocating() as allocations:
        for client in clients:
            client.post()
        await everybody_waits.wait()
        held = allocations()
        go_on.set()
        for client in clients:
            await client.response(within=60.0)
    return held


async def test_a_chunk_is_copied_out_of_its_frame_and_into_the_clients_and_no_more(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    chunk = WORD.replace(b" word", b"x" * 1_000_000)
    framed = b"%x\r\n%b\r\n" % (len(chunk), chunk)
    copies = 0.0

    async def large(call: Call) -> None:
        nonlocal copies
        await call.start_stream()
        await call.role()
        await call.say("begun")
        await seen.wait()
        ((connection,),) = router.runtime.upstream._open.values()
        (client_side,) = router._state.connections
        real, client_side.cycle._transport = client_side.cycle._transport, Swallowing()  # type: ignore
        tracemalloc.start()
        connection.data_received(framed)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        connection.data_received(framed)
        copies = (tracemalloc.get_traced_memory()[1] - before) / len(chunk)
        tracemalloc.stop()
        client_side.cycle._transport = real  # type: ignore
        await call.finish()
        await call.usage()
        await call.end()

    seen = asyncio.Event()
    async with await router.raw() as client:
        stub.then(large)
        client.post(stream=True)
        await client.until(b"begun")
        seen.set()
        await client.until(b"0\r\n\r\n")
    assert copies <= 2.3  # Python takes a quarter more for what it puts together


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
