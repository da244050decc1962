"""Answers of servers that rerank, hear, speak, draw or judge, for an ``OpenAIStub``.

Forms are those of vLLM (rerank, score, transcriptions), of llama.cpp (rerank) and of OpenAI's API
reference (the rest).
"""

from __future__ import annotations

import base64
from typing import Any

from tests.stubs.openai_stub import EVENT_STREAM, Behaviour, Call, sse

JSON = ("Content-Type", "application/json")
#: The beginning of a real MP3 frame and of a PNG, and bytes that are no text in any encoding.
SOUND = b"\xff\xfb\x90\x44\x00" + bytes(range(256)) * 40
PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8
SAID = "I see skies of blue and clouds of white"
SRT = "1\n00:00:00,000 --> 00:00:04,000\nI see skies of blue\n\n"

NOT_FOUND = b'{"detail":"Not Found"}'


async def vllm_without_the_path(call: Call) -> None:
    await call.connection.respond(404, NOT_FOUND, [JSON])


async def llamacpp_without_reranking(call: Call) -> None:
    message = "This server does not support reranking. Start it with `--reranking`"
    await call.json(
        {"error": {"code": 501, "message": message, "type": "not_supported_error"}}, 501
    )


def reranks(usage: dict[str, Any]) -> Behaviour:
    """As vLLM: all documents, the best first, with their texts."""

    async def behave(call: Call) -> None:
        documents = call.body["documents"]
        results = [
            {"index": i, "document": {"text": text}, "relevance_score": 0.5**rank}
            for rank, (i, text) in enumerate(reversed(list(enumerate(documents))))
        ]
        document = {"id": "rerank-1", "model": call.body["model"], "results": results}
        await call.json(document | ({"usage": usage} if usage else {}))

    return behave


async def scores(call: Call) -> None:
    rows = call.body["text_2"] if isinstance(call.body["text_2"], list) else [call.body["text_2"]]
    data = [{"index": i, "object": "score", "score": 1.0 / (i + 1)} for i in range(len(rows))]
    usage = {"prompt_tokens": 15, "total_tokens": 15, "completion_tokens": 0}
    document = {"id": "score-1", "object": "list", "created": 1, "model": call.body["model"]}
    await call.json(document | {"data": data, "usage": usage})


async def judges(call: Call) -> None:
    """OpenAI's own has no usage."""
    given = call.body["input"]
    result = {
        "flagged": True,
        "categories": {"violence": True},
        "category_scores": {"violence": 0.99},
        "category_applied_input_types": {"violence": ["text"]},
    }
    count = len(given) if isinstance(given, list) else 1
    await call.json({"id": "modr-1", "model": call.body["model"], "results": [result] * count})


def transcribes(usage: Any = None, **more: Any) -> Behaviour:
    """JSON with whatever usage, or the text in the other formats."""

    async def behave(call: Call) -> None:
        wanted = call.form.get("response_format", b"json").decode()
        kinds = {"text": "text/plain; charset=utf-8", "srt": "text/plain", "vtt": "text/vtt"}
        if wanted in kinds:
            body = SRT.encode() if wanted == "srt" else SAID.encode()
            await call.connection.respond(200, body, [("Content-Type", kinds[wanted])])
        else:
            await call.json({"text": SAID} | ({"usage": usage} if usage else {}) | more)

    return behave


TYPED_EVENTS = [
    sse({"type": "transcript.text.delta", "delta": "I see "}),
    sse({"type": "transcript.text.delta", "delta": "skies"}),
    sse(
        {
            "type": "transcript.text.done",
            "text": "I see skies",
            "usage": {
                "type": "tokens",
                "input_tokens": 14,
                "input_token_details": {"text_tokens": 0, "audio_tokens": 14},
                "output_tokens": 45,
                "total_tokens": 59,
            },
        }
    ),
]
#: vLLM's look like a chat's.
CHAT_EVENTS = [
    *(
        sse(
            {
                "id": "trsc-1",
                "object": "transcription.chunk",
                "created": 1,
                "model": "m",
                "choices": [{"delta": {"content": word}, "finish_reason": end}],
            }
        )
        for word, end in (("I see ", None), ("skies", None), ("", "stop"))
    ),
    b"data: [DONE]\n\n",
]


def streams(events: list[bytes], *, end: bool = True) -> Behaviour:
    async def behave(call: Call) -> None:
        await call.connection.start_chunked(200, EVENT_STREAM)
        for event in events:
            await call.connection.chunk(event)
        if end:
            await call.connection.end_chunked()
        else:
            call.connection.close()

    return behave


async def speaks(call: Call) -> None:
    """Audio in chunks, as it is made."""
    parts = [SOUND[at : at + 1000] for at in range(0, len(SOUND), 1000)]
    await call.connection.stream(parts, [("Content-Type", "audio/mpeg")])


def draws(usage: dict[str, Any] | None = None, *, size: int = 0) -> Behaviour:
    """Images in base64, the first of at least ``size`` bytes."""

    async def behave(call: Call) -> None:
        count = int(call.body.get("n", 1) if call.body else call.form.get("n", b"1"))
        picture = base64.b64encode(PICTURE + bytes(size)).decode()
        document = {"created": 1, "data": [{"b64_json": picture}] * count}
        await call.json(document | ({"usage": usage} if usage else {}))

    return behave
