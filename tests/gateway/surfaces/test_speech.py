"""``/v1/audio/speech``, by OpenAI's package."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from backends.models import Alias, BackendModel
from tests.running import RunningRouter, until
from tests.stubs.openai_stub import Call, OpenAIStub, refuse, respond, sse
from tests.stubs.surfaces import SOUND, speaks, streams, vllm_without_the_path

SOUND_HEAD = ("Content-Type", "audio/mpeg")


async def test_audio_passes_unchanged_and_costs_what_the_text_takes_to_say(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(speaks)
    answer = await client.audio.speech.create(model="m", voice="alloy", input="a" * 60, speed=1.5)
    assert answer.content == SOUND
    assert answer.response.headers["content-type"] == "audio/mpeg"
    asked = {"model": "m", "voice": "alloy", "input": "a" * 60, "speed": 1.5}
    assert stub.calls[0].body == asked
    record = await router.record()
    assert (record.endpoint, record.outcome, record.stream) == ("audio.speech", "completed", False)
    # 60 letters: 15 tokens, and 4 seconds of 50 tokens
    assert (record.prompt_tokens, record.completion_tokens) == (15, 200)
    assert record.usage_estimated is True


async def test_audio_is_passed_on_while_it_is_made(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    heard = asyncio.Event()

    async def slowly(call: Call) -> None:
        await call.connection.start_chunked(200, [SOUND_HEAD])
        await call.connection.chunk(SOUND[:100])
        await heard.wait()
        await call.connection.chunk(SOUND[100:])
        await call.connection.end_chunked()

    stub.then(slowly)
    asked: Any = client.audio.speech.with_streaming_response.create(
        model="m", voice="alloy", input="Hello"
    )
    async with asked as answer:
        parts = answer.iter_bytes()
        first = await anext(parts)
        assert first == SOUND[:100]
        heard.set()
        assert b"".join([first, *[part async for part in parts]]) == SOUND
    assert (await router.record()).outcome == "completed"


async def test_speech_as_events_has_its_usage_from_the_last_of_them(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    usage = {"input_tokens": 14, "output_tokens": 101, "total_tokens": 115}
    events = [
        sse({"type": "speech.audio.delta", "audio": "AAAA"}),
        sse({"type": "speech.audio.done", "usage": usage}),
    ]
    stub.then(streams(events))
    asked = {"model": "m", "voice": "alloy", "input": "Hello", "stream_format": "sse"}
    answer = await router.client.post("/v1/audio/speech", json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.content == b"".join(events)
    assert stub.calls[0].body == asked
    record = await router.record()
    assert (record.stream, record.outcome) == (True, "completed")
    assert (record.prompt_tokens, record.completion_tokens) == (14, 101)
    assert record.usage_estimated is False


async def test_an_alias_is_rewritten_and_a_listener_who_leaves_stops_the_backend(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    async def endless(call: Call) -> None:
        await call.connection.start_chunked(200, [SOUND_HEAD])
        while True:
            await call.connection.chunk(bytes(16_000))
            await asyncio.sleep(0.01)

    await router.change(Alias.objects.create, name="voice", targets=["m"])
    stub.then(endless)
    asked: Any = client.audio.speech.with_streaming_response.create(
        model="voice", voice="alloy", input="a" * 1500
    )
    async with asked as answer:
        await anext(answer.iter_bytes())
    await asyncio.wait_for(stub.calls[0].ended.wait(), 60)
    assert stub.calls[0].body["model"] == "m"
    record = await router.record()
    assert (record.outcome, record.reason) == ("cancelled", "client_disconnected")
    # It pays for what it has had, and for no more than the whole: 100 seconds of 50 tokens.
    assert 0 < record.completion_tokens <= 5000


async def test_a_listener_who_takes_nothing_holds_the_backend_up(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    sent = 0

    async def endless(call: Call) -> None:
        nonlocal sent
        await call.connection.start_chunked(200, [SOUND_HEAD])
        while True:
            await call.connection.chunk(bytes(100_000))
            sent += 100_000

    stub.then(endless)
    async with await router.raw() as raw:
        raw.writer.transport.pause_reading()
        raw.post({"model": "m", "input": "Hello", "voice": "alloy"}, path="/v1/audio/speech")
        before = -1
        while sent == 0 or sent != before:  # the kernel's buffers fill, and then nothing more goes
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 30_000_000
        raw.reset()
    assert (await router.record()).outcome == "cancelled"


async def test_half_an_answer_is_never_ended_cleanly(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    async def breaks_off(call: Call) -> None:
        await call.connection.start_chunked(200, [SOUND_HEAD])
        await call.connection.chunk(SOUND)
        call.connection.close()

    stub.then(breaks_off)
    with pytest.raises(openai.APIConnectionError):
        await client.audio.speech.create(model="m", voice="alloy", input="Hello")
    record = await router.record()
    assert (record.outcome, record.reason) == ("failed", "upstream_ended_early")


@pytest.mark.parametrize(
    "bad",
    [
        refuse(500, "no voice today"),
        respond(200, b"<html>", ("Content-Type", "text/html")),
        respond(200, b"", SOUND_HEAD),
        respond(200, b'{"error":{"message":"no"}}', ("Content-Type", "application/json")),
        vllm_without_the_path,
    ],
)
async def test_before_the_first_byte_another_backend_is_tried(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub, bad: Any
) -> None:
    async with await OpenAIStub.start() as other:
        await router.backend(other, "b", priority=-100)
        stub.then(bad)
        other.then(speaks)
        answer = await client.audio.speech.create(model="m", voice="alloy", input="Hello")
        assert answer.content == SOUND
    record = await router.record()
    assert [attempt["backend"] for attempt in record.attempts] == ["a", "b"]


async def test_refusals(client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub) -> None:
    with pytest.raises(openai.BadRequestError) as missing:
        await client.audio.speech.create(model="m", voice="alloy", input="")
    assert missing.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        await client.audio.speech.create(model="x", voice="alloy", input="Hello")
    await router.change(lambda: BackendModel.objects.update(speech=False))
    with pytest.raises(openai.BadRequestError, match="does not speak") as unable:
        await client.audio.speech.create(model="m", voice="alloy", input="Hello")
    assert unable.value.code == "capability_missing"
    assert stub.calls == []
    await until(lambda: not router.runtime.serving)
