"""Large bodies, large answers, slow readers: bounded memory, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mindrouter.gateway import client as client_module
from mindrouter.server import give_large_memory_back
from tests.running import LONG, RunningRouter, body, until
from tests.stubs.openai_stub import Call, OpenAIStub, ordinary, sse

pytestmark = pytest.mark.usefixtures("backend")
MB = 1_000_000


def resident() -> int:
    """Bytes of memory in use by this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def image_of(size: int) -> list[dict[str, Any]]:
    image = {"url": "data:image/png;base64," + "A" * size}
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": image}]
    return [{"role": "user", "content": parts}]


def too_large(status: int, data: bytes) -> None:
    assert status == 413
    error = json.loads(data)["error"]
    assert error["code"] == "body_too_large"
    assert error["type"] == "invalid_request_error"


# ---- B52: requests


async def test_five_images_of_20_mb_at_once_pass_and_small_requests_meanwhile(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    data = json.dumps(body(messages=image_of(20 * MB))).encode()
    done: list[str] = []

    async def small() -> None:
        for _ in range(5):
            assert (await router.chat()).status_code == 200
            done.append("small")

    async def large() -> int:
        response = await router.client.post("/v1/chat/completions", content=data)
        done.append("large")
        return response.status_code

    *statuses, _ = await asyncio.gather(*(large() for _ in range(5)), small())
    assert statuses == [200] * 5
    last_large = len(done) - done[::-1].index("large")
    assert "small" in done[:last_large]
    sizes = sorted(len(call.request.body) for call in stub.calls)
    assert min(sizes[-5:]) > 20 * MB
    assert router.spooled_bytes() < 50_000
    record = (await router.records())[0]
    assert (record.prompt_tokens, record.outcome) == (7, "completed")


async def test_the_memory_for_large_bodies_comes_back(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    data = json.dumps(body(messages=image_of(20 * MB))).encode()
    give_large_memory_back()  # as the server does
    gc.collect()
    gc.disable()  # it must not depend on the collector
    before = resident()
    try:
        for _ in range(5):
            await router.client.post("/v1/chat/completions", content=data)
            stub.calls.clear()
            stub.server.requests.clear()
        assert resident() - before < 50 * MB  # the stub's connection still has the last one
    finally:
        gc.enable()


@pytest.mark.parametrize("chunked", [False, True])
async def test_over_the_limit_a_body_is_refused_before_it_is_read(
    router: RunningRouter, stub: OpenAIStub, chunked: bool
) -> None:
    sent = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(60):
            yield b"x" * MB
            sent += MB

    headers = {} if chunked else {"Content-Length": str(60 * MB)}
    response = await router.client.post("/v1/chat/completions", content=parts(), headers=headers)
    too_large(response.status_code, response.content)
    assert stub.calls == []
    record = await router.record()
    assert (record.outcome, record.reason, record.status) == ("refused", "body_too_large", 413)


@pytest.mark.parametrize(
    ("target", "key", "expected"),
    [("POST /v1/chat/completions", "Bearer wrong", 401), ("POST /v1/nothing", "", 404)],
)
async def test_a_refusal_reaches_a_client_that_reads_only_when_all_is_sent(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch, target: str, key: str, expected: int
) -> None:
    monkeypatch.setattr(client_module, "LINGER_SECONDS", 60.0)
    data = b"x" * (20 * MB)
    head = f"{target} HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    try:
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        await writer.drain()
        await until(lambda: writer.transport.get_write_buffer_size() == 0)
        answer = await asyncio.wait_for(reader.read(), LONG)
    finally:
        writer.close()
    assert answer.startswith(b"HTTP/1.1 %d " % expected)


async def test_a_declared_length_beyond_all_reason_is_refused_at_once(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    for length in (10**12, 10**30):
        async with await router.raw() as client:
            client.send("POST /v1/chat/completions", {"Content-Length": str(length)})
            status, headers, data = await client.response(LONG / 2)
            if length == 10**12:  # the other is no length at all for the parser
                too_large(status, data)
            assert status in (400, 413)
            assert headers["connection"] == "close"


async def test_a_client_that_goes_on_sending_is_hung_up_on(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LINGER_SECONDS", 0.2)
    async with await router.raw() as client:
        client.send("POST /v1/chat/completions", {"Content-Length": str(10**12)})
        await client.response()
        with pytest.raises((ConnectionError, RuntimeError)):  # noqa: PT012
            async with asyncio.timeout(LONG):
                while True:
                    client.writer.write(b"x" * 65536)
                    await client.writer.drain()
                    await asyncio.sleep(0.005)


async def test_a_smaller_limit_is_in_force_as_soon_as_it_is_saved(
    router: RunningRouter,
) -> None:
    from scheduler.models import SiteSettings

    await router.change(
        lambda: SiteSettings.objects.update_or_create(pk=1, defaults={"max_body_bytes": 1000})
    )
    assert (await router.chat()).status_code == 200
    response = await router.chat(user="x" * 1000)
    too_large(response.status_code, response.content)


async def test_a_body_that_stops_coming_is_given_up(
    router: RunningRouter, stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "BODY_SECONDS", 0.1)
    async with await router.raw() as client:
        client.send("POST /v1/chat/completions", {"Content-Length": "1000"}, b'{"model":')
        status, headers, data = await client.response(LONG / 2)  # half of what it has by default
        assert (status, headers["connection"]) == (408, "close")
        assert json.loads(data)["error"]["code"] == "invalid_request"
    assert (await router.record()).outcome == "refused"


# ---- V7: slow readers


async def test_an_answer_of_200_mb_to_a_client_that_reads_nothing_stays_at_the_backend(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    event = sse({"choices": [{"index": 0, "delta": {"content": "x" * 65_000}}]})
    sent = 0

    async def huge(call: Call) -> None:
        nonlocal sent
        await call.start_stream()
        for _ in range(3000):
            await call.connection.chunk(event)
            sent += len(event)

    stub.then(huge)
    gc.collect()
    before = resident()
    async with await router.raw() as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.post(stream=True)
        last = -1
        while sent != last:  # until nothing moves any more
            last = sent
            await asyncio.sleep(0.1)
        assert sent < 30 * MB
        assert resident() - before < 30 * MB
        assert (await router.chat()).status_code == 200
    assert {r.outcome for r in await router.records()} == {"cancelled", "completed"}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_takes_nothing_for_too_long_is_given_up(
    router: RunningRouter, stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    monkeypatch.setattr(client_module, "STALLED_AFTER", 0.2)

    async def endless(call: Call) -> None:
        if call.is_stream:
            await call.start_stream()
        else:
            await call.connection.start_chunked(200, [("Content-Type", "application/json")])
        while True:
            await call.connection.chunk(sse({"choices": [{"delta": {"content": "x" * 60_000}}]}))

    stub.then(endless)
    async with await router.raw() as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.post(stream=streamed)
        call = await stub.until_calls(1)
        await asyncio.wait_for(call.connection.gone.wait(), LONG)
        await router.idle()
        assert not router._state.connections
    record = await router.record()
    assert (record.outcome, record.reason) == ("cancelled", "client_disconnected")
    assert record.charged_tokens > 0


async def test_a_slow_reader_gets_all_of_it(router: RunningRouter, stub: OpenAIStub) -> None:
    stub.words = ["x" * 20_000] * 100
    async with router.client.stream(
        "POST", "/v1/chat/completions", json=body(stream=True)
    ) as response:
        size = 0
        async for part in response.aiter_bytes(100_000):
            size += len(part)
            await asyncio.sleep(0.005)
    assert size > 100 * 20_000
    assert (await router.record()).outcome == "completed"


# ---- large answers


@pytest.mark.parametrize("with_length", [False, True])
async def test_a_large_document_is_passed_on_while_it_comes_and_its_usage_found(
    router: RunningRouter, stub: OpenAIStub, with_length: bool
) -> None:
    stub.words = ["four"] * 1_000_000
    stub.prompt_tokens = 9

    async def large(call: Call) -> None:
        document = json.dumps(call.document()).encode()
        if with_length:
            await call.connection.respond(200, document, [("Content-Type", "application/json")])
        else:
            pieces = [document[i : i + 70_000] for i in range(0, len(document), 70_000)]
            await call.connection.stream(pieces, [("Content-Type", "application/json")])

    stub.then(large)
    response = await router.chat()
    assert len(response.json()["choices"][0]["message"]["content"]) == 4_000_000
    assert ("content-length" in response.headers) is with_length
    record = await router.record()
    assert (record.prompt_tokens, record.completion_tokens) == (9, 1_000_000)
    assert not record.usage_estimated


async def test_usage_at_the_beginning_of_a_large_document_is_found_too(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    async def llama_cpp(call: Call) -> None:
        counts = {"prompt_tokens": 5, "total_tokens": 5}
        data = [{"embedding": [0.123456789] * 200_000, "index": 0, "object": "embedding"}]
        await call.json({"model": "m", "object": "list", "usage": counts, "data": data})

    stub.then(llama_cpp)
    response = await router.client.post("/v1/embeddings", json={"model": "m", "input": "x"})
    assert response.status_code == 200
    assert len(response.content) > 2 * MB
    record = await router.record()
    assert (record.prompt_tokens, record.usage_estimated) == (5, False)


async def test_small_requests_are_served_while_a_large_answer_passes(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    others_served = asyncio.Event()

    async def large(call: Call) -> None:
        await call.connection.start_chunked(200, [("Content-Type", "application/json")])
        await call.connection.chunk(b'{"x":"')
        for _ in range(300):
            await call.connection.chunk(b"x" * 100_000)
        await others_served.wait()
        await call.connection.chunk(b'"}')
        await call.connection.end_chunked()

    stub.then(large)
    stub.behaviour = ordinary
    passing = asyncio.create_task(router.chat())
    await stub.until_calls(1)
    for _ in range(20):
        assert (await router.chat()).status_code == 200
    assert not passing.done()
    others_served.set()
    assert isinstance(await passing, httpx.Response)


# ---- V9: aborted uploads


async def test_aborted_uploads_leave_no_files_tasks_or_memory(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    await router.chat()
    gc.collect()
    files, before = await asyncio.to_thread(open_files), resident()
    for _ in range(40):
        async with await router.raw() as client:
            client.send("POST /v1/chat/completions", {"Content-Length": str(5 * MB)}, b"x" * MB)
            await client.writer.drain()
            client.reset()
    await router.idle()
    await until(lambda: not router._state.tasks)
    gc.collect()
    assert resident() - before < 20 * MB
    await until(lambda: open_files() <= files + 1, 60)  # sockets close a moment after their end
    assert len(stub.calls) == 1
    outcomes = [r.outcome for r in await router.records()]
    assert outcomes.count("cancelled") == len(outcomes) - 1
