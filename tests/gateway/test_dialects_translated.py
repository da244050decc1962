"""Anthropic's, Ollama's and the Responses API before backends that speak OpenAI's form only."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.dialect_requests import LAST_WORDS, REQUESTS, STREAMING, TEXT_OF, breaks_off
from tests.running import HELLO, RunningRouter
from tests.stubs.openai_stub import OpenAIStub, held, refuse, respond, stream


@pytest.fixture
async def plain(router: RunningRouter, stub: OpenAIStub) -> int:
    """A backend of an engine that speaks nothing but OpenAI's form."""
    return await router.backend(stub, "a", engine="sglang")


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("path", STREAMING)
async def test_a_whole_answer_comes_in_the_clients_form(
    router: RunningRouter, stub: OpenAIStub, path: str
) -> None:
    response = await router.client.post(path, json=REQUESTS[path] | {"stream": False})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-mindrouter-backend"] == "a"
    assert TEXT_OF[path](response.json()) == "Hello, world"
    (call,) = stub.calls
    assert call.path == "/v1/chat/completions"
    assert [m["content"] for m in call.body["messages"]] == ["Hello"]


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("path", STREAMING)
async def test_a_stream_comes_in_the_clients_form(
    router: RunningRouter, stub: OpenAIStub, path: str
) -> None:
    response = await router.client.post(path, json=REQUESTS[path] | {"stream": True})
    kind = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream"
    assert response.headers["content-type"].startswith(kind)
    assert LAST_WORDS[path] in response.text
    assert "data: [DONE]" not in response.text
    assert "\n\n\n" not in response.text
    if path.startswith("/api/"):  # each line is a document; a blank one would break clients
        assert all(json.loads(line) for line in response.text.splitlines())
    assert stub.calls[0].body["stream_options"] == {"include_usage": True}


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("path", sorted(REQUESTS))
async def test_everything_is_recorded_and_charged(
    router: RunningRouter, path: str, streams: bool
) -> None:
    request = REQUESTS[path] | ({"stream": streams} if path in STREAMING else {})
    assert (await router.client.post(path, json=request)).status_code == 200
    record = await router.record()
    assert (record.outcome, record.status, record.user) == ("completed", 200, "ada")
    dialect, endpoint = {
        "messages": ("anthropic", "messages"),
        "count_tokens": ("anthropic", "messages.count_tokens"),
        "responses": ("openai", "responses"),
    }.get(path.rpartition("/")[2], ("ollama", "ollama." + path.rpartition("/")[2]))
    assert (record.dialect, record.endpoint) == (dialect, endpoint)
    used = (7, 3) if path in STREAMING else (7, 0) if "embed" in path else (0, 0)
    assert (record.prompt_tokens, record.completion_tokens) == used
    assert record.charged_tokens == sum(used)
    assert not record.usage_estimated


@pytest.mark.usefixtures("plain")
async def test_tokens_are_counted_by_estimate_where_no_backend_counts(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    response = await router.client.post(
        "/v1/messages/count_tokens", json=REQUESTS["/v1/messages/count_tokens"]
    )
    assert response.json() == {"input_tokens": 6}  # 5 bytes of text and 4 for the message
    assert stub.calls == []


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("request_fields", "reason"), [({}, "load"), ({"keep_alive": 0}, "unload")]
)
async def test_a_request_to_load_a_model_is_answered_without_a_backend(
    router: RunningRouter, stub: OpenAIStub, request_fields: dict[str, Any], reason: str
) -> None:
    response = await router.client.post("/api/generate", json={"model": "m", **request_fields})
    (line,) = response.text.splitlines()
    assert (json.loads(line)["done"], json.loads(line)["done_reason"]) == (True, reason)
    assert stub.calls == []


@pytest.mark.usefixtures("plain")
async def test_hints_that_were_set_aside_are_named(router: RunningRouter) -> None:
    request = REQUESTS["/api/chat"] | {"keep_alive": "5m", "stream": False}
    response = await router.client.post("/api/chat", json=request)
    assert response.headers["x-mindrouter-not-translated"] == "keep_alive"


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/messages", {"container": "c"}, "container"),
        ("/v1/responses", {"brand_new": 3}, "brand_new"),
        ("/api/chat", {"options": {"mirostat": 1}}, "options.mirostat"),
    ],
)
async def test_what_cannot_be_translated_is_refused_by_name_before_it_waits(
    router: RunningRouter, stub: OpenAIStub, path: str, fields: dict[str, Any], name: str
) -> None:
    await router.backend(stub, "a", engine="sglang", max_concurrent=1)
    ended = asyncio.Event()
    stub.then(held(ended))
    running = asyncio.create_task(router.chat())
    await stub.until_calls(1)
    async with asyncio.timeout(20):  # the only slot is taken
        response = await router.client.post(path, json=REQUESTS[path] | fields)
    assert response.status_code == 400
    assert name in response.text
    assert response.headers["x-should-retry"] == "false"
    ended.set()
    await running
    refused = (await router.records())[-1]
    assert (refused.outcome, refused.reason) == ("refused", "invalid_request")


async def test_what_one_backend_cannot_be_told_goes_to_one_that_speaks_the_form(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, "plain", engine="sglang", priority=100)
    speaker = await OpenAIStub.start()
    async with speaker:
        await router.backend(speaker, "speaker", engine="ollama")
        whole = {"model": "m", "message": {"role": "assistant", "content": "Hi"}, "done": True}
        speaker.then(respond(200, json.dumps(whole).encode(), ("Content-Type", "application/json")))
        request = REQUESTS["/api/chat"] | {"options": {"mirostat": 1}, "stream": False}
        response = await router.client.post("/api/chat", json=request)
    assert response.json() == whole
    assert stub.calls == []
    assert speaker.calls[0].body["options"] == {"mirostat": 1}


