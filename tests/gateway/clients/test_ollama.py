"""The real ``ollama`` package against the router, over loopback."""

from __future__ import annotations

import asyncio
from typing import Any

import ollama
import pytest

from scheduler.models import SiteSettings
from tests.gateway.clients.acting import (
    AGE_SCHEMA,
    PNG,
    WEATHER_SCHEMA,
    breaks,
    calls_tools,
    endless,
)
from tests.running import RunningRouter
from tests.stubs.openai_stub import OpenAIStub, refuse

HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_SCHEMA}}
]


@pytest.fixture
def client(router: RunningRouter) -> ollama.AsyncClient:
    return ollama.AsyncClient(router.url, headers={"Authorization": f"Bearer {router.key}"})


@pytest.fixture(autouse=True)
async def _backend(router: RunningRouter, stub: OpenAIStub) -> None:
    await router.backend(stub, "a", engine="sglang")


async def test_chat(client: ollama.AsyncClient, stub: OpenAIStub) -> None:
    options = {"num_predict": 20, "temperature": 0.5, "seed": 3, "stop": ["x"]}
    answer = await client.chat("m", HELLO, options=options)
    assert answer.message.content == "Hello, world"
    assert (answer.prompt_eval_count, answer.eval_count, answer.done_reason) == (7, 3, "stop")
    assert answer.total_duration
    assert answer.eval_duration
    sent = stub.calls[0].body
    assert (sent["max_tokens"], sent["temperature"], sent["seed"]) == (20, 0.5, 3)


async def test_stream(client: ollama.AsyncClient) -> None:
    parts = [part async for part in await client.chat("m", HELLO, stream=True)]
    assert [part.message.content for part in parts] == ["Hello", ",", " world", ""]
    assert [part.done for part in parts] == [False, False, False, True]
    assert parts[-1].eval_count == 3


async def test_generate_streaming_and_not(client: ollama.AsyncClient) -> None:
    assert (await client.generate("m", "Hello")).response == "Hello, world"
    parts = [part.response async for part in await client.generate("m", "Hello", stream=True)]
    assert "".join(parts) == "Hello, world"


@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_tool_calls(
    client: ollama.AsyncClient, stub: OpenAIStub, stream: bool
) -> None:
    stub.then(calls_tools)
    if stream:
        parts = [part async for part in await client.chat("m", HELLO, tools=TOOLS, stream=True)]
        calls = [call for part in parts for call in part.message.tool_calls or ()]
    else:
        calls = list((await client.chat("m", HELLO, tools=TOOLS)).message.tool_calls or ())
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", {"city": "Paris"})
    ] * 2


async def test_vision_and_schema(client: ollama.AsyncClient, stub: OpenAIStub) -> None:
    stub.words = ['{"age": 36}']
    messages: Any = [{"role": "user", "content": "How old?", "images": [PNG]}]
    answer = await client.chat("m", messages, format=AGE_SCHEMA)
    assert answer.message.content == '{"age": 36}'
    sent = stub.calls[0].body
    assert sent["messages"][0]["content"][1]["image_url"]["url"].endswith(PNG)
    assert sent["response_format"]["json_schema"]["schema"] == AGE_SCHEMA


async def test_embeddings_in_both_forms(client: ollama.AsyncClient) -> None:
    assert (await client.embed("m", ["a", "b"])).embeddings == [[0.25, -0.5, 1.0]] * 2
    assert (await client.embeddings("m", "a")).embedding == [0.25, -0.5, 1.0]


async def test_models(client: ollama.AsyncClient) -> None:
    assert [model.model for model in (await client.list()).models] == ["m"]
    assert (await client.show("m")).capabilities == ["completion"]
    assert list((await client.ps()).models) == []


async def test_without_a_key_once_the_admin_has_opened_it(router: RunningRouter) -> None:
    client = ollama.AsyncClient(router.url)
    with pytest.raises(ollama.ResponseError, match="No API key"):
        await client.chat("m", HELLO)
    await router.change(SiteSettings.objects.create, pk=1, open_to="ada")
    assert (await client.chat("m", HELLO)).message.content == "Hello, world"


async def test_pulling_is_refused_in_words(client: ollama.AsyncClient) -> None:
    for ask in (client.pull, client.delete):
        with pytest.raises(ollama.ResponseError, match="administrator") as refused:
            await ask("m")
        assert refused.value.status_code == 403


async def test_an_error_in_the_middle_of_a_stream_is_raised(
    client: ollama.AsyncClient, stub: OpenAIStub
) -> None:
    stub.then(breaks)
    parts: Any = await client.chat("m", HELLO, stream=True)
    assert (await anext(parts)).message.content == "Hello"
    with pytest.raises(ollama.ResponseError, match="Backend a"):
        await anext(parts)


@pytest.mark.parametrize(("status", "told"), [(429, 429), (503, 503), (400, 400)])
async def test_it_never_tries_again_and_tells_the_status(
    client: ollama.AsyncClient, router: RunningRouter, stub: OpenAIStub, status: int, told: int
) -> None:
    stub.then(refuse(status, "no", [("Retry-After", "30")]))
    with pytest.raises(ollama.ResponseError) as refused:
        await client.chat("m", HELLO)
    assert (refused.value.status_code, refused.value.error) == (told, "no")
    assert len(await router.records()) == 1


async def test_leaving_a_stream_in_the_middle_stops_the_backend(
    client: ollama.AsyncClient, router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(endless)
    parts: Any = await client.chat("m", HELLO, stream=True)
    async for _ in parts:
        break
    await parts.aclose()
    await asyncio.wait_for(stub.calls[0].ended.wait(), 20)
    assert (await router.record()).outcome == "cancelled"
