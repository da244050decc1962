"""Bad input: a 4xx in OpenAI's form at once; nothing is queued, charged or sent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from accounts.models import Group
from tests.gateway.bad_bodies import MALFORMED, WRONG_TYPED
from tests.running import NO_TLS, RunningRouter, body
from tests.stubs.openai_stub import OpenAIStub

pytestmark = pytest.mark.usefixtures("backend")

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]


def error_of(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The error of a response, in the form that every one has."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["message"]
    assert isinstance(error["type"], str)
    return error


async def nothing_happened(
    router: RunningRouter, stub: OpenAIStub, code: str, count: int = 1
) -> None:
    """Nothing but so many records of refusals."""
    assert stub.calls == []
    records = await router.records()
    assert len(records) == count
    for record in records:
        assert (record.outcome, record.reason) == ("refused", code)
        assert record.attempts == []
        assert record.charged_tokens == 0
        assert (record.queued_at, record.dispatched_at) == (None, None)
        assert record.ended_at is not None


# ---- bodies


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_is_no_object_is_refused(
    router: RunningRouter, stub: OpenAIStub, path: str
) -> None:
    for data in MALFORMED.values():
        response = await router.client.post(path, content=data)
        error = error_of(response, 400, "invalid_request")
        assert error["type"] == "invalid_request_error"
        assert response.headers["x-should-retry"] == "false"
    await nothing_happened(router, stub, "invalid_request", len(MALFORMED))


async def test_a_wrong_typed_field_is_refused(router: RunningRouter, stub: OpenAIStub) -> None:
    for fields, param in WRONG_TYPED.values():
        response = await router.chat(**fields)
        assert error_of(response, 400, "invalid_request")["param"] == param
    await nothing_happened(router, stub, "invalid_request", len(WRONG_TYPED))


async def test_an_unknown_model_is_not_found(router: RunningRouter, stub: OpenAIStub) -> None:
    names = ["nope", "M", "m ", "m:latest", "m" * 300, "../m", "\uff4d"]
    for name in names:
        for streamed in (False, True):
            error_of(await router.chat(model=name, stream=streamed), 404, "model_not_found")
    await nothing_happened(router, stub, "model_not_found", 2 * len(names))


@pytest.mark.parametrize(
    ("lacking", "fields"),
    [
        ("vision", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("json", {"response_format": {"type": "json_object"}}),
    ],
)
async def test_what_no_backend_can_do_is_refused(
    router: RunningRouter, stub: OpenAIStub, lacking: str, fields: dict[str, Any]
) -> None:
    def disable() -> None:
        from backends.models import BackendModel

        BackendModel.objects.update(**{lacking: False})

    await router.change(disable)
    error_of(await router.chat(**fields), 400, "capability_missing")
    await nothing_happened(router, stub, "capability_missing")


async def test_a_prompt_beyond_every_context_is_refused(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    def limit() -> None:
        from backends.models import BackendModel

        BackendModel.objects.update(context_length=100)

    await router.change(limit)
    long = [{"role": "user", "content": "word " * 400}]
    error_of(await router.chat(messages=long), 400, "context_length_exceeded")
    await nothing_happened(router, stub, "context_length_exceeded")


async def test_a_model_that_is_not_open_to_the_group_is_forbidden(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.change(lambda: Group.objects.update(allowed_models=["other"]))
    error_of(await router.chat(), 403, "permission_denied")
    await nothing_happened(router, stub, "permission_denied")
    listed = (await router.client.get("/v1/models")).json()["data"]
    assert listed == []


# ---- keys


WRONG_KEYS: list[dict[str, Any]] = [
    {},
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer  "},
    {"Authorization": "Bearer mr-wrong"},
    {"Authorization": "Basic YWRhOng="},
    {"Authorization": "Bearer \xff\xfe"},
    {"X-Api-Key": "mr-wrong"},
    {"X-Api-Key": ""},
    {"Authorization": "Bearer " + "x" * 20_000},
]


@pytest.mark.parametrize("path", PATHS)
async def test_a_missing_or_wrong_key_is_refused(
    router: RunningRouter, stub: OpenAIStub, path: str
) -> None:
    async with await router.raw() as client:
        for headers in WRONG_KEYS:
            sent = {"Authorization": "", "Content-Length": "2"} | headers
            client.send(f"POST {path}", sent, b"{}")
            status, fields, data = await client.response()
            error = json.loads(data)["error"]
            assert (status, error["code"]) == (401, "invalid_api_key")
            assert error["type"] == "authentication_error"
            assert fields["content-type"] == "application/json"
    await nothing_happened(router, stub, "invalid_api_key", len(WRONG_KEYS))


async def test_a_key_is_never_repeated_in_an_answer(router: RunningRouter) -> None:
    response = await router.chat(key="mr-0123456789")
    assert "0123456789" not in response.text


async def test_a_key_may_come_in_any_of_the_usual_headers(router: RunningRouter) -> None:
    for form in (
        {"Authorization": f"Bearer {router.key}"},
        {"Authorization": f"bearer   {router.key}"},
        {"X-Api-Key": router.key},
        {"Api-Key": router.key},
        {"Authorization": "Basic x", "X-Api-Key": router.key},
    ):
        async with httpx.AsyncClient(base_url=router.url, trust_env=False, verify=NO_TLS) as client:
            response = await client.post("/v1/chat/completions", json=body(), headers=form)
        assert response.status_code == 200


async def test_a_wrong_key_is_refused_before_a_large_body_is_read(router: RunningRouter) -> None:
    async with await router.raw() as client:
        headers = {"Authorization": "Bearer wrong", "Content-Length": str(20_000_000)}
        client.send("POST /v1/chat/completions", headers)
        status, _, _ = await client.response()
    assert status == 401


# ---- addresses and methods


async def test_an_unknown_address_is_not_found(router: RunningRouter) -> None:
    paths = ["", "/", "/nothing", "/chat", "/chat/completions/", "/%00", "/x?y"]
    for path in paths:
        for method in ("GET", "POST", "DELETE", "PROPFIND"):
            response = await router.client.request(method, "/v1" + path)
            assert error_of(response, 404, "not_found")["type"] == "not_found_error"
    assert await router.records() == []


async def test_a_wrong_method_is_not_allowed(router: RunningRouter, stub: OpenAIStub) -> None:
    for path in PATHS:
        for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            response = await router.client.request(method, path)
            error_of(response, 405, "method_not_allowed")
            assert response.headers["allow"] == "POST"
    assert stub.calls == []


async def test_a_head_request_is_answered_without_a_body(router: RunningRouter) -> None:
    for path, status in (("/v1/models", 200), ("/healthz", 200), ("/v1/chat/completions", 405)):
        response = await router.client.head(path)
        assert (response.status_code, response.content) == (status, b"")
    async with await router.raw() as client:
        client.send("HEAD /v1/models")
        head = await client.until(b"\r\n\r\n")
        client.post()
        status, _, _ = await client.response()
    assert b" 200 " in head
    assert status == 200


async def test_health_needs_no_key(router: RunningRouter) -> None:
    async with httpx.AsyncClient(base_url=router.url, trust_env=False, verify=NO_TLS) as client:
        response = await client.get("/healthz")
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
        assert (await client.post("/healthz")).status_code == 405


# ---- other origins

PREFLIGHT = {
    "Origin": "https://chat.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
}


async def test_a_configured_origin_may_ask(router: RunningRouter, settings: Any) -> None:
    settings.CORS_ALLOWED_ORIGINS = ["https://chat.example"]
    asked = await router.client.options("/v1/chat/completions", headers=PREFLIGHT)
    assert (asked.status_code, asked.content) == (204, b"")
    assert "content-length" not in asked.headers
    assert asked.headers["access-control-allow-origin"] == "https://chat.example"
    assert (
        asked.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    )
    assert "POST" in asked.headers["access-control-allow-methods"]
    for streamed in (False, True):
        response = await router.client.post(
            "/v1/chat/completions",
            json=body(stream=streamed),
            headers={"Origin": "https://chat.example"},
        )
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
        assert response.headers["vary"] == "origin"
        assert "x-request-id" in response.headers["access-control-expose-headers"]


async def test_errors_can_be_read_by_other_origins_too(
    router: RunningRouter, settings: Any
) -> None:
    settings.CORS_ALLOWED_ORIGINS = ["*"]
    response = await router.client.post(
        "/v1/chat/completions", content=b"{", headers={"Origin": "https://any.example"}
    )
    error_of(response, 400, "invalid_request")
    assert response.headers["access-control-allow-origin"] == "https://any.example"


@pytest.mark.parametrize("allowed", [[], ["https://other.example"]])
async def test_other_origins_may_not(
    router: RunningRouter, settings: Any, allowed: list[str]
) -> None:
    settings.CORS_ALLOWED_ORIGINS = allowed
    error_of(
        await router.client.options("/v1/chat/completions", headers=PREFLIGHT),
        403,
        "permission_denied",
    )
    response = await router.client.get("/v1/models", headers={"Origin": "https://chat.example"})
    assert "access-control-allow-origin" not in response.headers


# ---- many at once


async def test_refusals_disturb_nobody(router: RunningRouter, stub: OpenAIStub) -> None:
    async def bad(n: int) -> int:
        data = [b"", b"[]", b'{"model":"nope","messages":[{"role":"user"}]}', b"[" * 50_000][n % 4]
        return (await router.client.post("/v1/chat/completions", content=data)).status_code

    good = [router.chat() for _ in range(20)]
    answers = await asyncio.gather(*(bad(n) for n in range(80)), *good)
    assert {a for a in answers[:80] if isinstance(a, int)} == {400, 404}
    assert [a.status_code for a in answers[80:] if isinstance(a, httpx.Response)] == [200] * 20
    assert len(await router.records()) == 100


async def test_the_body_of_a_refused_request_does_not_become_the_next_request(
    router: RunningRouter,
) -> None:
    async with await router.raw() as client:
        smuggled = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n"
        headers = {"Authorization": "Bearer wrong", "Content-Length": str(len(smuggled))}
        client.send("POST /v1/chat/completions", headers, smuggled)
        assert (await client.response())[0] == 401
        client.send("GET /healthz")
        assert (await client.response())[2] == b'{"status":"ok"}'
