"""Every fault at once, under changing configuration: nothing is lost, leaked or counted twice."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from accounts.models import Group
from backends.models import Backend
from mindrouter.gateway import consumer
from mindrouter.gateway.client import Client
from mindrouter.gateway.exchange import Exchange
from tests.running import RawClient, RunningRouter, until
from tests.stubs.openai_stub import (
    Behaviour,
    Call,
    OpenAIStub,
    drip,
    ordinary,
    refuse,
    reset,
    respond,
    silent,
    sse,
    stream,
)

REQUESTS = 300
RUNS = [("embedded", 1), ("embedded", 2), ("cluster", 3)]
HTML = respond(200, b"<html>", ("Content-Type", "text/html"))


async def breaks_off(call: Call) -> None:
    await call.start_stream()
    await call.role()
    await call.say("Hel")
    call.connection.close()


async def lies_about_its_length(call: Call) -> None:
    await call.connection.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n{"
    )
    call.connection.reset()


FAULTS: list[Behaviour] = [
    refuse(400),
    refuse(404),
    refuse(429),
    refuse(500),
    refuse(503),
    reset,
    silent,
    breaks_off,
    lies_about_its_length,
    drip(0.005, 10),
    stream(sse({"error": {"message": "no", "code": 500}})),
    stream(b"data: {", end=False),
    HTML,
]


class Crowd:
    """Clients of four users, some of whom leave at any moment."""

    def __init__(self, router: RunningRouter, keys: list[str], dice: random.Random) -> None:
        self.router = router
        self.keys = keys
        self.dice = dice
        self.statuses: Counter[str] = Counter()

    async def one(self) -> None:
        await asyncio.sleep(self.dice.random() * 1.5)
        async with await self.router.raw() as client:
            client.key = self.dice.choice(self.keys)
            client.post(
                stream=self.dice.random() < 0.5,
                model=self.dice.choice(["m"] * 9 + ["nope"]),
                max_tokens=self.dice.choice([5, 500, None]),
            )
            leave: Callable[[RawClient], None] | None = self.dice.choice(
                [None, None, RawClient.close, RawClient.reset]
            )
            if leave is None:
                answer = await client.response_or_stream(within=60.0)
                self.statuses[answer[9:12].decode()] += 1
            else:
                await asyncio.sleep(self.dice.random() * 0.2)
                leave(client)


async def change_everything(router: RunningRouter, dice: random.Random) -> None:
    """An admin who cannot leave things alone."""
    while True:
        await asyncio.sleep(0.05)
        fields = dice.choice(
            [
                {"enabled": dice.random() < 0.7},
                {"draining": dice.random() < 0.2},
                {"max_concurrent": dice.randint(1, 4)},
                {"priority": dice.randint(0, 9)},
            ]
        )
        weight = dice.choice([0, 0.5, 1, 3, 10])
        await router.change(_change, f"b{dice.randrange(3)}", fields, weight)


def _change(backend: str, fields: dict[str, object], weight: float) -> None:
    Backend.objects.filter(name=backend).update(**fields)
    Group.objects.filter(name="u1").update(scheduler_weight=weight)


@pytest.mark.parametrize(("mode", "seed"), RUNS)
async def test_nothing_is_lost_leaked_or_counted_twice(
    router: RunningRouter,
    settings: object,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    dice = random.Random(seed)
    came: list[str] = []  # the ids of all whose head was read

    def begin(client: Client, operation: Any, request_id: str, runtime: Any) -> Exchange:
        came.append(request_id)
        return begin_exchange(client, operation, request_id, runtime)

    begin_exchange = consumer._exchange
    monkeypatch.setattr(consumer, "_exchange", begin)
    settings.BACKEND_FAIL_WINDOW = 0.1  # type: ignore[attr-defined]
    settings.SCHEDULER_MAX_WAIT = 3.0  # type: ignore[attr-defined]
    settings.QUEUE_KEEPALIVE_AFTER = 0.1  # type: ignore[attr-defined]
    stubs = [await OpenAIStub.start() for _ in range(3)]

    async def anything(call: Call) -> None:
        await (ordinary if dice.random() < 0.6 else dice.choice(FAULTS))(call)

    for n, stub in enumerate(stubs):
        stub.behaviour = anything
        await router.backend(
            stub, f"b{n}", max_concurrent=3, max_queue=20, first_byte_timeout=0.2, chunk_timeout=0.2
        )
    keys = [await router.user(f"u{n}", weight=n) for n in range(4)]
    crowd = Crowd(router, keys, dice)
    admin = asyncio.create_task(change_everything(router, dice))
    await asyncio.gather(*(crowd.one() for _ in range(REQUESTS)))
    admin.cancel()
    await router.ask(lambda: Backend.objects.update(enabled=True, draining=False))
    await router.reload()
    await router.idle(within=60.0)

    assert (router.in_flight, router.waiting) == (0, 0)
    records = await router.records()
    # Some left before their head was read: the slower the machine, the more of them.
    assert sorted(r.request_id for r in records) == sorted(came)
    assert crowd.statuses.total() < len(came) <= REQUESTS
    assert {r.outcome for r in records} == {"completed", "refused", "cancelled", "failed"}
    for record in records:
        assert record.ended_at is not None
        assert all(a["ended_at"] is not None for a in record.attempts)
        assert (record.outcome == "completed") == (record.reason == "")
        if record.outcome == "refused" or record.dispatched_at is None:
            assert record.charged_tokens == 0
        if record.outcome == "completed":
            assert record.charged_tokens == record.prompt_tokens + record.completion_tokens
    # Each call is in a record, but for those on a connection that was just being closed.
    again = router.runtime.upstream.counters.retried
    assert sum(len(r.attempts) for r in records) + again >= sum(len(s.calls) for s in stubs)
    assert crowd.statuses["200"] > 0  # how many, a busy machine decides
    assert crowd.statuses["500"] == 0
    await until(lambda: not any(stub.running for stub in stubs))
    for stub in stubs:
        await stub.close()
    ours = [r for r in caplog.records if r.name.startswith(("mindrouter", "scheduler", "backends"))]
    assert [r.getMessage() for r in ours if r.levelno >= logging.WARNING] == []
