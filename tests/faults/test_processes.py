"""The gateway's process: stopped, killed, started again; and behind daphne."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.processes import RouterProcess, router_process
from tests.running import LONG, RawClient, body, events, said, until
from tests.stubs.openai_stub import Call, OpenAIStub, drip, held, ordinary, refuse

pytestmark = pytest.mark.usefixtures("transactional_db")


async def stream(router: RouterProcess) -> str:
    response = await router.client.post("/v1/chat/completions", json=body(stream=True))
    return response.text


# ---- stopping


async def test_at_sigterm_newcomers_are_told_and_streams_end(
    stub: OpenAIStub, tmp_path: Path
) -> None:
    go_on = asyncio.Event()
    async with router_process(tmp_path, stub.url) as router:
        stub.then(held(go_on), held(go_on))
        running = [asyncio.create_task(stream(router)) for _ in range(3)]  # one of them waits
        await stub.until_calls(2)
        router.send_signal(signal.SIGTERM)
        health = await router.client.get("/healthz")
        while health.status_code == 200:  # the signal is on its way
            health = await router.client.get("/healthz")
        assert (health.status_code, health.headers["retry-after"]) == (503, "5")
        refused = await router.client.post("/v1/chat/completions", json=body())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        go_on.set()
        texts = await asyncio.gather(*running)
        assert [said(text) for text in texts] == ["Hello, world"] * 3
        assert await router.ended() in (0, -signal.SIGTERM)
        assert "Traceback" not in router.log()
        records = await router.records(4)
        assert [r.outcome for r in records] == ["completed"] * 3 + ["refused"]
        assert records[-1].reason == "shutting_down"


async def test_streams_that_take_longer_than_the_grace_are_told_why(
    stub: OpenAIStub, tmp_path: Path
) -> None:
    async with router_process(tmp_path, stub.url, SHUTDOWN_GRACE="0.3") as router:
        stub.behaviour = drip(0.02, 1000)
        running = [asyncio.create_task(stream(router)) for _ in range(2)]
        await stub.until_calls(2)
        waits = asyncio.create_task(router.client.post("/v1/chat/completions", json=body()))
        await router.until_begun(3)
        router.send_signal(signal.SIGTERM)
        for text in await asyncio.gather(*running):
            assert events(text)[-1]["error"]["code"] == "shutting_down"
            assert "[DONE]" not in text
        response = await waits
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"
        await router.ended()
        assert "Traceback" not in router.log()
        records = await router.records(3)
        assert sorted(r.outcome for r in records) == ["failed", "failed", "refused"]
        assert {r.reason for r in records} == {"shutting_down"}
        assert all(r.charged_tokens > 0 for r in records if r.outcome == "failed")
        await until(lambda: stub.running == 0)


# ---- kill -9


async def test_what_a_killed_process_left_is_closed_as_aborted_at_the_next_start(
    stub: OpenAIStub, tmp_path: Path
) -> None:
    async with router_process(tmp_path, stub.url) as router:
        assert (await router.client.post("/v1/chat/completions", json=body())).status_code == 200
        stub.behaviour = drip(0.05, 1000)
        clients = [await router.raw() for _ in range(3)]  # two run, one waits
        for client in clients:
            client.post(stream=True)
        await stub.until_calls(3)
        await router.until_begun(4)
        router.send_signal(signal.SIGKILL)
        await router.ended()
        for client in clients:
            assert b"[DONE]" not in await client.to_end()
        await until(lambda: stub.running == 0)
        stub.behaviour = ordinary
        await router.start()
        ready = time.monotonic()
        records = await router.records(4)
        assert time.monotonic() - ready < LONG / 2
        assert [r.outcome for r in records] == ["completed", "aborted", "aborted", "aborted"]
        assert all(r.ended_at is not None for r in records)
        assert (await router.client.post("/v1/chat/completions", json=body())).status_code == 200
        await router.records(5)


async def test_a_budget_is_known_after_a_kill_and_nothing_stays_reserved(
    stub: OpenAIStub, tmp_path: Path
) -> None:
    async def usage() -> tuple[float | None, float, float]:
        told = (await router.client.get("/v1/usage/me")).json()
        return told["token_budget"], told["used"], told["reserved"]

    async with router_process(tmp_path, stub.url) as router:
        await router.client.post("/v1/chat/completions", json=body())  # 7 + 3 tokens
        with sqlite3.connect(tmp_path / "db.sqlite3", timeout=60) as database:
            database.execute("UPDATE groups SET token_budget = 10000, budget_period = 'month'")
        database.close()
        async with asyncio.timeout(60):
            while await usage() != (10_000, 10, 0):  # noqa: ASYNC110  another process
                await asyncio.sleep(0.05)
        await router.client.post("/v1/chat/completions", json=body())
        stub.behaviour = drip(0.05, 1000)
        client = await router.raw()
        client.post(stream=True, max_tokens=94)
        await stub.until_calls(3)
        assert await usage() == (10_000, 20, 100)
        router.send_signal(signal.SIGKILL)
        await router.ended()
        await until(lambda: stub.running == 0)
        await router.start()
        assert await usage() == (10_000, 20, 0)


async def test_what_has_just_been_forwarded_is_on_record_if_the_process_is_killed_then(
    stub: OpenAIStub, tmp_path: Path
) -> None:
    async with router_process(tmp_path, stub.url) as router:

        async def end_of_the_router(call: Call) -> None:
            router.send_signal(signal.SIGKILL)  # in the moment that the request arrives
            await call.connection.gone.wait()

        stub.then(end_of_the_router)
        client = await router.raw()
        client.post()
        await router.ended()
        assert await client.to_end() == b""
        await router.start()
        (record,) = await router.records(1)
        assert (record.outcome, record.selected_backend) == ("aborted", "a")


async def test_a_second_gateway_on_the_same_folder_is_refused(
    stub: OpenAIStub, tmp_path: Path
) -> None:
    async with router_process(tmp_path, stub.url) as router:
        second = RouterProcess(tmp_path, router.key)
        with pytest.raises(AssertionError, match="Another gateway already runs"):
            await second.start()
        await second.client.aclose()
        assert (await router.client.get("/v1/models")).status_code == 200


# ---- daphne: the same API, V1 and B18


@pytest.fixture
async def daphne(stub: OpenAIStub, tmp_path: Path) -> AsyncIterator[RouterProcess]:
    async with router_process(tmp_path, stub.url, "daphne") as router:
        yield router


async def test_behind_daphne_the_api_is_the_same(daphne: RouterProcess, stub: OpenAIStub) -> None:
    client = daphne.client
    whole = await client.post("/v1/chat/completions", json=body())
    assert whole.json()["choices"][0]["message"]["content"] == "Hello, world"
    assert whole.headers["x-mindrouter-backend"] == "a"
    streamed = await client.post("/v1/chat/completions", json=body(stream=True))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert said(streamed.text) == "Hello, world"
    assert streamed.text.endswith("data: [DONE]\n\n")
    vectors = await client.post("/v1/embeddings", json={"model": "m", "input": "x"})
    assert len(vectors.json()["data"]) == 1
    for response, status, code in (
        (await client.post("/v1/chat/completions", content=b"["), 400, "invalid_request"),
        (await client.post("/v1/chat/completions", json=body(model="x")), 404, "model_not_found"),
        (await client.get("/v1/nothing"), 404, "not_found"),
        (await client.delete("/v1/models"), 405, "method_not_allowed"),
        (await client.get("/v1/models/x%2Fy"), 404, "model_not_found"),
        (
            await client.get("/v1/models", headers={"Authorization": "Bearer x"}),
            401,
            "invalid_api_key",
        ),
        (
            await client.post("/v1/chat/completions", content=b"x" * 34_000_000),
            413,
            "body_too_large",
        ),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert response.headers["x-request-id"]
    assert (await client.head("/v1/models")).content == b""
    stub.then(refuse(400, "no"))
    refused = await client.post("/v1/chat/completions", json=body(stream=True))
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "no")
    stub.then(half)
    broken = await asyncio.wait_for(client.post("/v1/chat/completions", json=body()), LONG)
    with pytest.raises(json.JSONDecodeError):
        broken.json()
    records = await daphne.records(8)
    assert {r.outcome for r in records} == {"completed", "refused", "failed"}
    assert records[-1].reason == "upstream_ended_early"


async def half(call: Call) -> None:
    """A large document that breaks off."""
    await call.connection.start_chunked(200, [("Content-Type", "application/json")])
    for _ in range(20):
        await call.connection.chunk(b'["' + b"x" * 100_000)
    call.connection.close()


async def test_behind_daphne_errors_after_the_first_byte_end_the_connection_and_no_more(
    daphne: RouterProcess, stub: OpenAIStub
) -> None:
    async def resets(call: Call) -> None:
        await call.start_stream()
        for n in range(3):
            await call.say(f"w{n}")
        await asyncio.sleep(0.02)
        call.connection.reset()

    async def fault_of_ours(call: Call) -> None:
        await call.start_stream()
        await call.say("Hel")
        await asyncio.sleep(0.02)
        await call.say("explode")
        await call.connection.stall()

    began = time.monotonic()
    for behaviour, code in ((resets, "upstream_ended_early"), (fault_of_ours, "internal_error")):
        stub.then(behaviour)
        text = await stream(daphne)
        assert events(text)[-1]["error"]["code"] == code
    assert time.monotonic() - began < LONG / 2  # silence is borne for two minutes
    stub.behaviour = fault_of_ours
    for _ in range(25):
        await asyncio.gather(stream(daphne), stream(daphne))
    await the_process_still_notices_clients_that_leave(daphne, stub)
    assert "Exception inside application" not in daphne.log()


async def the_process_still_notices_clients_that_leave(
    daphne: RouterProcess, stub: OpenAIStub
) -> None:
    calls = len(stub.calls)
    stub.then(drip(0.05, 1000), drip(0.05, 1000))
    for leave in (RawClient.close, RawClient.reset):
        client = await daphne.raw()
        client.post(stream=True)
        await client.until(b"w1 ")
        leave(client)
        gone = stub.calls[-1].connection.gone  # else the stream goes on for 50 s
        await asyncio.wait_for(gone.wait(), 20.0)
    go_on = asyncio.Event()
    stub.behaviour = held(go_on)
    running = [asyncio.create_task(stream(daphne)) for _ in range(2)]
    await stub.until_calls(calls + 4)
    leaves, begun = await daphne.raw(), daphne.begun()
    leaves.post(stream=True)
    await daphne.until_begun(begun + 1)
    leaves.close()
    records = await daphne.records(calls + 2 + 1)
    assert records[-1].outcome == "cancelled"
    assert records[-1].dispatched_at is None
    go_on.set()
    assert {said(text) for text in await asyncio.gather(*running)} == {"Hello, world"}
    assert len(stub.calls) == calls + 4
