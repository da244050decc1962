"""Real clients, the router and a real llama.cpp server: nothing in between is made up.

Each test runs with the backend known as llama.cpp, which speaks all but Ollama's API itself, and
as an engine that speaks OpenAI's form only, so that everything is translated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.gateway.clients.acting import AGE_SCHEMA
from tests.llama import llama_server
from tests.running import RunningRouter

pytestmark = pytest.mark.llama

COUNT: Any = [{"role": "user", "content": "Count from one to five in digits, with commas."}]
ASK_AGE: Any = [{"role": "user", "content": "How old is Ada? Answer in JSON."}]


@pytest.fixture(scope="module")
def llama() -> Iterator[str]:
    """The address of a server with a small model that also embeds."""
    with llama_server("--embeddings") as url:
        yield url


@pytest.fixture(params=["llamacpp", "openai"], autouse=True)
async def engine(router: RunningRouter, llama: str, request: pytest.FixtureRequest) -> str:
    name: str = request.param
    await router.backend(llama, "real", engine=name, models=("smollm2",))
    return name


@pytest.fixture
def openai_client(router: RunningRouter) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{router.url}/v1", api_key=router.key, max_retries=0)


@pytest.fixture
def anthropic_client(router: RunningRouter) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=router.url, api_key=router.key, max_retries=0)


@pytest.fixture
def ollama_client(router: RunningRouter) -> ollama.AsyncClient:
    return ollama.AsyncClient(router.url, headers={"Authorization": f"Bearer {router.key}"})


async def is_recorded(router: RunningRouter, output_tokens: int, count: int = 1) -> None:
    """Every answer was whole, and counted by the backend."""
    records = await router.records()
    assert [r.outcome for r in records] == ["completed"] * count
    assert [r.completion_tokens for r in records] == [output_tokens] * count
    assert not any(r.usage_estimated for r in records)
    assert all((r.prompt_tokens or 0) > 10 for r in records)


async def test_openai_chat_whole_and_streamed(
    router: RunningRouter, openai_client: AsyncOpenAI
) -> None:
    fields: Any = {"model": "smollm2", "messages": COUNT, "max_tokens": 6, "temperature": 0}
    whole = await openai_client.chat.completions.create(**fields)
    parts = [
        chunk.choices[0].delta.content or ""
        async for chunk in await openai_client.chat.completions.create(**fields, stream=True)
    ]
    assert "".join(parts) == whole.choices[0].message.content
    await is_recorded(router, 6, 2)


async def test_openai_schema_and_embeddings(
    router: RunningRouter, openai_client: AsyncOpenAI
) -> None:
    schema: Any = {
        "type": "json_schema",
        "json_schema": {"name": "age", "strict": True, "schema": AGE_SCHEMA},
    }
    answer = await openai_client.chat.completions.create(
        model="smollm2", messages=ASK_AGE, response_format=schema, max_tokens=40
    )
    assert isinstance(json.loads(answer.choices[0].message.content or "")["age"], int)
    vectors = await openai_client.embeddings.create(model="smollm2", input=["a", "b"])
    assert [len(row.embedding) for row in vectors.data] == [576, 576]


async def test_responses_whole_and_streamed(
    router: RunningRouter, openai_client: AsyncOpenAI
) -> None:
    fields: Any = {"model": "smollm2", "input": COUNT, "temperature": 0}
    whole = await openai_client.responses.create(**fields, max_output_tokens=16)
    async with openai_client.responses.stream(**fields, max_output_tokens=16) as events:
        deltas = [e.delta async for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    await is_recorded(router, 16, 2)


async def test_anthropic_whole_and_streamed(
    router: RunningRouter, anthropic_client: AsyncAnthropic
) -> None:
    cold = {"temperature": 0}  # the package has no word of its own for it any more
    fields: Any = {"model": "smollm2", "messages": COUNT, "max_tokens": 6, "extra_body": cold}
    whole: Any = await anthropic_client.messages.create(**fields)
    async with anthropic_client.messages.stream(**fields) as stream:
        text = "".join([part async for part in stream.text_stream])
    assert text == whole.content[0].text
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 6)
    await is_recorded(router, 6, 2)


async def test_anthropic_counts_tokens(anthropic_client: AsyncAnthropic, engine: str) -> None:
    counted = await anthropic_client.messages.count_tokens(model="smollm2", messages=COUNT)
    message: Any = await anthropic_client.messages.create(
        model="smollm2", messages=COUNT, max_tokens=1
    )
    read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    if engine == "llamacpp":
        assert counted.input_tokens == read
    else:  # an estimate, which knows nothing of the model's own system prompt
        assert 0 < counted.input_tokens < read


async def test_ollama_whole_and_streamed(
    router: RunningRouter, ollama_client: ollama.AsyncClient
) -> None:
    options = {"num_predict": 6, "temperature": 0}
    whole = await ollama_client.chat("smollm2", COUNT, options=options)
    parts = [
        p async for p in await ollama_client.chat("smollm2", COUNT, options=options, stream=True)
    ]
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 6)
    assert (parts[-1].eval_duration or 0) > 0
    await is_recorded(router, 6, 2)


async def test_ollama_schema_and_embeddings(ollama_client: ollama.AsyncClient) -> None:
    options = {"num_predict": 40}
    answer = await ollama_client.chat("smollm2", ASK_AGE, format=AGE_SCHEMA, options=options)
    assert isinstance(json.loads(answer.message.content or "")["age"], int)
    assert len((await ollama_client.embed("smollm2", "a")).embeddings[0]) == 576
