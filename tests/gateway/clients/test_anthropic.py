"""The real ``anthropic`` package against the router, over loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from tests.gateway.clients.acting import PNG, WEATHER_SCHEMA, breaks, calls_tools, endless
from tests.running import RunningRouter
from tests.stubs.openai_stub import OpenAIStub, refuse

HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOLS: Any = [{"name": "get_weather", "input_schema": WEATHER_SCHEMA}]


@pytest.fixture(params=["", "/anthropic"])
async def client(
    router: RunningRouter, request: pytest.FixtureRequest
) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=router.url + request.param, api_key=router.key) as made:
        yield made


@pytest.fixture
async def one(router: RunningRouter) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=router.url, api_key=router.key) as made:
        yield made


@pytest.fixture(autouse=True)
async def _backend(router: RunningRouter, stub: OpenAIStub) -> None:
    await router.backend(stub, "a", engine="sglang")


async def test_message(client: AsyncAnthropic, router: RunningRouter) -> None:
    message: Any = await client.messages.create(
        model="m", max_tokens=20, messages=HELLO, system="Be brief."
    )
    assert message.content[0].text == "Hello, world"
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 3)
    assert message._request_id == (await router.record()).request_id


async def test_stream(client: AsyncAnthropic) -> None:
    async with client.messages.stream(model="m", max_tokens=20, messages=HELLO) as stream:
        parts = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert parts == ["Hello", ",", " world"]
    assert (message.usage.input_tokens, message.usage.output_tokens) == (7, 3)


@pytest.mark.parametrize("streams", [False, True])
async def test_parallel_tool_calls(one: AsyncAnthropic, stub: OpenAIStub, streams: bool) -> None:
    stub.then(calls_tools)
    fields: Any = {"model": "m", "max_tokens": 20, "messages": HELLO, "tools": TOOLS}
    if streams:
        async with one.messages.stream(**fields) as stream:
            message: Any = await stream.get_final_message()
    else:
        message = await one.messages.create(**fields)
    assert message.stop_reason == "tool_use"
    used = [(b.id, b.name, b.input) for b in message.content if b.type == "tool_use"]
    assert used == [(f"call_{n}", "get_weather", {"city": "Paris"}) for n in range(2)]


async def test_tool_results_and_images_reach_the_backend(
    one: AsyncAnthropic, stub: OpenAIStub
) -> None:
    image = {"type": "base64", "media_type": "image/png", "data": PNG}
    messages: Any = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "?"}, {"type": "image", "source": image}],
        },
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "get_weather", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": "12 degrees"}],
        },
    ]
    await one.messages.create(model="m", max_tokens=20, messages=messages, tools=TOOLS)
    sent = stub.calls[0].body["messages"]
    assert sent[0]["content"][1]["image_url"]["url"] == f"data:image/png;base64,{PNG}"
    assert (sent[2]["role"], sent[2]["tool_call_id"]) == ("tool", "t")


async def test_schema(one: AsyncAnthropic, stub: OpenAIStub) -> None:
    stub.words = ['{"city": "Paris"}']
    await one.messages.create(
        model="m",
        max_tokens=20,
        messages=HELLO,
        output_config={"format": {"type": "json_schema", "schema": WEATHER_SCHEMA}},
    )
    assert stub.calls[0].body["response_format"]["json_schema"]["schema"] == WEATHER_SCHEMA


async def test_count_tokens(client: AsyncAnthropic) -> None:
    counted = await client.messages.count_tokens(model="m", messages=HELLO)
    assert counted.input_tokens == 6


async def test_models(client: AsyncAnthropic) -> None:
    assert [model.id async for model in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).display_name == "m"


async def test_the_older_header_for_keys_works(router: RunningRouter) -> None:
    """Packages before version 2, and litellm."""
    headers = {"x-api-key": router.key, "anthropic-version": "2023-06-01", "Authorization": ""}
    body = {"model": "m", "max_tokens": 20, "messages": HELLO}
    response = await router.client.post("/v1/messages", json=body, headers=headers)
    assert response.status_code == 200


# ---- errors


async def test_an_error_in_the_middle_of_a_stream_is_raised(
    one: AsyncAnthropic, stub: OpenAIStub
) -> None:
    stub.then(breaks)
    async with one.messages.stream(model="m", max_tokens=20, messages=HELLO) as stream:
        texts = aiter(stream.text_stream)
        assert await anext(texts) == "Hello"
        with pytest.raises(anthropic.APIStatusError, match="Backend a"):
            await anext(texts)
    assert len(stub.calls) == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_it_waits_as_long_as_it_is_told_and_tries_again(
    one: AsyncAnthropic, router: RunningRouter, stub: OpenAIStub, status: int
) -> None:
    stub.then(refuse(status, "full", [("Retry-After", "3")]))
    began = time.monotonic()
    await one.messages.create(model="m", max_tokens=20, messages=HELLO)
    assert 2.9 < time.monotonic() - began < 20
    assert [r.status for r in await router.records()] == [status, 200]


async def test_errors_have_their_own_classes_and_are_not_tried_again(
    one: AsyncAnthropic, router: RunningRouter
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        await one.messages.create(model="m", max_tokens=20, messages=[])
    with pytest.raises(anthropic.NotFoundError) as missing:
        await one.messages.create(model="x", max_tokens=20, messages=HELLO)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError):
        await one.with_options(api_key="x").messages.create(
            model="m", max_tokens=20, messages=HELLO
        )
    assert [r.status for r in await router.records()] == [400, 404, 401]


async def test_leaving_a_stream_in_the_middle_stops_the_backend(
    one: AsyncAnthropic, router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(endless)
    async with one.messages.stream(model="m", max_tokens=20, messages=HELLO) as stream:
        async for _ in stream.text_stream:
            break
    await asyncio.wait_for(stub.calls[0].ended.wait(), 20)
    assert (await router.record()).outcome == "cancelled"
