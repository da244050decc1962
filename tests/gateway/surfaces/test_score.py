"""``/v1/score``, as vLLM and SGLang have it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.running import RunningRouter
from tests.stubs.openai_stub import Call, OpenAIStub
from tests.stubs.surfaces import scores


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_it_passes_unchanged_and_costs_what_is_told(
    router: RunningRouter, stub: OpenAIStub, path: str
) -> None:
    stub.then(scores)
    asked = {"model": "m", "text_1": "France?", "text_2": ["Paris", "Rome"], "activation": True}
    answer = await router.client.post(path, json=asked)
    assert [row["score"] for row in answer.json()["data"]] == [1.0, 0.5]
    assert (stub.calls[0].path, stub.calls[0].body) == ("/v1/score", asked)
    record = await router.record()
    assert (record.endpoint, record.prompt_tokens, record.usage_estimated) == ("score", 15, False)


@pytest.mark.parametrize(
    ("sides", "tokens"),
    [
        # 8 letters are 2 tokens, 4 are 1
        ({"text_1": "a" * 8, "text_2": "b" * 4}, 3),
        ({"text_1": "a" * 8, "text_2": ["b" * 4, "b" * 4]}, 6),
        ({"text_1": ["a" * 8, "a" * 8], "text_2": ["b" * 4, "b" * 4]}, 6),
        ({"queries": "a" * 8, "documents": ["b" * 4] * 3}, 9),
        ({"query": "a" * 8, "items": ["b" * 4], "label_token_ids": [1, 2]}, 3),
    ],
)
async def test_without_usage_each_pair_is_counted(
    router: RunningRouter, stub: OpenAIStub, sides: dict[str, Any], tokens: int
) -> None:
    async def without_usage(call: Call) -> None:
        await call.json({"scores": [[0.5]], "object": "scoring"})

    stub.then(without_usage)
    assert (await router.client.post("/v1/score", json={"model": "m"} | sides)).is_success
    record = await router.record()
    assert (record.prompt_tokens, record.usage_estimated) == (tokens, True)
