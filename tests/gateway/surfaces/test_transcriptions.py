"""``/v1/audio/transcriptions`` and ``translations``, by OpenAI's package."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from accounts.models import ApiKey
from backends.models import Alias, BackendModel
from tests.running import RunningRouter
from tests.stubs.openai_stub import OpenAIStub, refuse, sse
from tests.stubs.surfaces import (
    CHAT_EVENTS,
    SAID,
    SRT,
    TYPED_EVENTS,
    streams,
    transcribes,
    vllm_without_the_path,
)

#: Two seconds, of those of which nothing is known; with every line end that a form might misread.
AUDIO = (b"RIFF\r\n--x\r\n\r\n--\r\n" + bytes(range(256)) * 200)[:32_000]
FILE: Any = ("a.wav", AUDIO)


async def test_json_passes_unchanged_and_costs_the_tokens_that_are_told(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    usage = {"type": "tokens", "input_tokens": 14, "output_tokens": 45, "total_tokens": 59}
    stub.then(transcribes(usage))
    answer = await client.audio.transcriptions.create(
        model="m", file=FILE, language="en", temperature=0.5, prompt="Louis"
    )
    assert answer.text == SAID
    form = stub.calls[0].form
    assert form["file"] == AUDIO
    assert (form["model"], form["language"], form["temperature"]) == (b"m", b"en", b"0.5")
    assert stub.calls[0].path == "/v1/audio/transcriptions"
    record = await router.record()
    assert (record.endpoint, record.outcome) == ("audio.transcriptions", "completed")
    assert (record.prompt_tokens, record.completion_tokens) == (14, 45)
    assert record.usage_estimated is False


@pytest.mark.parametrize(
    ("answer", "prompt"),
    [
        (transcribes(), 2 * 50),  # by its bytes
        (transcribes({"type": "duration", "seconds": 3}), 150),
        (transcribes({"type": "duration", "seconds": "3"}), 150),  # vLLM writes a text
        (transcribes(duration=4.5, language="english", segments=[]), 225),  # verbose_json
    ],
)
async def test_audio_costs_its_seconds_as_far_as_they_are_known(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub, answer: Any, prompt: int
) -> None:
    stub.then(answer)
    await client.audio.transcriptions.create(model="m", file=FILE)
    record = await router.record()
    # 38 letters are said: 10 tokens
    assert (record.prompt_tokens, record.completion_tokens) == (prompt, 10)
    assert record.usage_estimated is True
    assert record.charged_tokens == prompt + 10


@pytest.mark.parametrize(
    ("wanted", "said", "kind"),
    [
        ("text", SAID, "text/plain; charset=utf-8"),
        ("srt", SRT, "text/plain"),
        ("vtt", SAID, "text/vtt"),
    ],
)
async def test_texts_and_subtitles_pass_unchanged(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub, wanted: Any, said: str, kind: str
) -> None:
    stub.then(transcribes())
    raw = await client.audio.transcriptions.with_raw_response.create(
        model="m", file=FILE, response_format=wanted
    )
    assert raw.http_response.text == said
    assert raw.headers["content-type"] == kind
    record = await router.record()
    assert (record.outcome, record.usage_estimated) == ("completed", True)
    assert record.completion_tokens == (10 if said == SAID else 13)  # 51 letters


async def test_a_stream_of_typed_events_has_its_usage_from_the_last(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(streams(TYPED_EVENTS))
    events = await client.audio.transcriptions.create(model="m", file=FILE, stream=True)
    kinds = [event.type async for event in events]
    assert kinds == ["transcript.text.delta", "transcript.text.delta", "transcript.text.done"]
    assert stub.calls[0].form["stream"] == b"true"
    record = await router.record()
    assert (record.stream, record.outcome) == (True, "completed")
    assert (record.prompt_tokens, record.completion_tokens) == (14, 45)
    assert record.usage_estimated is False


async def test_a_stream_like_a_chats_passes_unchanged(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(streams(CHAT_EVENTS))
    answer = await router.client.post(
        "/v1/audio/transcriptions", data={"model": "m", "stream": "true"}, files={"file": FILE}
    )
    assert answer.content == b"".join(CHAT_EVENTS)
    record = await router.record()
    assert (record.outcome, record.completion_tokens) == ("completed", 3)
    assert (record.prompt_tokens, record.usage_estimated) == (100, True)


async def test_a_stream_that_breaks_off_ends_with_an_error(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(streams(TYPED_EVENTS[:1], end=False))
    with pytest.raises(openai.APIError, match="Backend a"):
        async for _ in await client.audio.transcriptions.create(model="m", file=FILE, stream=True):
            pass
    assert (await router.record()).outcome == "failed"


async def test_an_error_in_a_stream_is_the_backends_words(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    broken = sse({"error": {"message": "the audio is too noisy", "code": 500}})
    stub.then(streams([*TYPED_EVENTS[:1], broken]))
    with pytest.raises(openai.APIError, match="too noisy"):
        async for _ in await client.audio.transcriptions.create(model="m", file=FILE, stream=True):
            pass


@pytest.mark.parametrize("name", ["h", "m", "hearing-impaired/whisper-größe"])
async def test_an_alias_is_rewritten_wherever_the_model_stands(
    router: RunningRouter, stub: OpenAIStub, name: str
) -> None:
    if name != "m":
        await router.change(Alias.objects.create, name=name, targets=["m"])
    for fields in (
        [("model", (None, name)), ("file", FILE), ("prompt", (None, "x"))],
        [("file", FILE), ("prompt", (None, "x")), ("model", (None, name))],
    ):
        stub.then(transcribes())
        answer = await router.client.post("/v1/audio/transcriptions", files=fields)
        assert answer.status_code == 200
        form = stub.calls[-1].form
        assert form == {"model": b"m", "file": AUDIO, "prompt": b"x"}
        assert list(form) == [field for field, _ in fields]


@pytest.mark.filterwarnings("ignore:deprecated")
async def test_translations(client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub) -> None:
    stub.then(transcribes())
    assert (await client.audio.translations.create(model="m", file=FILE)).text == SAID
    assert stub.calls[0].path == "/v1/audio/translations"
    assert (await router.record()).endpoint == "audio.translations"


async def test_a_failed_attempt_is_made_again_elsewhere_with_the_same_form(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    large: Any = ("a.wav", AUDIO * 100)  # goes to a file
    async with await OpenAIStub.start() as other:
        await router.backend(other, "b", priority=-100)
        stub.then(refuse(503, "loading", [("Retry-After", "30")]))
        other.then(transcribes())
        await client.audio.transcriptions.create(model="m", file=large)
        assert other.calls[0].form["file"] == stub.calls[0].form["file"] == AUDIO * 100
    record = await router.record()
    assert [attempt["status"] for attempt in record.attempts] == [503, 200]


async def test_an_end_user_may_be_named_in_the_form(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.change(lambda: ApiKey.objects.update(may_name_end_user=True))
    stub.then(transcribes())
    fields = {"model": "m", "user": "eve"}
    await router.client.post("/v1/audio/transcriptions", data=fields, files={"file": FILE})
    assert (await router.record()).end_user == "eve"


async def test_where_no_backend_can_it_is_refused(
    client: AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(vllm_without_the_path)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.audio.transcriptions.create(model="m", file=FILE)
    assert refused.value.code == "capability_missing"
    await router.change(lambda: BackendModel.objects.update(transcription=False))
    with pytest.raises(openai.BadRequestError, match="does not transcribe"):
        await client.audio.transcriptions.create(model="m", file=FILE)
    with pytest.raises(openai.NotFoundError):
        await client.audio.transcriptions.create(model="x", file=FILE)
    assert len(stub.calls) == 1
