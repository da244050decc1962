"""``/v1/images/generations``, ``edits`` and ``variations``, by OpenAI's package."""

from __future__ import annotations

import base64
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from backends.models import Alias, BackendModel
from tests.running import RunningRouter
from tests.stubs.openai_stub import OpenAIStub, sse
from tests.stubs.surfaces import PICTURE, draws, streams, vllm_without_the_path

USAGE = {
    "input_tokens": 50,
    "input_tokens_details": {"text_tokens": 10, "image_tokens": 40},
    "output_tokens": 200,
    "total_tokens": 250,
}


async def test_images_pass_unchanged_and_cost_their_number_and_size(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(draws())
    answer = await client.images.generate(model="m", prompt="a" * 40, n=2, size="1024x1536")
    assert [base64.b64decode(image.b64_json or "") for image in answer.data or ()] == [PICTURE] * 2
    assert stub.calls[0].body == {"model": "m", "prompt": "a" * 40, "n": 2, "size": "1024x1536"}
    record = await router.record()
    assert (record.endpoint, record.outcome) == ("images.generations", "completed")
    assert (record.prompt_tokens, record.completion_tokens) == (10, 2 * 1536)
    assert record.usage_estimated is True


async def test_a_budget_counts_what_images_are_estimated_at(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    key = await router.user("eve", token_budget=2000)
    stub.behaviour = draws()
    mine = client.with_options(api_key=key)
    await mine.images.generate(model="m", prompt="aaaa", size="1024x1024")
    with pytest.raises(openai.RateLimitError) as refused:
        await mine.images.generate(model="m", prompt="aaaa", size="1024x1024")
    assert refused.value.code == "quota_exceeded"
    assert [record.charged_tokens for record in await router.records()] == [1025, 0]


async def test_tokens_count_where_the_backend_tells_them(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(draws(USAGE))
    await client.images.generate(model="m", prompt="A cat")
    record = await router.record()
    assert (record.prompt_tokens, record.completion_tokens) == (50, 200)
    assert record.usage_estimated is False


async def test_large_images_pass_while_they_come_and_are_counted_all_the_same(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(draws(USAGE, size=3 << 20))
    answer = await client.images.generate(model="m", prompt="A cat")
    assert base64.b64decode((answer.data or [])[0].b64_json or "") == PICTURE + bytes(3 << 20)
    record = await router.record()
    assert (record.completion_tokens, record.usage_estimated) == (200, False)


async def test_a_stream_of_partial_images_passes_event_by_event(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    large = "A" * (2 << 20)
    partial = {"type": "image_generation.partial_image", "partial_image_index": 0}
    last = {"type": "image_generation.completed", "b64_json": large, "usage": USAGE}
    more = {"created_at": 1, "size": "1024x1024", "quality": "low", "background": "opaque"}
    more |= {"output_format": "png"}
    stub.then(streams([sse(partial | more | {"b64_json": large}), sse(last | more)]))
    events = await client.images.generate(model="m", prompt="A cat", stream=True, partial_images=1)
    kinds = [event.type async for event in events]
    assert kinds == ["image_generation.partial_image", "image_generation.completed"]
    assert stub.calls[0].body == {
        "model": "m",
        "prompt": "A cat",
        "stream": True,
        "partial_images": 1,
    }
    record = await router.record()
    assert (record.stream, record.outcome, record.completion_tokens) == (True, "completed", 200)


async def test_edits_are_forms_whose_model_is_rewritten(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.change(Alias.objects.create, name="painter", targets=["m"])
    stub.then(draws())
    answer = await client.images.edit(
        model="painter", image=("a.png", PICTURE), prompt="Add a hat", n=2, size="512x512"
    )
    assert len(answer.data or ()) == 2
    form = stub.calls[0].form
    assert (form["model"], form["prompt"], form["image"]) == (b"m", b"Add a hat", PICTURE)
    record = await router.record()
    assert (record.endpoint, record.model_requested) == ("images.edits", "painter")
    # 9 letters: 3 tokens, and an image
    assert (record.prompt_tokens, record.completion_tokens) == (3 + 765, 2 * 256)


async def test_edits_of_linked_images_are_json(router: RunningRouter, stub: OpenAIStub) -> None:
    stub.then(draws())
    asked = {"model": "m", "prompt": "hat!", "images": [{"image_url": "https://x/a.png"}]}
    answer = await router.client.post("/v1/images/edits", json=asked)
    assert answer.status_code == 200
    assert stub.calls[0].body == asked
    record = await router.record()
    assert (record.prompt_tokens, record.completion_tokens) == (1 + 765, 1024)


@pytest.mark.filterwarnings("ignore:deprecated")
async def test_variations(client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub) -> None:
    stub.then(draws())
    await client.images.create_variation(model="m", image=("a.png", PICTURE))
    assert stub.calls[0].path == "/v1/images/variations"
    record = await router.record()
    assert (record.endpoint, record.completion_tokens) == ("images.variations", 1024)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": None}, "prompt"), ({"n": 0}, "n"), ({"size": 7}, "size"), ({"model": 7}, "model")],
)
async def test_what_is_wrong_is_named(
    router: RunningRouter, stub: OpenAIStub, fields: dict[str, Any], param: str
) -> None:
    asked = {"model": "m", "prompt": "A cat"} | fields
    answer = await router.client.post("/v1/images/generations", json=asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", param)


async def test_where_no_backend_can_it_is_refused(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(vllm_without_the_path)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.images.generate(model="m", prompt="A cat")
    assert refused.value.code == "capability_missing"
    await router.change(lambda: BackendModel.objects.update(images=False))
    with pytest.raises(openai.BadRequestError, match="does not make images"):
        await client.images.edit(model="m", image=("a.png", PICTURE), prompt="x")
