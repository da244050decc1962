"""Backends that speak a client's own dialect: passed through, watched, and what goes wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mindrouter.gateway import translating
from mindrouter.gateway.events import split_events
from tests.gateway.dialect_requests import REQUESTS, lines_of
from tests.gateway.dialects.wire import sample
from tests.running import HELLO, RunningRouter
from tests.stubs.openai_stub import OpenAIStub, refuse, respond, stream

JSON = ("Content-Type", "application/json")
EVENTS_OF_A_MESSAGE = split_events(sample("llamacpp-messages-stream.sse"))
OLLAMA_LINES = (
    b'{"model":"m","message":{"role":"assistant","content":"Hel"},"done":false}',
    b'{"model":"m","message":{"role":"assistant","content":"lo"},"done":false}',
    b'{"model":"m","message":{"role":"assistant","content":""},"done":true,"done_reason":"stop",'
    b'"prompt_eval_count":26,"eval_count":2}',
)


@pytest.fixture(autouse=True)
def _nothing_is_known_to_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translating, "_lacking", {})


@pytest.mark.parametrize(
    ("engine", "path", "name", "usage"),
    [
        ("llamacpp", "/v1/messages", "llamacpp-messages", (32, 8)),
        ("vllm", "/anthropic/v1/messages", "vllm-messages", (32, 6)),
        ("llamacpp", "/v1/responses", "llamacpp-responses", None),
        ("vllm", "/v1/responses", "vllm-responses", (32, 6)),
    ],
)
async def test_a_whole_answer_passes_as_it_came(
    router: RunningRouter,
    stub: OpenAIStub,
    engine: str,
    path: str,
    name: str,
    usage: tuple[int, int] | None,
) -> None:
    await router.backend(stub, "a", engine=engine)
    answer = sample(f"{name}.json")
    stub.then(respond(200, answer, JSON))
    request = REQUESTS[path] | {"brand_new_field": [1.0, {"x": None}]}
    response = await router.client.post(path, json=request)
    assert response.content == answer
    (call,) = stub.calls
    assert call.path == path.removeprefix("/anthropic")
    assert call.body == request
    record = await router.record()
    assert record.outcome == "completed"
    assert not record.usage_estimated
    if usage:
        assert (record.prompt_tokens, record.completion_tokens) == usage


@pytest.mark.parametrize(
    ("engine", "path", "name", "output"),
    [
        ("llamacpp", "/v1/messages", "llamacpp-messages-stream", 4),
        ("vllm", "/v1/messages", "vllm-messages-stream", 3),
    ],
)
async def test_a_stream_of_events_passes_as_it_came(
    router: RunningRouter, stub: OpenAIStub, engine: str, path: str, name: str, output: int
) -> None:
    await router.backend(stub, "a", engine=engine)
    events = sample(f"{name}.sse")
    stub.then(stream(events[:100], events[100:700], events[700:]))
    response = await router.client.post(path, json=REQUESTS[path] | {"stream": True})
    assert response.content.rstrip() == events.rstrip()
    record = await router.record()
    assert (record.outcome, record.completion_tokens) == ("completed", output)
    assert record.prompt_tokens == 32


async def test_llamacpps_stream_of_a_response_is_translated_since_packages_cannot_read_its_own(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, "a", engine="llamacpp")
    request = REQUESTS["/v1/responses"] | {"stream": True}
    response = await router.client.post("/v1/responses", json=request)
    assert stub.calls[0].path == "/v1/chat/completions"
    assert '"output_index":0' in response.text


async def test_ollamas_lines_pass_as_they_came(router: RunningRouter, stub: OpenAIStub) -> None:
    await router.backend(stub, "a", engine="ollama")
    stub.then(lines_of(*OLLAMA_LINES))
    response = await router.client.post("/api/chat", json=REQUESTS["/api/chat"])
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.content == b"".join(line + b"\n" for line in OLLAMA_LINES)
    assert stub.calls[0].path == "/api/chat"
    record = await router.record()
    assert (record.prompt_tokens, record.completion_tokens) == (26, 2)


async def test_ollamas_only_line_to_a_request_for_a_stream_passes(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    """It answers requests to load a model so, whatever "stream" says."""
    await router.backend(stub, "a", engine="ollama")
    answer = b'{"model":"m","response":"","done":true,"done_reason":"load"}'
    stub.then(respond(200, answer, JSON))
    response = await router.client.post("/api/generate", json={"model": "m"})
    assert response.content == answer


async def test_a_native_count_of_tokens_is_the_backends_and_free(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, "a", engine="vllm")
    stub.then(respond(200, b'{"input_tokens":36}', JSON))
    path = "/v1/messages/count_tokens"
    response = await router.client.post(path, json=REQUESTS[path])
    assert response.json() == {"input_tokens": 36}
    assert (await router.record()).charged_tokens == 0


async def test_the_model_is_named_as_the_backend_names_it(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, "a", engine="ollama", models=("llama3.2:latest",))
    stub.then(lines_of(*OLLAMA_LINES))
    await router.client.post("/api/chat", json={"model": "llama3.2", "messages": HELLO})
    assert stub.calls[0].body["model"] == "llama3.2:latest"


# ---- what goes wrong


@pytest.mark.parametrize(
    "lacks",
    [
        respond(404, b'{"detail":"Not Found"}', JSON),
        respond(404, b"404 page not found", ("Content-Type", "text/plain")),
        respond(405, b'{"detail":"Method Not Allowed"}', JSON),
    ],
    ids=["fastapi", "go", "method"],
)
async def test_a_backend_that_lacks_the_address_gets_the_translation_from_then_on(
    router: RunningRouter, stub: OpenAIStub, lacks: Any
) -> None:
    await router.backend(stub, "a", engine="vllm")
    stub.then(lacks)
    for _ in range(2):
        response = await router.client.post("/v1/messages", json=REQUESTS["/v1/messages"])
        assert response.json()["content"] == [{"type": "text", "text": "Hello, world"}]
    paths = [call.path for call in stub.calls]
    assert paths == ["/v1/messages", "/v1/chat/completions", "/v1/chat/completions"]
    assert [len(record.attempts) for record in await router.records()] == [1, 1]


async def test_a_model_that_a_backend_does_not_know_is_no_lacking_address(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, "a", engine="vllm")
    stub.then(refuse(404, "The model `m` does not exist."))
    response = await router.client.post("/v1/messages", json=REQUESTS["/v1/messages"])
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"
    assert len(stub.calls) == 1


@pytest.mark.parametrize(
    ("engine", "path", "told", "error"),
    [
        (
            "llamacpp",
            "/v1/messages",
            stream(
                *EVENTS_OF_A_MESSAGE[:3],
                b'event: error\ndata: {"type":"error","error":{"message":"broke"}}\n\n',
            ),
            b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"broke"}',
        ),
        (
            "ollama",
            "/api/chat",
            lines_of(OLLAMA_LINES[0], b'{"error":"broke"}'),
            b'{"error":"broke"}\n',
        ),
        (
            "ollama",
            "/api/chat",
            lines_of(OLLAMA_LINES[0]),
            b'{"error":"Backend a ended the stream before it was finished."}\n',
        ),
        (
            "ollama",
            "/api/chat",
            lines_of(OLLAMA_LINES[0], end=False),
            b'{"error":"Backend a: ',
        ),
    ],
    ids=["messages error", "ollama error", "ollama early end", "ollama torn"],
)
async def test_a_native_stream_that_fails_ends_with_an_error_in_its_form(
    router: RunningRouter, stub: OpenAIStub, engine: str, path: str, told: Any, error: bytes
) -> None:
    await router.backend(stub, "a", engine=engine)
    stub.then(told)
    response = await router.client.post(path, json=REQUESTS[path] | {"stream": True})
    assert response.status_code == 200
    assert error in response.content
    assert (await router.record()).outcome == "failed"


async def test_a_native_stream_whose_first_line_is_an_error_is_answered_with_its_status(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, "a", engine="ollama")
    stub.then(lines_of(b'{"error":"no memory"}'))
    response = await router.client.post("/api/chat", json=REQUESTS["/api/chat"])
    assert (response.status_code, response.json()) == (502, {"error": "no memory"})


async def test_an_error_of_ollamas_keeps_its_status_and_words(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, "a", engine="ollama")
    stub.then(respond(400, json.dumps({"error": "bad option"}).encode(), JSON))
    response = await router.client.post("/api/chat", json=REQUESTS["/api/chat"])
    assert (response.status_code, response.json()) == (400, {"error": "bad option"})


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_web_page_is_tried_elsewhere(
    router: RunningRouter, stub: OpenAIStub, path: str
) -> None:
    await router.backend(stub, "a", engine="vllm", priority=100)
    stub.then(respond(200, b"<html>", ("Content-Type", "text/html")))
    async with await OpenAIStub.start() as other:
        await router.backend(other, "b", engine="sglang")
        response = await router.client.post(path, json=REQUESTS[path])
    assert response.status_code == 200
    assert response.headers["x-mindrouter-backend"] == "b"
