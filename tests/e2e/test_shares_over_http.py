"""Shares as they arrive: tokens that backends counted, through HTTP, under backlog."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from accounts.models import Group
from tests.running import RunningRouter, body, until
from tests.stubs.openai_stub import Call, OpenAIStub

PROMPT = 10
#: Each user's answers are of another length: shares are of tokens, not of requests.
OUTPUT = {"faculty": 20, "staff": 60, "student": 190}
ENOUGH = 100_000  # tokens
CONNECTIONS = 8  # of each user; there are three slots


class Counting:
    """A behaviour: as many tokens as were asked for, counted by user."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()

    async def __call__(self, call: Call) -> None:
        output = call.body["max_tokens"]
        self.tokens[call.body["user"]] += PROMPT + output
        await call.json(call.document() | {"usage": call.counts(PROMPT, output)})


def shares(counts: Counter[str]) -> dict[str, float]:
    return {user: 100 * count / counts.total() for user, count in counts.items()}


async def ask(router: RunningRouter, key: str, user: str) -> None:
    """One request after the other, for ever."""
    async with await router.raw() as client:
        client.key = key
        request = body(user=user, max_tokens=OUTPUT[user])
        while True:
            client.post(request)
            status, _, data = await client.response(within=30.0)
            assert status == 200, data


@asynccontextmanager
async def backlog(router: RunningRouter, weights: dict[str, int]) -> AsyncIterator[None]:
    """Each user has more requests waiting than there are slots, all the time."""
    keys = {user: await router.user(user, weight=weight) for user, weight in weights.items()}
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(ask(router, key, user))
            for user, key in keys.items()
            for _ in range(CONNECTIONS)
        ]
        yield
        for task in tasks:
            task.cancel()


async def test_weights_of_3_2_1_give_50_33_17_percent_of_the_tokens_and_follow_a_change(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.behaviour = counting = Counting()
    await router.backend(stub, max_concurrent=2, max_queue=100)
    await router.backend(stub, max_concurrent=1, max_queue=100)
    async with backlog(router, {"faculty": 3, "staff": 2, "student": 1}):
        await until(lambda: counting.tokens.total() > ENOUGH, within=60.0)
        before = counting.tokens.copy()
        assert shares(before) == {
            "faculty": pytest.approx(50.0, abs=2.0),
            "staff": pytest.approx(33.3, abs=2.0),
            "student": pytest.approx(16.7, abs=2.0),
        }

        version, changed = router.runtime.snapshot.version, time.monotonic()
        await router.ask(lambda: Group.objects.filter(name="student").update(scheduler_weight=3))
        await router.ask(lambda: Group.objects.filter(name="faculty").update(scheduler_weight=1))
        await until(lambda: router.runtime.snapshot.version >= version + 2, within=5.0)
        assert time.monotonic() - changed < 5.0
        before = counting.tokens.copy()
        await until(lambda: (counting.tokens - before).total() > ENOUGH, within=60.0)
        assert shares(counting.tokens - before) == {
            "faculty": pytest.approx(16.7, abs=2.0),
            "staff": pytest.approx(33.3, abs=2.0),
            "student": pytest.approx(50.0, abs=2.0),
        }
    assert stub.most_running <= 3
    charged: Counter[str] = Counter()
    for record in await router.records():
        assert record.outcome in ("completed", "cancelled")
        charged[record.user] += int(record.charged_tokens)
    # What was charged is what the backend counted, but for those that were cut at the end.
    assert charged.total() == pytest.approx(counting.tokens.total(), rel=0.01)
