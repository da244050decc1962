"""The cases that concern every client, asked in each client's own form, streamed and not.

A test's name begins with the case that it shows. What is special to one form is tested elsewhere.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import random
from typing import Any

import pytest

from accounts.models import ApiKey
from backends.models import Backend
from tests.faults.surfaces import (
    Surface,
    every,
    every_json,
    every_kind,
    every_stream,
    every_text,
    every_whole,
)
from tests.running import LONG, RawClient, RunningRouter, until
from tests.stubs.openai_stub import (
    EVENT_STREAM,
    Behaviour,
    Call,
    OpenAIStub,
    refuse,
    reset,
    silent,
)
from tests.stubs.scripted import chunk

LEAVE = {"FIN": RawClient.close, "RST": RawClient.reset}
PIECES = ["Größe ", "漢字", "😀!"]


async def closes(call: Call) -> None:
    call.connection.close()


async def resets(call: Call) -> None:
    await asyncio.sleep(0.02)  # what was sent is to be read first
    call.connection.reset()


async def ends(call: Call) -> None:
    await call.connection.end_chunked()


WAYS = pytest.mark.parametrize("way", [closes, resets, ends], ids=lambda one: one.__name__)


async def second(surface: Surface, router: RunningRouter, other: OpenAIStub) -> None:
    """A backend "b" that comes after "a"."""
    await router.ask(lambda: Backend.objects.update(priority=10))
    await surface.backend(router, other, "b")  # puts both in force


# ---- B01, B07: an answer arrives whole, and its usage is counted


def cut(data: bytes, way: str) -> list[bytes]:
    if way == "at once":
        return [data]
    if way == "bytewise":
        return [data[at : at + 1] for at in range(len(data))]
    dice = random.Random(1)
    at = sorted(dice.sample(range(1, len(data)), len(data) // 20))
    return [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]


@pytest.mark.parametrize("way", ["bytewise", "cut", "at once"])
@every_stream
async def test_case_b01_characters_cut_by_reads_arrive_whole(
    router: RunningRouter, stub: OpenAIStub, surface: Surface, way: str
) -> None:
    await surface.backend(router, stub)
    stub.words = PIECES

    async def in_pieces(call: Call) -> None:
        await call.start_stream()
        for piece in cut(b"".join(chunk(event) for event in call.events()), way):
            await call.connection.write(piece)
            await asyncio.sleep(0)  # a write of its own
        await call.connection.end_chunked()

    stub.then(in_pieces)
    response = await surface.ask(router)
    assert surface.text(response) == "Größe 漢字😀!"
    assert surface.last_words in response.text
    record = await router.record()
    assert (record.outcome, record.prompt_tokens, record.completion_tokens) == ("completed", 7, 3)
    assert record.usage_estimated is False


@every
async def test_case_b07_what_a_backend_tells_is_counted_and_an_answer_is_recorded_as_whole(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub)
    response = await surface.ask(router)
    assert response.status_code == 200
    assert surface.text(response) == surface.words
    record = await router.record()
    assert (record.outcome, record.reason, record.status) == ("completed", "", 200)
    assert record.stream is surface.streamed
    assert record.charged_tokens > 0
    if surface.words and not surface.form:
        assert (record.prompt_tokens, record.completion_tokens) == (7, 3)
        assert record.charged_tokens == 10


@every_text
async def test_case_b35_without_usage_tokens_are_estimated_marked_and_charged(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub)
    stub.tells_usage = False
    stub.words = ["word "] * 37
    response = await surface.ask(router)
    assert surface.text(response) == "word " * 37
    record = await router.record()
    assert record.usage_estimated is True
    assert record.prompt_tokens is not None
    assert record.prompt_tokens > 0
    assert record.completion_tokens is not None
    assert 37 * 0.7 <= record.completion_tokens <= 37 * 1.3
    assert record.charged_tokens == record.prompt_tokens + record.completion_tokens


# ---- B06, B18: an answer that breaks off


@WAYS
@every_stream
async def test_case_b06_b18_a_stream_that_breaks_off_ends_with_an_error(
    router: RunningRouter, stub: OpenAIStub, surface: Surface, way: Behaviour
) -> None:
    await surface.backend(router, stub, max_concurrent=1)

    async def forty_of_sixty(call: Call) -> None:
        await call.start_stream()
        await call.role()
        for n in range(40):
            await call.say(f"w{n} ")
        await way(call)

    stub.then(forty_of_sixty)
    async with await OpenAIStub.start() as other:
        await second(surface, router, other)
        response = await surface.ask(router)
        assert surface.text(response) == "".join(f"w{n} " for n in range(40))
        surface.error_at_the_end(response, "upstream_ended_early")
        assert other.calls == []
    record = await router.record()
    assert (record.outcome, record.reason) == ("failed", "upstream_ended_early")
    assert (record.completion_tokens, record.usage_estimated) == (40, True)
    assert record.charged_tokens == record.prompt_tokens + 40


@pytest.mark.parametrize("way", [closes, resets], ids=lambda one: one.__name__)
@every_whole
async def test_case_b06_b24_a_whole_answer_that_breaks_off_is_asked_for_again_elsewhere(
    router: RunningRouter, stub: OpenAIStub, surface: Surface, way: Behaviour
) -> None:
    await surface.backend(router, stub)

    async def half(call: Call) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n"
        await call.connection.write(head, b'{"id": "x", "object"')
        await way(call)

    stub.then(half)
    async with await OpenAIStub.start() as other:
        await second(surface, router, other)
        response = await surface.ask(router)
    assert response.status_code == 200
    assert response.headers["x-mindrouter-backend"] == "b"
    assert surface.text(response) == surface.words
    record = await router.record()
    assert [one["reason"] for one in record.attempts] == ["upstream_ended_early", ""]
    assert record.outcome == "completed"


# ---- B11: fields that nobody here knows

STRANGE = {
    "chat_template_kwargs": {"enable_thinking": False},
    "guided_json": {"type": "object", "properties": {"ä": {"enum": [1.0, "漢"]}}},
    "min_p": 0.05,
    "cache_salt": "s",
    "seed": 9007199254740993,
    "temperature": 1.0,
}


@every_json
async def test_case_b11_unknown_fields_arrive_or_are_named_but_are_never_lost_in_silence(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub)
    response = await surface.ask(router, **STRANGE)
    if surface.path in ("/v1/messages", "/v1/responses") or surface.path.startswith("/api/"):
        if not stub.calls:
            assert any(name in surface.refusal(response, 400) for name in STRANGE)
            return
        named = response.headers.get("x-mindrouter-not-translated", "")
        assert all(name in named or name in stub.calls[0].body for name in STRANGE), named
        return
    assert response.status_code == 200
    sent = stub.calls[0].body
    assert {name: sent[name] for name in STRANGE} == STRANGE
    assert b"9007199254740993" in stub.calls[0].request.body
    assert set(sent) - set(STRANGE) - set(surface.fields) <= {"stream_options"}


# ---- B12: clients that leave


@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE.keys())
@every
async def test_case_b12_a_client_that_leaves_while_it_is_served_frees_its_slot(
    router: RunningRouter,
    stub: OpenAIStub,
    surface: Surface,
    leave: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await surface.backend(router, stub, max_concurrent=1)
    caplog.clear()

    async def goes_on_for_ever(call: Call) -> None:
        if surface.streamed:
            await call.start_stream()
            await call.role()
            for n in range(5):
                await call.say(f"w{n} ")
        await call.connection.stall()

    stub.then(goes_on_for_ever)
    async with await router.raw() as client:
        surface.post(client)
        call = await stub.until_calls(1, LONG)
        if surface.streamed:
            await client.until(b"w4 ", LONG)
        waits = asyncio.create_task(surface.ask(router))
        await router.until_waiting(1, LONG)
        leave(client)
        await asyncio.wait_for(call.connection.gone.wait(), LONG)
        assert (await waits).status_code == 200
    first, after = await router.records()
    assert (first.outcome, first.reason, first.status) == ("cancelled", "client_disconnected", 499)
    assert first.charged_tokens > 0
    assert after.outcome == "completed"
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@every
async def test_case_b12_b18_a_client_that_leaves_the_queue_is_never_served_or_charged(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub, max_concurrent=1)
    go_on = asyncio.Event()

    async def later(call: Call) -> None:
        await go_on.wait()
        await surface.answer(call)

    stub.then(later)
    first = asyncio.create_task(surface.ask(router))
    await stub.until_calls(1, LONG)
    async with await router.raw() as client:
        client.key = await router.user("eve")
        surface.post(client)
        await router.until_waiting(1, LONG)
        client.close()
        await router.until_waiting(0, LONG)
    go_on.set()
    assert (await first).status_code == 200
    (left,) = [one for one in await router.records() if one.user == "eve"]
    assert (left.outcome, left.attempts, left.charged_tokens) == ("cancelled", [], 0)
    assert len(stub.calls) == 1


# ---- B21: silence


@every
async def test_case_b21_beyond_its_limit_silence_is_a_504_without_a_mark_or_a_second_backend(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    number = await surface.backend(router, stub)
    await router.change(lambda: Backend.objects.update(first_byte_timeout=0.1))
    stub.then(silent)
    async with await OpenAIStub.start() as other:
        await second(surface, router, other)
        response = await surface.ask(router)
        assert other.calls == []
    surface.refusal(response, 504, "upstream_timeout")
    assert router.state_of(number) != "failed"
    record = await router.record()
    assert (record.outcome, record.status, record.charged_tokens) == ("failed", 504, 0)


@every
async def test_case_b21_a_silence_within_the_limit_is_waited_out(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub, chunk_timeout=0.1, first_byte_timeout=LONG)

    async def thinks(call: Call) -> None:
        await asyncio.sleep(0.15)
        await surface.answer(call)

    stub.then(thinks)
    response = await surface.ask(router)
    assert (response.status_code, surface.text(response)) == (200, surface.words)
    assert len((await router.record()).attempts) == 1


# ---- B24: another attempt


@pytest.mark.parametrize(
    "fault",
    [reset, refuse(500), refuse(503), refuse(429)],
    ids=["reset", "500", "503", "429"],
)
@every
async def test_case_b24_what_fails_before_the_first_byte_is_tried_elsewhere(
    router: RunningRouter, stub: OpenAIStub, surface: Surface, fault: Behaviour
) -> None:
    await surface.backend(router, stub)
    stub.then(fault)
    async with await OpenAIStub.start() as other:
        await second(surface, router, other)
        response = await surface.ask(router)
    assert (response.status_code, surface.text(response)) == (200, surface.words)
    record = await router.record()
    assert [one["backend"] for one in record.attempts] == ["a", "b"]
    assert record.attempts[0]["reason"]
    assert record.outcome == "completed"


@every
async def test_case_b24_a_refused_connection_is_tried_elsewhere_and_then_left_alone(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    number = await surface.backend(router, stub)
    await stub.close()
    async with await OpenAIStub.start() as other:
        await second(surface, router, other)
        response = await surface.ask(router)
        assert (response.status_code, surface.text(response)) == (200, surface.words)
    assert router.state_of(number) == "failed"
    record = await router.record()
    assert [one["reason"] for one in record.attempts] == ["upstream_connect_failed", ""]


# ---- B26, B28: refusals

STATUSES = [
    (400, "This model's maximum context length is 4096 tokens.", "context_length_exceeded"),
    (422, "Input should be a valid list", "invalid_request"),
    (404, "The model `m` does not exist.", "model_not_found"),
]


@every
async def test_case_b26_a_backends_refusal_keeps_its_status_and_its_words(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    number = await surface.backend(router, stub)
    for status, message, code in STATUSES:
        stub.then(refuse(status, message))
        assert surface.refusal(await surface.ask(router), status, code) == message
    for record, (status, _, code) in zip(await router.records(), STATUSES, strict=True):
        assert (record.outcome, record.status, record.reason) == ("failed", status, code)
        assert record.charged_tokens == 0
    assert router.state_of(number) != "failed"
    assert (await surface.ask(router)).status_code == 200  # B28: and the next is served at once


@every
async def test_case_b26_a_full_backend_says_when_to_come_again(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    number = await surface.backend(router, stub)
    stub.then(refuse(429, "slow down", [("Retry-After", "7")]))
    response = await surface.ask(router)
    assert surface.refusal(response, 429, "rate_limit_exceeded") == "slow down"
    assert response.headers["retry-after"] == "7"
    assert router.state_of(number) != "failed"


@every
async def test_case_b26_an_unreachable_backend_is_a_502_that_does_not_tell_its_address(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub)
    await stub.close()
    response = await surface.ask(router)
    surface.refusal(response, 502, "upstream_connect_failed")
    assert "127.0.0.1" not in response.text
    assert str(stub.server.port) not in response.text
    record = await router.record()
    assert (record.outcome, record.status, record.charged_tokens) == ("failed", 502, 0)


@every_kind
async def test_case_b28_a_busy_backend_is_waited_for_and_not_marked(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    number = await surface.backend(router, stub)
    stub.then(refuse(503, "full"))
    response = await surface.ask(router)
    assert (response.status_code, surface.text(response)) == (200, surface.words)
    assert router.state_of(number) != "failed"
    record = await router.record()
    assert len(record.attempts) == 2


# ---- B30, B39: bounds


@every
async def test_case_b30_a_full_queue_is_a_429_and_costs_nothing(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub, max_concurrent=1, max_queue=0)
    go_on = asyncio.Event()

    async def later(call: Call) -> None:
        await go_on.wait()
        await surface.answer(call)

    stub.then(later)
    first = asyncio.create_task(surface.ask(router))
    await stub.until_calls(1, LONG)
    refused = await surface.ask(router)
    surface.refusal(refused, 429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    go_on.set()
    assert (await first).status_code == 200  # depth 0 with a free slot serves
    _, record = await router.records()
    assert (record.outcome, record.reason, record.charged_tokens) == ("refused", "queue_full", 0)


@every
async def test_case_b39_a_used_budget_is_a_429_that_names_it(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub)
    key = await router.user("eve", token_budget=0)
    response = await surface.ask(router, key=key)
    assert "budget" in surface.refusal(response, 429, "quota_exceeded")
    assert stub.calls == []


# ---- B42, B52, B54: refused before they wait


@every_json
async def test_case_b42_an_unknown_model_is_a_404_that_no_backend_sees(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub)
    surface.refusal(await surface.ask(router, model="nope"), 404, "model_not_found")
    assert stub.calls == []
    record = await router.record()
    assert (record.outcome, record.queued_at) == ("refused", None)


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@every
async def test_case_b52_over_the_limit_a_body_is_a_413_before_it_is_read(
    router: RunningRouter, stub: OpenAIStub, surface: Surface, settings: Any, chunked: bool
) -> None:
    settings.MAX_BODY_BYTES = 1000
    await surface.backend(router, stub)
    async with await router.raw() as client:
        size = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(10**12)}
        data = chunk(surface.body()) + chunk(b"x" * 2000) if chunked else surface.body()
        client.send(f"POST {surface.path}", size | {"Content-Type": surface.kind}, data)
        status, headers, body = await client.response(LONG)
    assert (status, headers["content-type"]) == (413, "application/json")
    assert json.loads(body)["error"]
    assert stub.calls == []
    await router.idle(LONG)


@every
async def test_case_b54_a_key_that_was_disabled_is_a_401(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub)
    key = await router.user("eve")
    assert (await surface.ask(router, key=key)).status_code == 200
    await router.change(lambda: ApiKey.objects.filter(user__username="eve").update(enabled=False))
    surface.refusal(await surface.ask(router, key=key), 401, "invalid_api_key")
    assert len(stub.calls) == 1


# ---- B49: headers

SECRETS = {
    "Cookie": "sessionid=abc",
    "Proxy-Authorization": "Basic c2VjcmV0",
    "Connection": "x-drop",
    "X-Drop": "1",
    "X-Forwarded-For": "10.1.2.3",
}


@every
async def test_case_b49_headers_stay_on_their_own_side(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    number = await surface.backend(router, stub)
    mine = {"X-Request-Id": "my-own-id"}
    leaks = [("Set-Cookie", "a=b"), ("Server", "secret-engine"), ("X-Backend", stub.url)]

    async def leaky(call: Call) -> None:
        whole = call.connection.respond
        chunked = call.connection.start_chunked

        async def respond(status: int = 200, body: bytes = b"", headers: Any = ()) -> None:
            await whole(status, body, [*headers, *leaks])

        async def start_chunked(status: int = 200, headers: Any = ()) -> None:
            await chunked(status, [*headers, *leaks])

        call.connection.respond = respond  # type: ignore[method-assign]
        call.connection.start_chunked = start_chunked  # type: ignore[method-assign]
        await surface.answer(call)

    stub.then(leaky)
    response = await surface.ask(router, headers=SECRETS | mine)
    assert response.status_code == 200
    seen = stub.calls[0].headers
    assert not {"authorization", "cookie", "x-api-key", "x-drop", "x-forwarded-for"} & set(seen)
    assert "proxy-authorization" not in seen
    assert seen["host"] == stub.url.removeprefix("http://")
    assert router.key not in str(stub.calls[0].request.raw_head)
    assert not {"set-cookie", "x-backend"} & set(response.headers)
    assert "secret-engine" not in str(response.headers)
    assert stub.url not in str(response.headers) + response.text
    assert response.headers["x-request-id"]
    await router.change(_give_key, number)
    assert (await surface.ask(router)).status_code == 200
    assert stub.calls[-1].headers["authorization"] == "Bearer its-own"


def _give_key(number: int) -> None:
    backend = Backend.objects.get(pk=number)
    backend.api_key = "its-own"
    backend.save()


# ---- what else a connection can do: early hints, compression, lies about length


def early_hints(call: Call, surface: Surface) -> Any:
    async def behave() -> None:
        await call.connection.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
        await call.connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await surface.answer(call)

    return behave()


@every
async def test_case_v5_early_hints_are_passed_over(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub)

    async def hints(call: Call) -> None:
        await early_hints(call, surface)

    stub.then(hints)
    response = await surface.ask(router)
    assert (response.status_code, surface.text(response)) == (200, surface.words)
    assert "link" not in response.headers


@every
async def test_case_v5_no_compression_is_asked_for_and_what_comes_compressed_is_no_answer(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub)

    async def compressed(call: Call) -> None:
        kind = EVENT_STREAM if surface.streamed else [("Content-Type", "application/json")]
        data = gzip.compress(b"".join(call.events()) if surface.streamed else b'{"id": 1}')
        await call.connection.respond(200, data, [*kind, ("Content-Encoding", "gzip")])

    stub.then(compressed)
    async with await OpenAIStub.start() as other:
        await second(surface, router, other)
        response = await surface.ask(router)
    assert "gzip" not in stub.calls[0].headers.get("accept-encoding", "")
    assert (response.status_code, surface.text(response)) == (200, surface.words)
    assert "content-encoding" not in response.headers
    record = await router.record()
    assert [one["reason"] for one in record.attempts] == ["upstream_invalid", ""]


@every_whole
async def test_case_b06_bytes_beyond_the_length_that_was_told_reach_nobody(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    """A second response behind the first would be the next client's answer."""
    await surface.backend(router, stub)

    async def two(call: Call) -> None:
        await surface.answer(call)
        poison = b'{"poison": true}'
        await call.connection.respond(200, poison, [("Content-Type", "application/json")])

    stub.then(two)
    for _ in range(2):
        response = await surface.ask(router)
        assert (response.status_code, surface.text(response)) == (200, surface.words)
        assert "poison" not in response.text
        await until(lambda: not stub.running, LONG)
