"""Backends that lie, hang, die or answer nonsense: each costs only its own requests."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from backends.models import Backend
from tests.running import LONG, RunningRouter, events, said
from tests.stubs.openai_stub import (
    Behaviour,
    Call,
    OpenAIStub,
    held,
    ordinary,
    refuse,
    reset,
    respond,
    silent,
    sse,
    stream,
)
from tests.stubs.scripted import chunk

HTML = b"<html><body><h1>502 Bad Gateway</h1>nginx</body></html>"
WEB = ("Content-Type", "text/html")
JSON = ("Content-Type", "application/json")

both = pytest.mark.parametrize("streamed", [False, True])


@pytest.fixture
async def one(router: RunningRouter, stub: OpenAIStub) -> int:
    """A backend "a" with one slot, so that a slot that is not freed shows at once."""
    return await router.backend(stub, "a", max_concurrent=1)


@pytest.fixture
async def second(router: RunningRouter, one: int) -> AsyncIterator[OpenAIStub]:
    """Another backend "b" with the same model, which comes second."""
    await router.change(lambda: Backend.objects.update(priority=10))
    async with await OpenAIStub.start() as server:
        await router.backend(server, "b", max_concurrent=1)
        yield server


def error(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    found: dict[str, Any] = response.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    assert found["code"] == code
    return found


def error_event(text: str, code: str) -> dict[str, Any]:
    """The last event of a stream that was cut short, of which there is nothing more."""
    *before, last = events(text)
    assert last.keys() == {"error"}
    assert last["error"].keys() == {"message", "type", "param", "code"}
    assert last["error"]["code"] == code
    assert "[DONE]" not in text
    assert all(c["finish_reason"] is None for e in before for c in e["choices"])
    found: dict[str, Any] = last["error"]
    return found


# ---- B06: an answer that ends early


async def closes(call: Call) -> None:
    call.connection.close()


async def resets(call: Call) -> None:
    await asyncio.sleep(0.02)  # what was sent is to be read first
    call.connection.reset()


async def ends(call: Call) -> None:
    await call.connection.end_chunked()


@pytest.mark.parametrize("way", [closes, resets, ends])
async def test_a_stream_that_breaks_off_is_told_from_one_that_ends(
    router: RunningRouter, stub: OpenAIStub, second: OpenAIStub, way: Behaviour
) -> None:
    async def forty_of_sixty(call: Call) -> None:
        await call.start_stream()
        await call.role()
        for n in range(40):
            await call.say(f"w{n} ")
        await way(call)

    stub.then(forty_of_sixty)
    async with await router.raw() as client:
        client.post(stream=True)
        text = (await client.to_end()).decode()  # far sooner than a backend's silence is given up
    lines = "\n".join(line for line in text.split("\r\n") if line.startswith("data: "))
    assert said(lines) == "".join(f"w{n} " for n in range(40))
    error_event(lines, "upstream_ended_early")
    record = await router.record()
    assert (record.outcome, record.reason) == ("failed", "upstream_ended_early")
    assert (record.completion_tokens, record.usage_estimated) == (40, True)
    assert record.charged_tokens == record.prompt_tokens + 40
    assert record.attempts[0]["reason"] == "upstream_ended_early"
    assert second.calls == []


@pytest.mark.parametrize("way", [closes, resets])
async def test_a_small_answer_that_breaks_off_is_asked_for_again_elsewhere(
    router: RunningRouter, stub: OpenAIStub, second: OpenAIStub, way: Behaviour
) -> None:
    async def half(call: Call) -> None:
        document = json.dumps(call.document()).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        await call.connection.write(head % len(document), document[:40])
        await way(call)

    stub.then(half)
    response = await router.chat()
    assert response.json()["choices"][0]["message"]["content"] == "Hello, world"
    record = await router.record()
    assert [a["reason"] for a in record.attempts] == ["upstream_ended_early", ""]
    assert record.charged_tokens == 10


async def test_a_large_answer_that_breaks_off_breaks_the_connection(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    async def half(call: Call) -> None:
        await call.connection.start_chunked(200, [JSON])
        for _ in range(40):
            await call.connection.write(chunk(b'["' + b"x" * 65536))
        call.connection.close()

    stub.then(half)
    with pytest.raises(httpx.RemoteProtocolError):
        await router.chat()
    record = await router.record()
    assert (record.outcome, record.reason) == ("failed", "upstream_ended_early")
    assert record.usage_estimated
    assert record.charged_tokens > 100_000


# ---- B21: silence


@both
async def test_a_long_silence_before_the_first_byte_is_waited_out(
    router: RunningRouter, stub: OpenAIStub, second: OpenAIStub, streamed: bool
) -> None:
    await router.change(lambda: Backend.objects.update(chunk_timeout=0.1, first_byte_timeout=LONG))

    async def slow(call: Call) -> None:
        await asyncio.sleep(0.4)
        await ordinary(call)

    stub.then(slow)
    assert (await router.chat(stream=streamed)).status_code == 200
    record = await router.record()
    assert [a["backend"] for a in record.attempts] == ["a"]
    assert record.first_token_at is not None
    assert record.dispatched_at is not None
    assert 0.4 <= (record.first_token_at - record.dispatched_at).total_seconds() < LONG
    assert second.calls == []


@both
async def test_beyond_its_limit_silence_is_a_504_and_no_mark(
    router: RunningRouter, stub: OpenAIStub, one: int, second: OpenAIStub, streamed: bool
) -> None:
    await router.change(lambda: Backend.objects.update(first_byte_timeout=0.1))
    stub.then(silent)
    response = await asyncio.wait_for(router.chat(stream=streamed), LONG)
    error(response, 504, "upstream_timeout")
    assert response.headers["x-mindrouter-backend"] == "a"
    assert router.state_of(one) != "failed"
    assert second.calls == []
    record = await router.record()
    assert (record.outcome, record.status, record.charged_tokens) == ("failed", 504, 0)
    assert (await router.chat()).status_code == 200
    assert len(stub.calls) == 2


async def test_a_stream_that_falls_silent_is_cut_at_the_chunk_limit(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    await router.change(lambda: Backend.objects.update(chunk_timeout=0.1))

    async def falls_silent(call: Call) -> None:
        await call.start_stream()
        await call.say("Hel")
        await call.connection.stall()

    stub.then(falls_silent)
    response = await asyncio.wait_for(router.chat(stream=True), LONG)
    assert said(response.text) == "Hel"
    error_event(response.text, "upstream_stalled")
    record = await router.record()
    assert (record.outcome, record.reason) == ("failed", "upstream_stalled")


async def test_each_backend_has_its_own_limits(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    await router.backend(stub, "patient", models=("p",), first_byte_timeout=LONG)
    await router.change(lambda: Backend.objects.filter(pk=one).update(first_byte_timeout=0.05))

    async def slow(call: Call) -> None:
        await asyncio.sleep(0.2)
        await ordinary(call)

    stub.behaviour = slow
    error(await router.chat(model="m"), 504, "upstream_timeout")
    assert (await router.chat(model="p")).status_code == 200


# ---- B24: another attempt


@both
async def test_a_refused_connection_is_tried_elsewhere(
    router: RunningRouter, stub: OpenAIStub, one: int, second: OpenAIStub, streamed: bool
) -> None:
    await stub.close()
    response = await router.chat(stream=streamed)
    assert response.status_code == 200
    assert response.headers["x-mindrouter-backend"] == "b"
    record = await router.record()
    assert [(a["backend"], a["reason"]) for a in record.attempts] == [
        ("a", "upstream_connect_failed"),
        ("b", ""),
    ]
    assert record.charged_tokens == 10
    assert record.outcome == "completed"
    assert router.state_of(one) == "failed"
    await router.chat()
    assert len(second.calls) == 2  # a is not even asked


@both
@pytest.mark.parametrize(
    "fault",
    [reset, closes, refuse(500), refuse(502), refuse(503), refuse(429), respond(200, HTML, WEB)],
    ids=["reset", "close", "500", "502", "503", "429", "HTML"],
)
async def test_what_fails_before_the_first_byte_is_tried_elsewhere(
    router: RunningRouter,
    stub: OpenAIStub,
    second: OpenAIStub,
    fault: Behaviour,
    streamed: bool,
) -> None:
    stub.then(fault)
    response = await router.chat(stream=streamed)
    assert response.status_code == 200
    text = said(response.text) if streamed else response.json()["choices"][0]["message"]["content"]
    assert text == "Hello, world"
    record = await router.record()
    assert [a["backend"] for a in record.attempts] == ["a", "b"]
    assert record.attempts[0]["reason"]
    assert record.charged_tokens == 10


async def test_after_a_role_chunk_there_is_an_error_and_never_two_roles(
    router: RunningRouter, stub: OpenAIStub, second: OpenAIStub
) -> None:
    async def only_a_role(call: Call) -> None:
        await call.start_stream()
        await call.role()
        await asyncio.sleep(0.02)
        call.connection.close()

    stub.then(only_a_role)
    response = await router.chat(stream=True)
    assert response.text.count('"role"') == 1
    error_event(response.text, "upstream_ended_early")
    assert second.calls == []
    assert (await router.record()).charged_tokens == 0


async def test_after_a_word_there_is_an_error_event(
    router: RunningRouter, stub: OpenAIStub, second: OpenAIStub
) -> None:
    async def a_word(call: Call) -> None:
        await call.start_stream()
        await call.role()
        await call.say("Hel")
        call.connection.close()

    stub.then(a_word)
    response = await router.chat(stream=True)
    assert said(response.text) == "Hel"
    error_event(response.text, "upstream_ended_early")
    assert second.calls == []


async def test_attempts_are_bounded(router: RunningRouter, stub: OpenAIStub, settings: Any) -> None:
    settings.BACKEND_MAX_ATTEMPTS = 3
    for n in range(5):
        await router.backend(stub, f"b{n}")
    stub.behaviour = refuse(500, "sick")
    found = error(await router.chat(), 502, "upstream_error")
    assert found["message"] == "sick"
    assert len(stub.calls) == 3
    record = await router.record()
    assert len({a["backend"] for a in record.attempts}) == 3
    assert [a["reason"] for a in record.attempts] == ["upstream_error"] * 3
    assert (record.outcome, record.status, record.charged_tokens) == ("failed", 502, 0)


async def test_a_retry_keeps_its_place_in_the_order(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    go_on = asyncio.Event()

    async def full_once(call: Call) -> None:
        await go_on.wait()
        await refuse(503, "full")(call)

    stub.then(full_once)
    first = asyncio.create_task(router.chat(user="first"))
    await stub.until_calls(1)
    later = [asyncio.create_task(router.chat(user=str(n))) for n in range(2)]
    await router.until_waiting(2)
    go_on.set()
    await asyncio.gather(first, *later)
    assert [call.body["user"] for call in stub.calls] == ["first", "first", "0", "1"]


# ---- B26: refusals keep their status


REFUSALS = [
    (400, "This model's maximum context length is 4096 tokens.", "context_length_exceeded"),
    (400, "temperature must be in [0, 2]", "invalid_request"),
    (404, "The model `m` does not exist.", "model_not_found"),
    (404, "Not Found", "invalid_request"),
    (413, "too large", "body_too_large"),
    (422, "Input should be a valid list", "invalid_request"),
    (418, "teapot", "invalid_request"),
]


@both
async def test_a_backends_refusal_keeps_its_status_and_message(
    router: RunningRouter, stub: OpenAIStub, one: int, second: OpenAIStub, streamed: bool
) -> None:
    for status, message, code in REFUSALS:
        stub.then(refuse(status, message))
        response = await router.chat(stream=streamed)
        assert error(response, status, code)["message"] == message
    assert second.calls == []
    assert router.state_of(one) != "failed"
    for record, (status, _, code) in zip(await router.records(), REFUSALS, strict=True):
        assert (record.outcome, record.status, record.reason) == ("failed", status, code)
        assert record.charged_tokens == 0
        assert record.attempts[0]["status"] == status


@both
async def test_a_full_backend_without_alternative_says_when_to_come_again(
    router: RunningRouter, stub: OpenAIStub, one: int, streamed: bool
) -> None:
    stub.then(refuse(429, "slow down", [("Retry-After", "7")]))
    response = await router.chat(stream=streamed)
    assert error(response, 429, "rate_limit_exceeded")["message"] == "slow down"
    assert response.headers["retry-after"] == "7"
    assert len(stub.calls) == 1


async def test_a_strange_retry_after_is_passed_over(
    router: RunningRouter, stub: OpenAIStub, settings: Any
) -> None:
    settings.BACKEND_MAX_ATTEMPTS = 1
    for n, hint in enumerate(("soon", "-1", "9" * 400, "\xb2", "Sun, 29 Nov 2026 12:00:00 GMT")):
        await router.backend(stub, models=(f"m{n}",))  # the others are left alone for a moment
        stub.then(respond(503, b"{}", JSON, ("Retry-After", hint)))
        response = await router.chat(model=f"m{n}")
        error(response, 503, "no_backend_available")
        assert response.headers["retry-after"] == "1"


async def test_an_unreachable_backend_is_an_openai_error_without_its_address(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    await stub.close()
    for streamed in (False, True):
        response = await router.chat(stream=streamed)
        found = error(response, 502, "upstream_connect_failed")
        assert "127.0.0.1" not in response.text
        assert str(stub.server.port) not in response.text
        assert found["message"] == "Backend a: Connection refused"
    records = await router.records()
    assert {(r.outcome, r.status, r.charged_tokens) for r in records} == {("failed", 502, 0)}


async def test_the_address_is_taken_out_of_a_backends_own_words(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    stub.then(refuse(400, f"see {stub.url}/docs on 127.0.0.1, not 127.0.0.10"))
    response = await router.chat()
    assert (
        response.json()["error"]["message"] == "see http://backend/docs on backend, not 127.0.0.10"
    )


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refusal_of_the_routers_own_key_is_not_the_clients_fault(
    router: RunningRouter, stub: OpenAIStub, one: int, status: int
) -> None:
    stub.then(refuse(status, "Invalid API key sk-backend"))
    response = await router.chat()
    error(response, 502, "upstream_error")
    assert "sk-backend" not in response.text


async def test_a_backend_without_the_address_is_passed_over_and_named_if_there_is_no_other(
    router: RunningRouter, stub: OpenAIStub, one: int, second: OpenAIStub
) -> None:
    """A vLLM that chats has nothing at /v1/embeddings, and may be asked before its first poll."""
    no_such_path = respond(404, b'{"detail":"Not Found"}', JSON)
    stub.behaviour = no_such_path
    response = await router.client.post("/v1/embeddings", json={"model": "m", "input": "a"})
    assert response.status_code == 200
    second.behaviour = no_such_path
    response = await router.client.post("/v1/embeddings", json={"model": "m", "input": "a"})
    found = error(response, 404, "capability_missing")
    assert "does not serve this address" in found["message"]
    assert router.state_of(one) != "failed"


ODD_REFUSALS = [
    (b'{"detail":"Not Found"}', JSON),
    (b'{"error":"model is warming up"}', JSON),
    (b'{"error":{"message":{"nested":["x"]}}}', JSON),
    (b'{"detail":[{"loc":["body"],"msg":"field required"}]}', JSON),
    (b'"just a text"', JSON),
    (b"[1]", JSON),
    (b"[" * 100_000, JSON),
    (b"\xff\xfe", JSON),
    (HTML, WEB),
    (b"", WEB),
    (b'{"error":{"message":"' + b"x" * 3_000_000 + b'"}}', JSON),
]


async def test_a_refusal_in_any_form_becomes_openais(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    for data, kind in ODD_REFUSALS:
        stub.then(respond(400, data, kind))
        found = error(await router.chat(), 400, "invalid_request")
        assert isinstance(found["message"], str)
        assert "<html>" not in found["message"]
        assert len(found["message"]) <= 2000
        assert router.state_of(one) != "failed"


async def test_a_refusal_that_lies_about_its_length_is_still_a_refusal(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    async def lie(call: Call) -> None:
        await call.connection.write(b"HTTP/1.1 400 Bad\r\nContent-Length: 500\r\n\r\nshort")
        call.connection.close()

    stub.then(lie)
    error(await router.chat(), 400, "invalid_request")
    assert router.state_of(one) != "failed"


# ---- B28: busy or refused is not dead


async def test_refused_prompts_never_close_a_backend_for_others(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    stub.then(*[refuse(400, "too long")] * 10)
    for _ in range(10):
        assert (await router.chat()).status_code == 400
    began = time.monotonic()
    assert (await router.chat()).status_code == 200
    assert time.monotonic() - began < 15.0  # a fail window is twice that


async def test_a_busy_backend_is_waited_for_and_not_marked(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    stub.then(refuse(503, "full"), refuse(503, "full"))
    answers = await asyncio.gather(router.chat(), router.chat(stream=True))
    assert [a.status_code for a in answers] == [200, 200]
    assert router.state_of(one) != "failed"
    assert len(stub.calls) == 4


@pytest.mark.parametrize("fault", [refuse(500), refuse(502), reset])
async def test_a_sick_backend_is_left_alone_for_the_fail_window(
    router: RunningRouter, stub: OpenAIStub, one: int, second: OpenAIStub, fault: Behaviour
) -> None:
    stub.then(fault)
    await router.chat()
    assert router.state_of(one) == "failed"
    for _ in range(3):
        await router.chat()
    assert (len(stub.calls), len(second.calls)) == (1, 4)


@pytest.mark.parametrize("strategy", ["score", "round_robin", "affinity"])
async def test_the_fail_window_holds_in_every_strategy(
    router: RunningRouter, stub: OpenAIStub, one: int, second: OpenAIStub, strategy: str
) -> None:
    from backends.models import ModelStrategy

    await router.change(ModelStrategy.objects.create, model_name="m", strategy=strategy)
    await stub.close()
    answers = [await router.chat(prompt_cache_key=str(n)) for n in range(8)]
    assert {a.status_code for a in answers} == {200}
    tried = [[a["backend"] for a in r.attempts] for r in await router.records()]
    assert tried.count(["a", "b"]) <= 1
    assert tried.count(["b"]) >= 7


async def test_when_all_have_failed_they_are_tried_all_the_same(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    stub.then(*[reset] * 3)
    error(await router.chat(), 502, "upstream_ended_early")
    assert router.state_of(one) == "failed"
    assert (await router.chat()).status_code == 200
    assert router.state_of(one) != "failed"


async def test_llama_cpps_500_for_a_callers_mistake_marks_nothing(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    await router.change(lambda: Backend.objects.update(engine="llamacpp"))
    stub.then(refuse(500, "image input is not supported", type="server_error"))
    found = error(await router.chat(), 502, "upstream_error")
    assert found["message"] == "image input is not supported"
    stub.then(refuse(501, "This server does not support embeddings."))
    error(await router.chat(), 400, "capability_missing")
    assert router.state_of(one) != "failed"
    assert len(stub.calls) == 2


# ---- a success that is none

NONSENSE: dict[str, Behaviour] = {
    "HTML": respond(200, HTML, WEB),
    "HTML called JSON": respond(200, HTML, JSON),
    "an array": respond(200, b"[]", JSON),
    "a text": respond(200, b'"hello"', JSON),
    "half a document": respond(200, b'{"choices":[', JSON),
    "nothing": respond(200, b"", JSON),
    "no content": respond(204, b""),
    "over-deep": respond(200, b'{"x":' + b"[" * 100_000, JSON),
    "a redirect": respond(302, b"", ("Location", "http://127.0.0.1:1/v1/chat/completions")),
    "a permanent redirect": respond(308, b"", ("Location", "/elsewhere")),
    "gzip": respond(200, gzip.compress(b"{}"), JSON, ("Content-Encoding", "gzip")),
    "not modified": respond(304, b""),
}


@both
async def test_nonsense_is_an_error_of_the_backends(
    router: RunningRouter, stub: OpenAIStub, one: int, streamed: bool
) -> None:
    for count, nonsense in enumerate(NONSENSE.values(), 1):
        stub.then(nonsense)
        response = await router.chat(stream=streamed)
        error(response, 502, "upstream_invalid")
        assert "html" not in response.text
        assert "location" not in response.headers
        assert len(stub.calls) == count
    assert (await router.chat()).status_code == 200
    *records, _ = await router.records()
    assert len(records) == len(NONSENSE)
    for record in records:
        assert (record.outcome, record.reason) == ("failed", "upstream_invalid")
        assert record.charged_tokens == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01 no HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 99 Odd\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_an_error_of_the_backends(
    router: RunningRouter, stub: OpenAIStub, one: int, raw: bytes
) -> None:
    async def write(call: Call) -> None:
        await call.connection.write(raw)
        await call.connection.stall()

    stub.then(*[write] * 3)
    error(await router.chat(), 502, "upstream_invalid")
    assert (await router.chat()).status_code == 200


async def test_an_error_with_status_200_is_an_error(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    told = {"message": "CUDA out of memory", "type": "server_error", "code": None}
    stub.then(respond(200, json.dumps({"error": told}).encode(), JSON))
    assert error(await router.chat(), 502, "upstream_error")["message"] == "CUDA out of memory"


FIRST_ERRORS: list[tuple[Any, int, str]] = [
    ({"message": "no", "type": "BadRequestError", "code": 400}, 400, "invalid_request"),
    ({"message": "no", "code": 500}, 502, "upstream_error"),
    ({"message": "no", "code": "weird"}, 502, "upstream_error"),
    ("no", 502, "upstream_error"),
    ({"message": "no", "code": True}, 502, "upstream_error"),
    ({"message": "no", "code": 99}, 502, "upstream_error"),
    ({"message": "no", "code": 429}, 429, "rate_limit_exceeded"),
]


async def test_a_stream_whose_first_event_is_an_error_has_an_error_status(
    router: RunningRouter, stub: OpenAIStub, settings: Any
) -> None:
    settings.BACKEND_MAX_ATTEMPTS = 1
    await router.backend(stub, "a")
    for told, status, code in FIRST_ERRORS:
        stub.then(stream(b": hello\n\n", sse({"error": told}), b"data: [DONE]\n\n"))
        assert error(await router.chat(stream=True), status, code)["message"] == "no"
    assert {r.charged_tokens for r in await router.records()} == {0}


async def test_an_error_within_a_stream_is_told_once_and_in_openais_form(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    async def breaks(call: Call) -> None:
        await call.start_stream()
        await call.role()
        await call.say("Hel")
        await call.event({"error": {"message": f"engine at {stub.url} died", "code": 500}})
        await call.end()

    stub.then(breaks)
    response = await router.chat(stream=True)
    assert said(response.text) == "Hel"
    assert response.text.count('"error"') == 1
    assert (
        error_event(response.text, "upstream_error")["message"] == "engine at http://backend died"
    )
    assert (await router.record()).outcome == "failed"


@pytest.mark.parametrize("piece", [b": ping\n\n" * 4096, b"x" * 65536, b"\n" * 65536])
async def test_a_stream_that_never_says_anything_is_given_up(
    router: RunningRouter, stub: OpenAIStub, one: int, piece: bytes
) -> None:
    async def endless(call: Call) -> None:
        await call.start_stream()
        while True:
            await call.connection.chunk(piece)

    stub.then(endless)
    response = await asyncio.wait_for(router.chat(stream=True), LONG)
    error(response, 502, "upstream_invalid")


async def test_a_stream_of_nothing_is_an_error(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    stub.then(stream())
    error(await router.chat(stream=True), 502, "upstream_invalid")


async def test_a_usage_beyond_belief_is_not_charged(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    async def liar(call: Call) -> None:
        document = call.document() | {"usage": call.counts(10**18, 10**18)}
        await call.json(document)

    stub.then(liar)
    assert (await router.chat()).status_code == 200
    record = await router.record()
    assert record.usage_estimated
    assert record.charged_tokens < 100


async def test_a_strange_usage_does_not_spoil_an_answer(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    for odd in (None, [], "none", {"prompt_tokens": "7"}, {"prompt_tokens": 7.0}):
        stub.then(respond(200, json.dumps({"choices": [], "usage": odd}).encode(), JSON))
        assert (await router.chat()).status_code == 200
    assert {r.outcome for r in await router.records()} == {"completed"}


async def test_a_json_answer_to_a_stream_is_passed_on_as_json(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    async def no_stream(call: Call) -> None:
        await call.json(call.document() | {"object": "chat.completion"})

    stub.then(no_stream)
    response = await router.chat(stream=True)
    assert response.headers["content-type"] == "application/json"
    assert response.json()["choices"][0]["message"]["content"] == "Hello, world"


# ---- others are not disturbed


async def test_a_hanging_backend_costs_only_its_own_requests(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    async with await OpenAIStub.start("n") as healthy:
        await router.backend(healthy, "healthy")
        stub.behaviour = silent
        hanging = [asyncio.create_task(router.chat()) for _ in range(10)]
        await router.until_waiting(9)
        answers = await asyncio.gather(*(router.chat(model="n") for _ in range(20)))
        assert {a.status_code for a in answers} == {200}
        assert not any(task.done() for task in hanging)
        for task in hanging:
            task.cancel()
        await router.idle()


async def test_a_backend_that_accepts_but_never_reads_is_given_up(
    router: RunningRouter, second: OpenAIStub
) -> None:
    """The listen queue of a dead process: connections are made, and nobody is there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await router.backend(url, "dead", models=("d",), first_byte_timeout=0.1)
        error(await asyncio.wait_for(router.chat(model="d"), LONG), 504, "upstream_timeout")
        assert (await router.chat()).status_code == 200


