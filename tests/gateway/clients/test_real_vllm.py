"""Real clients, the router and a real vLLM, which the tests do not start: it takes a minute.

docs/engines.md says how; ``MINDROUTER_TEST_VLLM=http://127.0.0.1:18100`` then runs them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import anthropic
import ollama
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from backends.engines.observation import Observation
from backends.probe import Target, probe
from tests.gateway.clients.acting import AGE_SCHEMA, DATA_URL, WEATHER_SCHEMA
from tests.running import RunningRouter

URL = os.environ.get("MINDROUTER_TEST_VLLM", "")
MODEL = os.environ.get("MINDROUTER_TEST_VLLM_MODEL", "smollm2")
COUNT: Any = [{"role": "user", "content": "Count from one to five in digits, with commas."}]
ASK_AGE: Any = [{"role": "user", "content": "How old is Ada? Answer in JSON."}]
STORY: Any = [{"role": "user", "content": "Tell a long story."}]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not URL, reason="needs a running vLLM: MINDROUTER_TEST_VLLM is its address"),
]


@pytest.fixture(params=["vllm", "openai"])
async def engine(router: RunningRouter, request: pytest.FixtureRequest) -> str:
    """As vLLM, which speaks three APIs itself, and as a server that speaks OpenAI's chat only."""
    name: str = request.param
    await router.backend(URL, "real", engine=name, models=(MODEL,), max_concurrent=2)
    return name


@pytest.fixture
async def backend(router: RunningRouter) -> int:
    return await router.backend(URL, "real", models=(MODEL,), max_concurrent=2)


@pytest.fixture
async def client(router: RunningRouter) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{router.url}/v1", api_key=router.key, max_retries=0) as made:
        yield made


@pytest.fixture
async def anthropic_client(router: RunningRouter) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=router.url, api_key=router.key, max_retries=0) as made:
        yield made


async def observed(when: Callable[[Observation], bool] = lambda seen: True) -> Observation:
    """What a poll tells, as soon as it is so."""
    async with asyncio.timeout(60):
        while True:
            result = await probe(Target(base_url=URL, total_seconds=30))
            assert (result.reachable, result.error, result.engine) == (True, "", "vllm")
            assert result.observation is not None
            if when(result.observation):
                return result.observation


async def is_recorded(router: RunningRouter, output_tokens: int, count: int = 1) -> None:
    """Every answer was whole, and counted by the backend."""
    records = await router.records()
    assert [r.outcome for r in records] == ["completed"] * count
    assert [r.completion_tokens for r in records] == [output_tokens] * count
    assert not any(r.usage_estimated for r in records)
    assert all((r.prompt_tokens or 0) > 10 for r in records)


# ---- polls


async def test_it_is_known_for_vllm_and_tells_what_it_serves() -> None:
    seen = await observed(lambda seen: (seen.running, seen.waiting) == (0, 0))
    assert seen.models is not None
    model = seen.models[0]
    assert (model.name, model.context_length) == (MODEL, 2048)
    assert (model.json, model.embeddings, model.rerank) == (True, False, False)
    assert (model.vision, model.tools) == (None, None)
    assert seen.loaded is not None
    assert MODEL in seen.loaded
    assert seen.kv_use == 0.0
    assert seen.sleeping is False
    assert seen.version


async def test_its_page_of_metrics_tells_what_runs_and_what_waits(
    router: RunningRouter, client: AsyncOpenAI
) -> None:
    """Two slots, four requests: the router was told that there are four."""
    await router.backend(URL, "real", models=(MODEL,), max_concurrent=4)
    ask: Any = {"model": MODEL, "messages": STORY, "max_tokens": 1500, "stream": True}
    streams = [await client.chat.completions.create(**ask) for _ in range(2)]
    late = [asyncio.create_task(client.chat.completions.create(**ask)) for _ in range(2)]
    seen = await observed(lambda seen: (seen.running, seen.waiting) == (2, 2))
    assert seen.kv_use is not None
    assert seen.kv_use > 0
    for task in late:
        task.cancel()
    for stream in streams:
        await stream.close()
    await observed(lambda seen: (seen.running, seen.waiting) == (0, 0))
    records = await router.records()
    assert [r.reason for r in records] == ["client_disconnected"] * 4


# ---- OpenAI's API


async def test_chat_whole_and_streamed(
    router: RunningRouter, engine: str, client: AsyncOpenAI
) -> None:
    fields: Any = {"model": MODEL, "messages": COUNT, "max_tokens": 6, "temperature": 0}
    whole = await client.chat.completions.create(**fields)
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    ]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.usage.completion_tokens for c in chunks if c.usage] == [6]
    await is_recorded(router, 6, 2)


async def test_usage_is_billed_though_the_client_did_not_ask_for_it(
    router: RunningRouter, backend: int, client: AsyncOpenAI
) -> None:
    fields: Any = {"model": MODEL, "messages": COUNT, "max_tokens": 6, "temperature": 0}
    chunks = [c async for c in await client.chat.completions.create(**fields, stream=True)]
    assert not any(chunk.usage or not chunk.choices for chunk in chunks)
    await is_recorded(router, 6)


