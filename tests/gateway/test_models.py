"""``/v1/models``: what may be asked for, under which names."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.utils import timezone

from backends.models import Alias, Backend, BackendModel, BackendStatus
from scheduler.snapshot import load_telemetry
from tests.running import RunningRouter
from tests.stubs.openai_stub import OpenAIStub


async def listed(router: RunningRouter) -> list[str]:
    document = (await router.client.get("/v1/models")).json()
    assert document["object"] == "list"
    return [model["id"] for model in document["data"]]


@pytest.mark.usefixtures("backend")
async def test_models_are_listed_in_openais_form(router: RunningRouter) -> None:
    (model,) = (await router.client.get("/v1/models")).json()["data"]
    assert model["id"] == "m"
    assert model["object"] == "model"
    assert isinstance(model["created"], int)
    assert model["owned_by"] == "mindrouter"
    assert (await router.client.get("/v1/models/m")).json() == model
    assert await router.records() == []


@pytest.mark.usefixtures("backend")
async def test_a_key_is_needed(router: RunningRouter) -> None:
    for path in ("/v1/models", "/v1/models/m"):
        response = await router.client.get(path, headers={"Authorization": "Bearer wrong"})
        assert response.status_code == 401


async def test_names_with_slashes_are_found_plain_and_encoded(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    name = "meta-llama/Llama-3.2 1B:ü"
    await router.backend(stub, models=(name,))
    for path in (
        "meta-llama/Llama-3.2%201B:%C3%BC",
        "meta-llama%2FLlama-3.2%201B%3A%C3%BC",
        "meta-llama%2fLlama-3.2%201B:%c3%bc",
    ):
        response = await router.client.get(f"/v1/models/{path}")
        assert response.status_code == 200
        assert response.json()["id"] == name
    assert (await router.chat(model=name)).status_code == 200


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["M", "nope", "m/", "m%20"])
async def test_an_unknown_model_is_not_found(router: RunningRouter, name: str) -> None:
    response = await router.client.get(f"/v1/models/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_a_model_on_several_backends_is_listed_once(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, models=("m", "b"))
    await router.backend(stub, models=("m", "a"))
    assert await listed(router) == ["a", "b", "m"]


async def test_models_of_disabled_and_draining_backends_are_not_listed(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, models=("on",))
    await router.backend(stub, models=("off",), enabled=False)
    await router.backend(stub, models=("ending",), draining=True)
    assert await listed(router) == ["on"]


@pytest.mark.usefixtures("backend")
async def test_what_is_known_of_a_model_is_told(router: RunningRouter) -> None:
    await router.change(
        lambda: BackendModel.objects.update(context_length=2048, vision=True, tools=False)
    )
    model = (await router.client.get("/v1/models/m")).json()
    assert model["max_model_len"] == 2048
    assert model["capabilities"] == {
        "vision": True,
        "tools": False,
        "json": None,
        "embeddings": None,
        "rerank": None,
        "transcription": None,
        "speech": None,
        "images": None,
        "moderation": None,
    }


# ---- aliases


async def alias(router: RunningRouter, name: str, *targets: str) -> None:
    await router.change(Alias.objects.create, name=name, targets=list(targets))


async def test_an_alias_stands_for_its_first_target_that_is_there(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, models=("second", "third"))
    await alias(router, "small", "first", "second", "third")
    assert "small" in await listed(router)
    assert (await router.client.get("/v1/models/small")).json()["id"] == "small"
    assert (await router.chat(model="small")).status_code == 200
    assert stub.calls[0].body["model"] == "second"
    record = await router.record()
    assert (record.model_requested, record.model_served) == ("small", "second")


async def test_an_alias_wins_over_a_model_of_its_name(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, models=("small", "large"))
    await alias(router, "small", "large")
    assert await listed(router) == ["large", "small"]
    await router.chat(model="small")
    assert stub.calls[0].body["model"] == "large"


@pytest.mark.usefixtures("backend")
async def test_an_alias_of_nothing_is_not_found(router: RunningRouter, stub: OpenAIStub) -> None:
    await alias(router, "small", "nope", "nothing")
    assert "small" not in await listed(router)
    for response in (
        await router.client.get("/v1/models/small"),
        await router.chat(model="small"),
    ):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
    assert stub.calls == []


async def test_an_alias_of_a_disabled_target_moves_on_to_the_next(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    first = await router.backend(stub, models=("first",))
    await router.backend(stub, models=("second",))
    await alias(router, "small", "first", "second")
    await router.change(lambda: Backend.objects.filter(pk=first).update(enabled=False))
    await router.chat(model="small")
    assert stub.calls[0].body["model"] == "second"


# ---- B42: Ollama's tags


@pytest.fixture
async def tagged(router: RunningRouter, stub: OpenAIStub) -> None:
    names = ("llama3.2:latest", "qwen3:4b-q4_K_M")
    await router.backend(stub, "ollama", models=names, engine="ollama")


@pytest.mark.usefixtures("tagged")
@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ("llama3.2", "llama3.2:latest"),
        ("llama3.2:latest", "llama3.2:latest"),
        ("qwen3:4b-q4_K_M", "qwen3:4b-q4_K_M"),
    ],
)
async def test_the_backend_gets_the_name_that_it_knows(
    router: RunningRouter, stub: OpenAIStub, asked: str, sent: str
) -> None:
    response = await router.chat(model=asked)
    assert response.status_code == 200
    assert stub.calls[0].body["model"] == sent
    assert (await router.record()).model_served == sent


@pytest.mark.usefixtures("tagged")
@pytest.mark.parametrize("asked", ["qwen3", "nope", "qwen3:4b-Q4_K_M", "qwen3:latest"])
async def test_other_tags_are_other_models(
    router: RunningRouter, stub: OpenAIStub, asked: str
) -> None:
    response = await router.chat(model=asked)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert stub.calls == []


@pytest.mark.usefixtures("tagged")
async def test_one_model_under_two_names_is_listed_once(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, "vllm", models=("llama3.2",))
    assert await listed(router) == ["llama3.2", "qwen3:4b-q4_K_M"]


async def test_no_tag_is_added_where_the_engine_is_not_ollama(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, models=("llama3.2",))
    response: Any = await router.chat(model="llama3.2:latest")
    assert response.status_code == 404
    await router.chat(model="llama3.2")
    assert stub.calls[0].body["model"] == "llama3.2"


async def test_an_alias_moves_on_while_its_first_target_cannot_serve(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    first = await router.backend(stub, models=("first",))
    await router.backend(stub, models=("second",))
    await alias(router, "small", "first", "second")
    await router.chat(model="small")
    router.runtime.mark_failed(first)
    await router.chat(model="small")
    router.runtime.mark_ok(first)
    await router.chat(model="small")
    assert [call.body["model"] for call in stub.calls] == ["first", "second", "first"]


async def test_an_alias_whose_targets_all_fail_stands_for_the_first_that_exists(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    failed = await router.backend(stub, models=("first", "second"))
    await alias(router, "small", "nope", "first", "second")
    router.runtime.mark_failed(failed)
    assert router.runtime.resolve_alias("small") == "first"


# ---- in the other dialects


async def test_ollamas_clients_are_shown_the_same_models(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, models=("b", "a"))
    await router.backend(stub, engine="ollama", models=("a", "c:latest"))
    await alias(router, "small", "b")
    await router.change(lambda: BackendModel.objects.update(context_length=2048, tools=True))
    names = [model["model"] for model in (await router.client.get("/api/tags")).json()["models"]]
    assert names == await listed(router)
    for asked in ("b", "b:latest", "small", "c", "c:latest"):
        shown = (await router.client.post("/api/show", json={"model": asked})).json()
        assert shown["capabilities"] == ["completion", "tools"]
        assert shown["model_info"]["unknown.context_length"] == 2048
    response = await router.client.post("/api/show", json={"model": "nope"})
    assert (response.status_code, list(response.json())) == (404, ["error"])


async def test_ollamas_running_models_are_those_that_polls_found_loaded(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    number = await router.backend(stub, engine="ollama", models=("a:latest", "b:latest"))
    await router.ask(
        BackendStatus.objects.update_or_create,
        backend_id=number,
        defaults={
            "observed_at": timezone.now(),
            "answered_at": timezone.now(),
            "reachable": True,
            "loaded_models": {"a:latest": 100.0},
        },
    )
    telemetry = await router.ask(load_telemetry)
    router.runtime._observe(telemetry, time.monotonic())
    running = (await router.client.get("/api/ps")).json()["models"]
    assert [model["model"] for model in running] == ["a:latest"]


@pytest.mark.usefixtures("backend")
async def test_anthropics_clients_get_their_form_of_the_list(router: RunningRouter) -> None:
    entry = {
        "type": "model",
        "id": "m",
        "display_name": "m",
        "created_at": "1970-01-01T00:00:00Z",
    }
    headers = {"anthropic-version": "2023-06-01"}
    told = (await router.client.get("/v1/models", headers=headers)).json()
    assert told == {"data": [entry], "has_more": False, "first_id": "m", "last_id": "m"}
    assert (await router.client.get("/anthropic/v1/models/m")).json() == entry


async def test_each_dialect_shows_only_what_a_key_may_use(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, models=("m", "secret"))
    key = await router.user("eve", allowed_models=["m"])
    async with router.client_of(key) as client:
        assert [m["id"] for m in (await client.get("/v1/models")).json()["data"]] == ["m"]
        assert [m["name"] for m in (await client.get("/api/tags")).json()["models"]] == ["m"]
        assert (await client.post("/api/show", json={"model": "secret"})).status_code == 404