async def test_a_name_that_cannot_be_resolved_is_a_failed_connection(
    router: RunningRouter, second: OpenAIStub
) -> None:
    await router.backend("http://no-such-host.invalid", "lost", models=("l",))
    response = await router.chat(model="l")
    found = error(response, 502, "upstream_connect_failed")
    assert "no-such-host" not in found["message"]


async def test_streams_go_on_while_another_backend_fails(
    router: RunningRouter, stub: OpenAIStub, one: int
) -> None:
    go_on = asyncio.Event()
    async with await OpenAIStub.start("n") as healthy:
        await router.backend(healthy, "healthy", max_concurrent=8)
        healthy.behaviour = held(go_on)
        streams = [asyncio.create_task(router.chat(model="n", stream=True)) for _ in range(4)]
        await healthy.until_calls(4)
        stub.behaviour = reset
        assert {(await router.chat()).status_code for _ in range(5)} == {502}
        go_on.set()
        assert {said((await task).text) for task in streams} == {"Hello, world"}


async def test_a_long_stream_as_the_probe_holds_the_others_up_only_to_its_first_event(
    router: RunningRouter, stub: OpenAIStub, backend: int, settings: Any
) -> None:
    settings.BACKEND_FAIL_WINDOW = 0.1
    await router.reload()
    stub.then(*[reset] * 3)
    error(await router.chat(), 502, "upstream_ended_early")
    await asyncio.sleep(0.1)
    begin, go_on = asyncio.Event(), asyncio.Event()

    async def long_stream(call: Call) -> None:
        await begin.wait()
        await call.start_stream()
        await call.say("Hel")
        await go_on.wait()
        await call.finish()
        await call.end()

    stub.then(long_stream)
    probe = asyncio.create_task(router.chat(stream=True))
    await stub.until_calls(4)
    others = [asyncio.create_task(router.chat()) for _ in range(2)]
    await router.until_waiting(2)
    assert len(stub.calls) == 4  # one at a time until it has answered
    begin.set()
    answers = await asyncio.wait_for(asyncio.gather(*others), LONG)
    assert [a.status_code for a in answers] == [200, 200]
    assert not probe.done()
    go_on.set()
    assert said((await probe).text) == "Hel"


async def test_a_backends_name_cannot_add_headers(router: RunningRouter, stub: OpenAIStub) -> None:
    await router.backend(stub, "a\r\nX-Injected: 1\r\n\r\nü€")
    response = await router.chat()
    assert response.status_code == 200
    assert "x-injected" not in response.headers
    assert response.headers["x-mindrouter-backend"].startswith("a??X-Injected: 1")