async def test_a_prompt_that_it_has_in_its_cache_is_told(
    router: RunningRouter, backend: int, client: AsyncOpenAI
) -> None:
    """It keeps whole blocks of 128 tokens; it needs ``--enable-prompt-tokens-details``."""
    long: Any = [{"role": "user", "content": "Repeat: " + "one two three four " * 80}]
    for _ in range(2):
        await client.chat.completions.create(model=MODEL, messages=long, max_tokens=1)
    first, second = await router.records()
    assert (second.cached_tokens or 0) % 128 == 0
    assert 0 < (second.cached_tokens or 0) < (second.prompt_tokens or 0)
    assert first.prompt_tokens == second.prompt_tokens


async def test_completions_and_a_schema(backend: int, client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="One, two,", max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    schema: Any = {
        "type": "json_schema",
        "json_schema": {"name": "age", "strict": True, "schema": AGE_SCHEMA},
    }
    held = await client.chat.completions.create(
        model=MODEL, messages=ASK_AGE, response_format=schema, max_tokens=60
    )
    assert isinstance(json.loads(held.choices[0].message.content or "")["age"], int)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_named_tool_is_called(
    router: RunningRouter, engine: str, client: AsyncOpenAI, stream: bool
) -> None:
    fields: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "The weather in Paris?"}],
        "tools": [
            {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_SCHEMA}}
        ],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 60,
        "temperature": 0,
    }
    if stream:
        async with client.chat.completions.stream(**fields) as events:
            answer: Any = await events.get_final_completion()
    else:
        answer = await client.chat.completions.create(**fields)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    json.loads(call.function.arguments)  # the small model does not always write an object
    assert (await router.record()).outcome == "completed"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": [{"role": "user", "content": "a " * 4000}]}, "maximum context length"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": DATA_URL}}],
                    }
                ]
            },
            "multimodal",
        ),
        ({"messages": COUNT, "temperature": -1.0}, "temperature"),
        ({"messages": COUNT, "n": 0}, "'n' must be at least 1"),
    ],
    ids=["too long", "an image", "a wrong number", "no answers"],
)
async def test_its_refusals_reach_the_client_in_openais_form_and_mark_nothing(
    router: RunningRouter, backend: int, client: AsyncOpenAI, fields: Any, told: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=told) as refused:
        await client.chat.completions.create(model=MODEL, max_tokens=5, **fields)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.code is None or isinstance(refused.value.code, str)
    assert router.state_of(backend) != "failed"
    record = await router.record()
    assert (record.status, record.charged_tokens) == (400, 0)


async def test_embeddings_of_a_model_that_chats_are_refused_in_openais_form(
    router: RunningRouter, backend: int, client: AsyncOpenAI
) -> None:
    """It has no such path, and says so in FastAPI's form. Once polled, it is not even asked."""
    with pytest.raises(openai.NotFoundError) as refused:
        await client.embeddings.create(model=MODEL, input="a")
    assert refused.value.code == "capability_missing"
    assert router.state_of(backend) != "failed"


async def test_leaving_stops_it(router: RunningRouter, backend: int, client: AsyncOpenAI) -> None:
    events = await client.chat.completions.create(
        model=MODEL, messages=STORY, max_tokens=1500, stream=True
    )
    await anext(events)
    await observed(lambda seen: seen.running == 1)
    await events.close()
    await observed(lambda seen: seen.running == 0)
    assert (await router.record()).reason == "client_disconnected"


async def test_responses_whole_and_streamed(
    router: RunningRouter, engine: str, client: AsyncOpenAI
) -> None:
    fields: Any = {"model": MODEL, "input": COUNT, "temperature": 0, "max_output_tokens": 16}
    whole = await client.responses.create(**fields)
    async with client.responses.stream(**fields) as events:
        kinds = []
        text = ""
        async for event in events:
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == whole.output_text
    assert kinds[0] == "response.created"
    # vLLM ends with this event whatever the status in it, which is "incomplete" here.
    assert kinds[-1] == ("response.completed" if engine == "vllm" else "response.incomplete")
    await is_recorded(router, 16, 2)


# ---- the others


async def test_anthropic_whole_and_streamed(
    router: RunningRouter, engine: str, anthropic_client: AsyncAnthropic
) -> None:
    cold = {"temperature": 0}
    fields: Any = {"model": MODEL, "messages": COUNT, "max_tokens": 6, "extra_body": cold}
    whole: Any = await anthropic_client.messages.create(**fields)
    async with anthropic_client.messages.stream(**fields) as stream:
        text = "".join([part async for part in stream.text_stream])
    assert text == whole.content[0].text
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 6)
    await is_recorded(router, 6, 2)


async def test_anthropic_counts_tokens(backend: int, anthropic_client: AsyncAnthropic) -> None:
    counted = await anthropic_client.messages.count_tokens(model=MODEL, messages=COUNT)
    message: Any = await anthropic_client.messages.create(model=MODEL, messages=COUNT, max_tokens=1)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_a_refusal_in_anthropics_form(engine: str, anthropic_client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        await anthropic_client.messages.create(
            model=MODEL, messages=[{"role": "user", "content": "a " * 4000}], max_tokens=5
        )
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")


async def test_ollama_whole_and_streamed(router: RunningRouter, backend: int) -> None:
    client = ollama.AsyncClient(router.url, headers={"Authorization": f"Bearer {router.key}"})
    options = {"num_predict": 6, "temperature": 0}
    whole = await client.chat(MODEL, COUNT, options=options)
    parts = [p async for p in await client.chat(MODEL, COUNT, options=options, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 6)
    await is_recorded(router, 6, 2)
