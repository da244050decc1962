"""Bodies that are forms: bad ones, broken ones and large ones."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from backends.filepart import FilePart
from backends.models import Alias
from mindrouter.gateway.surfaces.upload import MEMORY_BYTES, WRITE_BYTES, Upload
from scheduler.models import SiteSettings
from tests.gateway.forms import END, KIND, MODEL, SOUND, part
from tests.running import RawClient, RunningRouter, until
from tests.stubs.openai_stub import OpenAIStub
from tests.stubs.scripted import ScriptedStub, StubConnection
from tests.stubs.surfaces import transcribes

PATH = "/v1/audio/transcriptions"
MB = 1_000_000


# ---- what is refused, and how


@pytest.mark.parametrize(
    "body", [SOUND + END, MODEL + SOUND, MODEL + part("model", b"other") + SOUND + END]
)
async def test_a_form_that_is_none_is_refused_and_recorded(
    router: RunningRouter, stub: OpenAIStub, body: bytes
) -> None:
    answer = await router.client.post(PATH, content=body, headers={"Content-Type": KIND})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_request")
    assert error["type"] == "invalid_request_error"
    assert stub.calls == []
    record = await router.record()
    assert (record.outcome, record.reason) == ("refused", "invalid_request")


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=XX; boundary=YY",
        "multipart/mixed; boundary=XX",
        "",
    ],
)
async def test_another_content_type_is_refused_unread(
    router: RunningRouter, stub: OpenAIStub, kind: str
) -> None:
    headers = {"Content-Type": kind}
    answer = await router.client.post(PATH, content=MODEL + SOUND + END, headers=headers)
    assert answer.status_code == 400
    assert "multipart/form-data" in answer.json()["error"]["message"]
    raw = await router.raw()
    async with raw:  # the same while most of the body is still to come
        raw.send(f"POST {PATH}", headers | {"Content-Length": "1000000"}, b"x")
        status, fields, _ = await raw.response(60)
        assert (status, fields["connection"]) == (400, "close")
    assert stub.calls == []


async def test_a_form_where_json_is_due_is_refused(router: RunningRouter) -> None:
    answer = await router.client.post(
        "/v1/rerank", content=MODEL + END, headers={"Content-Type": KIND}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_form_that_is_too_large_is_refused_before_its_end(
    router: RunningRouter, stub: OpenAIStub, chunked: bool
) -> None:
    await allow(router, 100_000)
    length = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": "5000000"}
    async with await router.raw() as raw:
        raw.send(f"POST {PATH}", {"Content-Type": KIND} | length)
        data = MODEL + SOUND[:-30] + bytes(150_000)
        raw.writer.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
        status, _, told = await raw.response(60)
    assert (status, json.loads(told)["error"]["code"]) == (413, "body_too_large")
    record = await router.record()
    assert (record.outcome, record.reason) == ("refused", "body_too_large")
    assert stub.calls == []


async def allow(router: RunningRouter, size: int) -> None:
    await router.change(
        lambda: SiteSettings.objects.update_or_create(pk=1, defaults={"max_body_bytes": size})
    )


# ---- clients that go


@pytest.mark.parametrize("sent", [20, 100_000, 3 * MB])
async def test_who_leaves_in_the_middle_of_an_upload_frees_everything(
    router: RunningRouter, stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    closed: list[Upload] = []
    close = Upload.close

    def note(upload: Upload) -> None:
        close(upload)
        closed.append(upload)

    monkeypatch.setattr(Upload, "close", note)
    async with await router.raw() as raw:
        await begin_upload(raw, 10 * MB)
        raw.writer.write(bytes(sent))
        await raw.writer.drain()
        await until(lambda: bool(router.runtime.serving), 60)
        raw.reset()
    record = await router.record()
    assert (record.outcome, record.reason) == ("cancelled", "client_disconnected")
    assert record.dispatched_at is None
    [upload] = closed
    assert upload.bytes_in_memory == 0
    assert upload._file is None or upload._file.closed
    assert stub.calls == []


async def begin_upload(raw: RawClient, size: int, model: bytes = MODEL) -> None:
    """A request whose file has ``size`` bytes, up to their first."""
    head = model + b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    length = len(head) + size + len(b"\r\n" + END)
    raw.send(f"POST {PATH}", {"Content-Type": KIND, "Content-Length": str(length)}, head)
    await raw.writer.drain()


async def test_an_upload_holds_no_slot_until_it_has_come(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.behaviour = transcribes()
    async with await router.raw() as raw:
        await begin_upload(raw, 10)
        await until(lambda: bool(router.runtime.serving), 60)
        assert (router.in_flight, router.waiting) == (0, 0)
        raw.writer.write(bytes(10) + b"\r\n" + END)
        assert (await raw.response(60))[0] == 200


# ---- memory


async def test_a_hundred_megabytes_pass_with_a_bounded_part_of_them_in_memory(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client, router and backend are one process here, and none of them holds the file."""
    size, received, most = 100 * MB, 0, [0, 0]
    begins = resident()
    add = Upload.add

    async def watched(upload: Upload, data: bytes) -> None:
        await add(upload, data)
        note(upload.bytes_in_memory)

    def note(held: int = 0) -> None:
        most[:] = max(most[0], held), max(most[1], resident())

    async def backend(connection: StubConnection) -> None:
        nonlocal received
        request = await connection.read_head()
        length = int(request.header("content-length") or 0)
        while received < length:
            if not connection.received:
                await connection.more()
            received += len(connection.received)
            connection.received.clear()
            note()
        assert received == length
        body = b'{"text":"long","usage":{"type":"duration","seconds":10}}'
        await connection.respond(200, body, [("Content-Type", "application/json")])

    monkeypatch.setattr(Upload, "add", watched)
    await allow(router, 2 * size)
    async with await ScriptedStub.start(backend) as server:
        await router.backend(server.url, "large", models=("heard",))
        await router.change(Alias.objects.create, name="ears", targets=["heard"])
        async with await router.raw() as raw:
            await begin_upload(raw, size, part("model", b"ears"))
            for _ in range(100):
                raw.writer.write(bytes(MB))
                await raw.writer.drain()
            raw.writer.write(b"\r\n" + END)
            status, _, _ = await raw.response(120)
    assert status == 200
    assert received > size
    assert most[0] <= max(MEMORY_BYTES, WRITE_BYTES)
    assert most[1] - begins < 30 * MB
    record = await router.record()
    assert (record.outcome, record.prompt_tokens) == ("completed", 500)


