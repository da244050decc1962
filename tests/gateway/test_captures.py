"""Prompts and answers of a key are stored where an admin has switched that on, and nowhere else."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from accounts.models import ApiKey
from mindrouter.gateway import capturing
from mindrouter.gateway.protocol import GatewayProtocol
from scheduler import captures
from scheduler.captures import CAPTURES, load_captures
from scheduler.models import Capture
from tests.gateway.test_secrets import lines, shown, stored, written  # noqa: F401  the fixture too
from tests.running import RunningRouter, body, until
from tests.stubs.openai_stub import Call, OpenAIStub

PROMPT, ANSWER = "canary-of-a-prompt", "canary-of-an-answer"
ASKED = [{"role": "user", "content": PROMPT}]
HEADER = "x-mindrouter-captured-until"


async def says(call: Call) -> None:
    """The canary, in whichever way it is asked for."""
    message = {"role": "assistant", "content": ANSWER}
    choices = [{"index": 0, "message": message, "text": ANSWER, "finish_reason": "stop"}]
    if not call.body.get("stream"):
        await call.json({**call.document(), "choices": choices})
        return
    await call.start_stream()
    await call.role()
    await call.say(ANSWER)
    await call.finish()
    await call.usage()
    await call.end()


def switch(*, name: str = "", until: datetime | None = None, **fields: Any) -> ApiKey:
    """Capture of the one key, for an hour, kept for 7 days."""
    key = ApiKey.objects.get(**({"name": name} if name else {}))
    key.capture_until = until or timezone.now() + timedelta(hours=1)
    key.capture_reason, key.capture_days = "a bug in forms", 7
    for field, value in fields.items():
        setattr(key, field, value)
    key.save()
    return key


async def found(router: RunningRouter) -> list[Capture]:
    """What is stored, the oldest first, after all that has been served."""
    await router.idle()
    router.runtime.captures.write()
    return await router.ask(_load, router._spool / CAPTURES)


def _load(folder: Path) -> list[Capture]:
    load_captures(folder)
    return list(Capture.objects.order_by("at"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", [GatewayProtocol, HttpToolsProtocol])
async def test_the_body_as_it_came_and_the_answer_as_it_went_are_stored(
    protocol: Any, router: RunningRouter, stub: OpenAIStub, backend: int, *, stream: bool
) -> None:
    stub.behaviour = says
    key = await router.change(switch)
    sent = json.dumps(body(messages=ASKED, stream=stream), indent=3).encode()
    response = await router.client.post("/v1/chat/completions", content=sent)
    assert ANSWER in response.text
    [one] = await found(router)
    assert (one.request, one.request_bytes) == (sent, len(sent))
    assert (one.answer, one.answer_bytes) == (response.content, len(response.content))
    assert one.request_id == response.headers["x-request-id"]
    assert one.key_id == key.pk
    assert one.delete_at - one.at == timedelta(days=7)


SURFACES = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/embeddings": {"input": PROMPT},
    "/v1/responses": {"input": PROMPT},
    "/v1/messages": {"messages": ASKED, "max_tokens": 5},
    "/api/chat": {"messages": ASKED},
    "/api/generate": {"prompt": PROMPT},
    "/v1/rerank": {"query": PROMPT, "documents": ["x"]},
}


@pytest.mark.parametrize("path", SURFACES)
async def test_every_surface_is_captured(
    router: RunningRouter, stub: OpenAIStub, backend: int, path: str
) -> None:
    stub.behaviour = says
    await router.change(switch)
    sent = json.dumps({"model": "m", **SURFACES[path]}).encode()
    response = await router.client.post(path, content=sent)
    [one] = await found(router)
    assert (one.request, one.answer) == (sent, response.content)


async def test_without_the_switch_nothing_is_stored_and_no_folder_made(
    router: RunningRouter, stub: OpenAIStub, backend: int
) -> None:
    stub.behaviour = says
    response = await router.chat(messages=ASKED)
    assert ANSWER in response.text
    assert HEADER not in response.headers
    assert await found(router) == []
    assert not (router._spool / CAPTURES).exists()


async def test_only_the_captured_key_is_captured(
    router: RunningRouter, stub: OpenAIStub, backend: int
) -> None:
    name = (await router.ask(ApiKey.objects.get)).name
    other = await router.user("bob")
    key = await router.change(switch, name=name)
    assert HEADER not in (await router.chat(key=other, messages=ASKED)).headers
    await router.chat(messages=ASKED)
    assert [one.key_id for one in await found(router)] == [key.pk]


async def test_what_was_captured_is_read_nowhere_without_the_encryption_key(
    router: RunningRouter,
    stub: OpenAIStub,
    backend: int,
    lines: list[str],  # noqa: F811
    tmp_path: Path,
) -> None:
    stub.behaviour = says
    await router.change(switch)
    for stream in (False, True):
        await router.chat(messages=ASKED, stream=stream)
    await router.idle()
    router.runtime.captures.write()
    [file] = (router._spool / CAPTURES).iterdir()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    spooled = written(tmp_path)
    assert len(await found(router)) == 2
    assert not list((router._spool / CAPTURES).iterdir())
    await router.records()
    pages = await router.ask(shown)
    places = spooled + "\n".join(lines).encode() + await router.ask(stored) + pages
    assert PROMPT.encode() not in places
    assert ANSWER.encode() not in places


async def test_the_client_is_told_until_when(router: RunningRouter, backend: int) -> None:
    end = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    await router.change(switch, until=end)
    for fields in ({}, {"stream": True}, {"messages": 3}):
        response = await router.chat(**fields)
        assert response.headers[HEADER] == end.strftime("%Y-%m-%dT%H:%M:%SZ")


async def test_it_ends_at_its_date_without_anybody_doing_anything(
    router: RunningRouter, backend: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await router.change(switch)
    [key] = router.runtime.snapshot.keys.values()
    assert key.capturing is not None
    ends = key.capturing.until
    monkeypatch.setattr("mindrouter.gateway.consumer.time.time", lambda: ends - 0.5)
    assert HEADER in (await router.chat()).headers
    monkeypatch.setattr("mindrouter.gateway.consumer.time.time", lambda: ends)
    assert HEADER not in (await router.chat()).headers
    assert len(await found(router)) == 1


async def test_what_runs_when_it_is_switched_off_is_not_stored(
    router: RunningRouter, stub: OpenAIStub, backend: int
) -> None:
    def off() -> None:
        key = ApiKey.objects.get()
        key.stop_capture()
        key.save()

    async def waits(call: Call) -> None:
        await router.change(off)
        await says(call)

    await router.change(switch)
    stub.behaviour = waits
    assert HEADER in (await router.chat(messages=ASKED)).headers
    assert await found(router) == []


async def test_a_client_that_leaves_has_what_it_had_stored(
    router: RunningRouter, stub: OpenAIStub, backend: int
) -> None:
    async def begins(call: Call) -> None:
        await call.start_stream()
        await call.role()
        await call.say(ANSWER)
        await call.connection.stall()

    stub.behaviour = begins
    await router.change(switch)
    async with await router.raw() as client:
        client.post(stream=True, messages=ASKED)
        await client.until(ANSWER.encode())
    [one] = await found(router)
    assert PROMPT.encode() in one.request
    assert ANSWER.encode() in one.answer
    assert (await router.record()).outcome == "cancelled"


async def test_an_answer_that_breaks_off_is_stored_with_its_error(
    router: RunningRouter, stub: OpenAIStub, backend: int
) -> None:
    async def breaks_off(call: Call) -> None:
        await call.start_stream()
        await call.role()
        await call.say(ANSWER)
        call.connection.reset()

    stub.behaviour = breaks_off
    await router.change(switch)
    response = await router.chat(messages=ASKED, stream=True)
    [one] = await found(router)
    assert one.answer == response.content
    assert b"upstream_ended_early" in one.answer


async def test_what_is_refused_is_stored_with_the_refusal(
    router: RunningRouter, backend: int
) -> None:
    await router.change(switch)
    response = await router.client.post("/v1/chat/completions", content=b'{"model": "mm')
    assert response.status_code == 400
    [one] = await found(router)
    assert (one.request, one.answer) == (b'{"model": "mm', response.content)


async def test_only_the_beginning_is_stored_of_what_is_long(
    router: RunningRouter, stub: OpenAIStub, backend: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing, "MOST_BYTES", 100)
    stub.behaviour = says
    await router.change(switch)
    for stream in (False, True):
        sent = json.dumps(body(messages=[{"role": "user", "content": "x" * 200}], stream=stream))
        response = await router.client.post("/v1/chat/completions", content=sent.encode())
        one = (await found(router))[-1]
        assert (one.request, one.request_bytes) == (sent[:100].encode(), len(sent))
        assert (one.answer, one.answer_bytes) == (response.content[:100], len(response.content))


async def test_a_form_is_not_stored_but_its_answer_is(
    router: RunningRouter, stub: OpenAIStub, backend: int
) -> None:
    await router.change(switch)
    response = await router.client.post(
        "/v1/audio/transcriptions", data={"model": "m"}, files={"file": ("a.wav", b"RIFF")}
    )
    [one] = await found(router)
    assert (one.request, one.request_bytes) == (None, 0)
    assert one.answer == response.content


async def test_the_gateway_writes_it_by_itself(router: RunningRouter, backend: int) -> None:
    await router.change(switch)
    await router.chat()
    folder = router._spool / CAPTURES
    await until(lambda: folder.exists() and bool(list(folder.glob("*.sealed"))), within=10)


async def test_what_cannot_be_written_stops_no_request_and_is_counted(
    router: RunningRouter,
    backend: int,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],  # noqa: F811
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(captures, "_write_whole", full)
    await router.change(switch)
    assert (await router.chat(messages=ASKED)).status_code == 200
    assert await found(router) == []
    assert router.runtime.captures.lost == 1
    assert "1 captured prompts are lost so far: [Errno 28] No space left on device" in "\n".join(
        lines
    )
    monkeypatch.setattr(captures, "MOST_WAITING", 0)
    assert (await router.chat()).status_code == 200
    assert router.runtime.captures.lost == 2
