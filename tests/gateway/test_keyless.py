"""Ollama's clients send no key: they are let in only where the admin said as whom."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from scheduler.models import SiteSettings
from tests.gateway.dialect_requests import REQUESTS
from tests.running import RunningRouter

pytestmark = pytest.mark.usefixtures("backend")


async def open_to(router: RunningRouter, username: str | None) -> None:
    await router.change(SiteSettings.objects.update_or_create, pk=1, defaults={"open_to": username})


def keyless(router: RunningRouter) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=router.url, trust_env=False)


async def test_without_a_key_nobody_is_let_in(router: RunningRouter) -> None:
    async with keyless(router) as client:
        response = await client.post("/api/chat", json=REQUESTS["/api/chat"])
        assert (response.status_code, list(response.json())) == (401, ["error"])
        assert (await client.get("/api/tags")).status_code == 401
    assert (await router.record()).reason == "invalid_api_key"


async def test_opened_it_serves_them_as_the_named_user_with_its_group(
    router: RunningRouter,
) -> None:
    await router.user("anonymous", allowed_models=["m"])
    await open_to(router, "anonymous")
    async with keyless(router) as client:
        request = REQUESTS["/api/chat"] | {"stream": False}
        assert (await client.post("/api/chat", json=request)).status_code == 200
        assert [m["name"] for m in (await client.get("/api/tags")).json()["models"]] == ["m"]
        refused = await client.post("/api/chat", json=request | {"model": "x"})
        assert refused.status_code == 403
    record = (await router.records())[0]
    assert (record.user, record.group, record.outcome) == ("anonymous", "anonymous", "completed")


async def test_a_wrong_key_stays_wrong(router: RunningRouter) -> None:
    await open_to(router, "ada")
    headers = {"Authorization": "Bearer wrong"}
    response = await router.client.post("/api/chat", json=REQUESTS["/api/chat"], headers=headers)
    assert response.status_code == 401


async def test_the_other_apis_always_need_a_key(router: RunningRouter) -> None:
    await open_to(router, "ada")
    async with keyless(router) as client:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
            assert (await client.post(path, json={})).status_code == 401


async def test_pages_in_browsers_are_not_let_in_unless_their_origin_is_allowed(
    router: RunningRouter, settings: Any
) -> None:
    await open_to(router, "ada")
    headers = {"Origin": "https://elsewhere.example"}
    async with keyless(router) as client:
        assert (await client.get("/api/tags", headers=headers)).status_code == 401
        settings.CORS_ALLOWED_ORIGINS = ["https://elsewhere.example"]
        assert (await client.get("/api/tags", headers=headers)).status_code == 200


async def test_a_user_that_is_gone_or_closed_again_lets_nobody_in(router: RunningRouter) -> None:
    for username in ("nobody", None):
        await open_to(router, username)
        async with keyless(router) as client:
            assert (await client.get("/api/tags")).status_code == 401


async def test_the_version_is_told_to_everybody(router: RunningRouter) -> None:
    async with keyless(router) as client:
        assert (await client.get("/api/version")).json() == {"version": "0.12.0"}


@pytest.mark.parametrize("path", ["pull", "push", "create", "copy", "delete", "blobs/sha256:0"])
async def test_managing_models_is_refused_in_words(router: RunningRouter, path: str) -> None:
    method = "DELETE" if path == "delete" else "POST"
    response = await router.client.request(method, f"/api/{path}", json={"model": "m"})
    assert response.status_code == 403
    assert "administrator" in response.json()["error"]