def resident() -> int:
    """Bytes of memory in use by this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_a_backend_that_takes_nothing_is_given_nothing_more(
    router: RunningRouter,
) -> None:
    """What is not taken stays in the file."""
    reads = 0
    pieces = FilePart.pieces

    def counted(self: FilePart, most: int) -> Any:
        nonlocal reads
        for piece in pieces(self, most):
            reads += len(piece)
            yield piece

    reading = asyncio.Event()

    async def backend(connection: StubConnection) -> None:
        request = await connection.read_head()
        connection.pause_reading()
        reading.set()
        await go_on.wait()
        connection.resume_reading()
        await connection.read_body(request)
        await connection.respond(200, b'{"text":"x"}', [("Content-Type", "application/json")])

    go_on = asyncio.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FilePart, "pieces", counted)
        async with await ScriptedStub.start(backend) as server:
            await router.backend(server.url, "slow", models=("heard",))
            files = {"model": (None, "heard"), "file": ("a", bytes(30 * MB))}
            asking = asyncio.create_task(router.client.post(PATH, files=files, timeout=60))
            await asyncio.wait_for(reading.wait(), 60)
            # The kernel's buffers take some megabytes; then nothing more is read.
            before = -1
            while reads != before:
                before = reads
                await asyncio.sleep(0.2)
            assert reads < 20 * MB
            go_on.set()
            assert (await asking).status_code == 200
            assert reads > 30 * MB
