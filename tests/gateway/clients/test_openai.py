"""The real ``openai`` package against the router, over loopback."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from backends.models import BackendModel
from tests.gateway.clients.acting import (
    AGE_SCHEMA,
    ARGUMENTS,
    DATA_URL,
    JPEG_LINK,
    WEATHER_SCHEMA,
    breaks,
    calls_tools,
    endless,
)
from tests.running import RunningRouter
from tests.stubs.openai_stub import OpenAIStub, held, refuse

HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_SCHEMA}}
]


class Age(BaseModel):
    age: int


@pytest.fixture
async def client(router: RunningRouter) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{router.url}/v1", api_key=router.key) as made:
        yield made


@pytest.fixture(autouse=True)
async def _backend(router: RunningRouter, stub: OpenAIStub) -> None:
    """It speaks no more than chat, completions and embeddings."""
    await router.backend(stub, "a", engine="sglang")


async def test_chat(client: AsyncOpenAI, router: RunningRouter) -> None:
    answer = await client.chat.completions.create(
        model="m", messages=HELLO, seed=1, n=1, stop=["x"], extra_body={"top_k": 3}
    )
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 10
    assert answer._request_id == (await router.record()).request_id


async def test_fields_reach_the_backend_unchanged(client: AsyncOpenAI, stub: OpenAIStub) -> None:
    await client.chat.completions.create(
        model="m", messages=HELLO, seed=1, n=2, logprobs=True, extra_body={"brand_new": [1.0]}
    )
    body = stub.calls[0].body
    assert (body["seed"], body["n"], body["logprobs"], body["brand_new"]) == (1, 2, True, [1.0])


async def test_stream_with_and_without_usage(client: AsyncOpenAI) -> None:
    text, usage = "", []
    async for chunk in await client.chat.completions.create(
        model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
    ):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage += [chunk.usage] if chunk.usage else []
    assert text == "Hello, world"
    assert [u.completion_tokens for u in usage] == [3]
    plain = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
    assert [chunk.usage async for chunk in plain if chunk.usage or not chunk.choices] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_tool_calls(client: AsyncOpenAI, stub: OpenAIStub, stream: bool) -> None:
    stub.then(calls_tools)
    if stream:
        async with client.chat.completions.stream(model="m", messages=HELLO, tools=TOOLS) as events:
            answer = await events.get_final_completion()
    else:
        answer = await client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS)
    calls: Any = answer.choices[0].message.tool_calls
    assert [(c.id, c.function.name, c.function.arguments) for c in calls] == [
        ("call_0", "get_weather", ARGUMENTS),
        ("call_1", "get_weather", ARGUMENTS),
    ]
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_vision_by_data_url_and_link(client: AsyncOpenAI, stub: OpenAIStub) -> None:
    parts: Any = [
        {"type": "text", "text": "What?"},
        *({"type": "image_url", "image_url": {"url": url}} for url in (DATA_URL, JPEG_LINK)),
    ]
    messages: Any = [{"role": "user", "content": parts}]
    await client.chat.completions.create(model="m", messages=messages)
    assert stub.calls[0].body["messages"][0]["content"] == parts


async def test_an_image_to_a_model_known_not_to_see_is_refused(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.change(lambda: BackendModel.objects.update(vision=False))
    messages: Any = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": DATA_URL}}]}
    ]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="m", messages=messages)
    assert refused.value.code == "capability_missing"
    assert stub.calls == []


async def test_schema(client: AsyncOpenAI, stub: OpenAIStub) -> None:
    stub.words = ['{"age": 36}']
    answer = await client.chat.completions.parse(model="m", messages=HELLO, response_format=Age)
    assert answer.choices[0].message.parsed == Age(age=36)
    asked = stub.calls[0].body["response_format"]["json_schema"]
    assert asked["schema"]["required"] == AGE_SCHEMA["required"]


async def test_embeddings_in_base64_as_the_package_asks_for_them(
    client: AsyncOpenAI, stub: OpenAIStub
) -> None:
    answer = await client.embeddings.create(model="m", input=["a", "b"])
    assert [row.embedding for row in answer.data] == [[0.25, -0.5, 1.0]] * 2
    assert stub.calls[0].body["encoding_format"] == "base64"


async def test_completions(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="m", prompt="Hello")
    assert answer.choices[0].text == "Hello, world"


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).owned_by == "mindrouter"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("x")


# ---- responses


async def test_responses(client: AsyncOpenAI) -> None:
    answer = await client.responses.create(model="m", input="Hello", instructions="Be brief.")
    assert answer.output_text == "Hello, world"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 10


async def test_responses_stream(client: AsyncOpenAI) -> None:
    async with client.responses.stream(model="m", input="Hello") as events:
        kinds = [event.type async for event in events]
        answer = await events.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert answer.output_text == "Hello, world"


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_tool_calls(client: AsyncOpenAI, stub: OpenAIStub, stream: bool) -> None:
    stub.then(calls_tools)
    tools: Any = [
        {
            "type": "function",
            "name": "get_weather",
            "parameters": WEATHER_SCHEMA | {"additionalProperties": False},
            "strict": True,
        }
    ]
    if stream:
        async with client.responses.stream(model="m", input="Hello", tools=tools) as events:
            answer: Any = await events.get_final_response()
    else:
        answer = await client.responses.create(model="m", input="Hello", tools=tools)
    assert [(i.call_id, i.name, i.arguments) for i in answer.output] == [
        ("call_0", "get_weather", ARGUMENTS),
        ("call_1", "get_weather", ARGUMENTS),
    ]


async def test_responses_vision_and_schema(client: AsyncOpenAI, stub: OpenAIStub) -> None:
    stub.words = ['{"age": 36}']
    parts: Any = [
        {"type": "input_text", "text": "How old?"},
        {"type": "input_image", "image_url": DATA_URL, "detail": "auto"},
    ]
    asked: Any = [{"role": "user", "content": parts}]
    answer = await client.responses.parse(model="m", input=asked, text_format=Age)
    assert answer.output_parsed == Age(age=36)
    sent = stub.calls[0].body
    assert sent["messages"][0]["content"][1]["image_url"]["url"] == DATA_URL
    assert sent["response_format"]["type"] == "json_schema"


# ---- errors


@pytest.mark.parametrize("responses", [False, True])
async def test_an_error_in_the_middle_of_a_stream_is_raised(
    client: AsyncOpenAI, stub: OpenAIStub, responses: bool
) -> None:
    stub.then(breaks)
    seen: list[str] = []
    with pytest.raises(openai.APIError, match="Backend a"):
        await _read(await _begin(client, responses=responses), seen)
    assert "Hello" in "".join(seen)
    assert len(stub.calls) == 1


async def _begin(client: AsyncOpenAI, *, responses: bool) -> Any:
    if responses:
        return await client.responses.create(model="m", input="Hello", stream=True)
    return await client.chat.completions.create(model="m", messages=HELLO, stream=True)


async def _read(events: Any, seen: list[str]) -> None:
    async for event in events:
        seen += [event.to_json()]


@pytest.mark.parametrize("status", [429, 503])
async def test_it_waits_as_long_as_it_is_told_and_tries_again(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub, status: int
) -> None:
    stub.then(refuse(status, "full", [("Retry-After", "3")]))
    began = time.monotonic()
    answer = await client.chat.completions.create(model="m", messages=HELLO)
    assert answer.choices[0].message.content == "Hello, world"
    assert 2.9 < time.monotonic() - began < 20
    assert [r.status for r in await router.records()] == [status, 200]


async def test_it_does_not_try_again_what_is_hopeless(
    client: AsyncOpenAI, router: RunningRouter
) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="m", messages=[])
    assert bad.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="x", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="x").chat.completions.create(model="m", messages=HELLO)
    assert [r.status for r in await router.records()] == [400, 404, 401]


async def test_a_full_queue_is_tried_again_and_then_told(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    key = await router.user("eve", max_concurrent=1)
    mine = client.with_options(api_key=key, max_retries=1)
    ended = asyncio.Event()
    stub.then(held(ended))
    running = asyncio.create_task(mine.chat.completions.create(model="m", messages=HELLO))
    await stub.until_calls(1)
    with pytest.raises(openai.RateLimitError) as full:
        await mine.chat.completions.create(model="m", messages=HELLO)
    assert full.value.code == "concurrency_limit_exceeded"
    ended.set()
    await running
    assert sorted(r.status or 0 for r in await router.records()) == [200, 429, 429]


@pytest.mark.parametrize("responses", [False, True])
async def test_closing_a_stream_in_the_middle_stops_the_backend(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub, responses: bool
) -> None:
    stub.then(endless)
    events = await _begin(client, responses=responses)
    await anext(events)
    await events.close()
    await asyncio.wait_for(stub.calls[0].ended.wait(), 20)
    record = await router.record()
    assert (record.outcome, record.reason) == ("cancelled", "client_disconnected")


async def test_json_mode(client: AsyncOpenAI, stub: OpenAIStub) -> None:
    stub.words = ["{}"]
    answer = await client.chat.completions.create(
        model="m", messages=HELLO, response_format={"type": "json_object"}
    )
    assert json.loads(answer.choices[0].message.content or "") == {}
    assert stub.calls[0].body["response_format"] == {"type": "json_object"}