# ---- errors


ERROR_OF = {
    "/v1/messages": lambda d: (d["type"], d["error"]["message"]),
    "/v1/responses": lambda d: ("error", d["error"]["message"]),
    "/api/chat": lambda d: ("error", d["error"]),
}


@pytest.mark.parametrize("path", sorted(ERROR_OF))
async def test_errors_before_the_first_byte_are_in_the_clients_form(
    router: RunningRouter, stub: OpenAIStub, path: str
) -> None:
    read = ERROR_OF[path]
    unknown = await router.client.post(path, json=REQUESTS[path])
    assert (unknown.status_code, read(unknown.json())[0]) == (404, "error")
    no_key = await router.client.post(path, json={}, headers={"Authorization": "Bearer x"})
    assert (no_key.status_code, read(no_key.json())[0]) == (401, "error")
    method = await router.client.put(path)
    assert (method.status_code, read(method.json())[0]) == (405, "error")
    broken = await router.client.post(path, content=b"{")
    assert (broken.status_code, read(broken.json())[0]) == (400, "error")
    await router.backend(stub, "a", engine="sglang")
    stub.then(refuse(400, "too long"))
    refused = await router.client.post(path, json=REQUESTS[path])
    assert (refused.status_code, read(refused.json())) == (400, ("error", "too long"))
    stub.then(refuse(429, "full", [("Retry-After", "30")]))
    full = await router.client.post(path, json=REQUESTS[path])
    assert (full.status_code, full.headers["retry-after"]) == (429, "30")


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("how", ["error", "end", "reset"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/api/chat"])
async def test_a_backend_that_fails_in_the_middle_ends_the_stream_with_an_error(
    router: RunningRouter, stub: OpenAIStub, path: str, how: str
) -> None:
    stub.then(breaks_off(how=how))
    response = await router.client.post(path, json=REQUESTS[path] | {"stream": True})
    assert "Hello" in response.text
    assert LAST_WORDS[path] not in response.text
    last = response.text.strip().split("\n")[-1]
    assert "error" in json.loads(last.removeprefix("data: "))
    if path == "/v1/responses":  # its events are numbered
        numbers = [
            json.loads(line[6:])["sequence_number"]
            for line in response.text.split("\n")
            if line.startswith("data: ")
        ]
        assert numbers == list(range(len(numbers)))
    record = await router.record()
    assert record.outcome == "failed"
    assert record.charged_tokens > 0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/api/chat"])
@pytest.mark.parametrize(
    "nonsense",
    [
        respond(200, b'{"choices":[]}', ("Content-Type", "application/json")),
        stream(b"data: [1]\n\n"),
        stream(b"data: [DONE]\n\n"),
    ],
    ids=["no choices", "no completion", "nothing"],
)
async def test_nonsense_is_tried_elsewhere(
    router: RunningRouter, stub: OpenAIStub, path: str, nonsense: Any
) -> None:
    await router.backend(stub, "a", engine="sglang", priority=100)
    async with await OpenAIStub.start() as other:
        await router.backend(other, "b", engine="sglang")
        stub.then(nonsense)
        response = await router.client.post(path, json=REQUESTS[path] | {"stream": True})
    assert response.headers["x-mindrouter-backend"] == "b"
    assert LAST_WORDS[path] in response.text


@pytest.mark.usefixtures("plain")
async def test_a_client_that_leaves_a_translated_stream_frees_its_slot(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    ended = asyncio.Event()

    async def endless(call: Any) -> None:
        await call.start_stream()
        await call.role()
        await call.say("Hello")
        await call.connection.gone.wait()
        ended.set()

    stub.then(endless)
    async with await router.raw() as client:
        client.post(REQUESTS["/v1/messages"] | {"stream": True}, path="/v1/messages")
        await client.until(b"text_delta")
        client.close()
        await asyncio.wait_for(ended.wait(), 20)
    assert (await router.record()).outcome == "cancelled"
    assert router.in_flight == 0


# ---- waiting


@pytest.mark.parametrize(
    ("path", "comments"), [("/v1/messages", True), ("/v1/responses", True), ("/api/chat", False)]
)
async def test_waiting_streams_of_events_get_comments_and_lines_get_nothing(
    router: RunningRouter, stub: OpenAIStub, settings: Any, path: str, comments: bool
) -> None:
    settings.QUEUE_KEEPALIVE_AFTER = 0.05
    await router.backend(stub, "a", engine="sglang", max_concurrent=1)
    ended = asyncio.Event()
    stub.then(held(ended))
    running = asyncio.create_task(router.chat())
    await stub.until_calls(1)
    waiting = asyncio.create_task(router.client.post(path, json=REQUESTS[path] | {"stream": True}))
    await router.until_waiting(1)
    await asyncio.sleep(0.2)
    ended.set()
    await running
    response = await waiting
    assert (": queued position=1" in response.text) == comments
    assert LAST_WORDS[path] in response.text


@pytest.mark.usefixtures("plain")
async def test_the_implied_tag_is_understood_in_ollamas_api_only(router: RunningRouter) -> None:
    tagged = {"model": "m:latest", "messages": HELLO, "stream": False}
    response = await router.client.post("/api/chat", json=tagged)
    assert (response.status_code, response.json()["model"]) == (200, "m:latest")
    assert (await router.client.post("/v1/chat/completions", json=tagged)).status_code == 404
