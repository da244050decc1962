"""Keys and prompts are sent on, and are found nowhere afterwards: canaries through every path."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib import admin
from django.core.management import call_command
from django.db import connection
from django.test import Client

from accounts.models import ApiKey
from backends.models import Backend, Node
from scheduler.models import Decision
from tests.factories import make_admin
from tests.running import RunningRouter, body
from tests.stubs.openai_stub import Call, OpenAIStub

PROMPT, ANSWER = "canary-of-a-prompt", "canary-of-an-answer"
BACKEND_KEY, NODE_KEY = "sk-canary-of-a-backend", "sk-canary-of-a-node"
COOKIE = "canary-of-a-cookie"
WEBHOOK = "canary-of-a-webhook"
ASKED = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Every line of every logger, at the most talkative level, as it would be written."""
    written: list[str] = []
    handler = logging.StreamHandler(io.StringIO())
    handler.emit = lambda record: written.append(handler.format(record))  # type: ignore[method-assign]
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield written
    root.removeHandler(handler)
    root.setLevel(level)


async def use_it(router: RunningRouter, stub: OpenAIStub) -> None:
    """Everything that may become of a request."""

    message = {"role": "assistant", "content": ANSWER}
    choices = [{"index": 0, "message": message, "text": ANSWER, "finish_reason": "stop"}]

    async def answers(call: Call) -> None:
        await call.json({**call.document(), "choices": choices})

    async def echoes(call: Call) -> None:  # as engines do that say what they could not read
        await call.error(400, f"Cannot take {PROMPT!r}.")

    async def fails(call: Call) -> None:
        await call.error(500, f"Traceback … {PROMPT} … {call.headers['authorization']}")

    async def talks_nonsense(call: Call) -> None:
        data = f"{PROMPT} {BACKEND_KEY}".encode()
        await call.connection.respond(200, data, [("Content-Type", "application/json")])

    async def breaks_off(call: Call) -> None:
        await call.start_stream()
        await call.say(ANSWER)
        call.connection.reset()

    for behaviour in (answers, echoes, fails, talks_nonsense, breaks_off):
        stub.behaviour = behaviour
        for streamed in (False, True):
            client, data = await router.raw(), json.dumps(body(messages=ASKED, stream=streamed))
            async with client:
                headers = {
                    "Cookie": COOKIE,
                    "Content-Length": str(len(data)),
                    "Connection": "close",
                }
                client.send(f"POST /v1/chat/completions?{PROMPT}", headers, data.encode())
                await client.to_end(60)
    stub.behaviour = answers
    for path in ("/v1/messages", "/api/chat", "/v1/responses", "/v1/completions"):
        asked = body(messages=ASKED, input=PROMPT, prompt=PROMPT, max_tokens=5)
        await router.client.post(path, json=asked)
    wrong = {"temperature": {PROMPT: PROMPT}, "messages": [{"role": PROMPT, "content": {}}]}
    await router.chat(**wrong)
    await router.client.post("/v1/chat/completions", content=f'{{"model": "{PROMPT}'.encode())
    await router.chat(messages=ASKED, max_tokens=PROMPT)
    await router.chat(key=f"mr-{COOKIE}", messages=ASKED)
    await router.client.get(f"/v1/{PROMPT}")


def written(folder: Path) -> bytes:
    """Every file below, the spool's."""
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def stored() -> bytes:
    """Every row of every table, as it lies in the database."""
    found = []
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names():
            cursor.execute(f'SELECT * FROM "{table}"')  # noqa: S608
            found.append(repr(cursor.fetchall()))
    return "\n".join(found).encode()


def shown() -> bytes:
    """Every page, document and export that a superuser gets."""
    client = Client(raise_request_exception=False)
    client.force_login(make_admin("root"))
    record = Decision.objects.filter(outcome="failed").first() or Decision.objects.first()
    assert record is not None
    addresses = ["/admin/", "/admin/history/", "/admin/history.json", "/admin/advice/"]
    addresses += ["/admin/reports/", f"/admin/decisions/{record.request_id}/"]
    names = ("backends", "nodes", "api-keys", "users", "decisions", "settings", "advice", "usage")
    addresses += [f"/api/admin/{name}" for name in names]
    for model in admin.site._registry:
        base = f"/admin/{model._meta.app_label}/{model._meta.model_name}/"
        row = model._default_manager.first()
        addresses += (
            [base] if row is None else [base, f"{base}{row.pk}/change/", f"{base}{row.pk}/history/"]
        )
    pages = [client.get(address).content for address in addresses]
    out = io.StringIO()
    call_command("export", stdout=out)
    return b"\n".join([*pages, out.getvalue().encode()])


async def test_keys_and_prompts_are_found_nowhere_afterwards(
    router: RunningRouter, stub: OpenAIStub, lines: list[str], tmp_path: Path, settings: Any
) -> None:
    await router.backend(stub, "a", api_key=BACKEND_KEY)
    await router.change(Node.objects.create, name="n", telemetry_key=NODE_KEY)
    await use_it(router, stub)
    assert any(PROMPT in json.dumps(call.body) for call in stub.calls)  # it was sent on
    assert stub.calls[0].headers["authorization"] == f"Bearer {BACKEND_KEY}"
    records = await router.records()
    assert len(records) >= 15
    spooled = written(tmp_path)
    rows, pages = await router.ask(stored), await router.ask(shown)
    places = {"log": "\n".join(lines).encode(), "spool": spooled, "rows": rows, "pages": pages}
    digest = (await router.ask(ApiKey.objects.get)).sha256
    secrets = (PROMPT, ANSWER, BACKEND_KEY, NODE_KEY, COOKIE, router.key)
    found = {
        (where, secret, text[max(0, at - 200) : at + 60])
        for where, text in places.items()
        for secret in secrets
        if (at := text.find(secret.encode())) >= 0
    }
    assert found == set()
    assert digest.encode() not in places["pages"] + places["log"] + places["spool"]
    assert await router.ask(lambda: Backend.objects.get().api_key) == BACKEND_KEY


async def test_an_error_of_our_own_says_nothing_of_the_request(
    router: RunningRouter, backend: int, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("A fault of ours.")

    monkeypatch.setattr(router.runtime, "submit", broken)
    response = await router.chat(messages=ASKED)
    assert response.status_code == 500
    assert "A fault of ours" not in response.text
    text = "\n".join(lines)
    assert "A fault of ours" in text  # whoever runs it can find it
    assert PROMPT not in text
    assert router.key not in text
