"""``/v1/moderations``, by OpenAI's package against a stub that answers as its reference says."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from backends.models import Alias, BackendModel
from tests.running import RunningRouter
from tests.stubs.openai_stub import OpenAIStub
from tests.stubs.surfaces import judges, vllm_without_the_path


async def test_it_passes_unchanged_and_is_estimated(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(judges)
    answer = await client.moderations.create(model="m", input=["a" * 40, "b" * 4])
    assert [result.flagged for result in answer.results] == [True, True]
    assert answer.results[0].category_scores.violence == 0.99
    assert stub.calls[0].body == {"model": "m", "input": ["a" * 40, "b" * 4]}
    record = await router.record()
    assert (record.endpoint, record.outcome) == ("moderations", "completed")
    assert (record.prompt_tokens, record.completion_tokens) == (11, 0)
    assert record.usage_estimated is True
    assert record.charged_tokens == 11


async def test_an_image_counts_as_in_a_chat(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(judges)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9000}}
    asked: Any = [{"type": "text", "text": "b" * 40}, image]
    await client.moderations.create(model="m", input=asked)
    # the words "text" and "image_url" of the form are a token and three
    assert (await router.record()).prompt_tokens == 765 + 10 + 1 + 3


async def test_without_a_model_the_only_one_that_moderates_is_meant(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    with pytest.raises(openai.BadRequestError, match="no model is known to do this") as refused:
        await client.moderations.create(input="x")
    assert refused.value.param == "model"
    await router.change(lambda: BackendModel.objects.update(moderation=True))
    await router.change(Alias.objects.create, name="n", targets=["m"])
    stub.then(judges)
    assert (await client.moderations.create(input="x")).model == "m"
    assert stub.calls[0].body == {"input": "x", "model": "m"}


async def test_where_no_backend_can_it_is_refused(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(vllm_without_the_path)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.moderations.create(model="m", input="x")
    assert refused.value.code == "capability_missing"
    await router.change(lambda: BackendModel.objects.update(moderation=False))
    with pytest.raises(openai.BadRequestError, match="does not moderate"):
        await client.moderations.create(model="m", input="x")
    assert len(stub.calls) == 1
