"""Ollama's lists of models, as its own SDK reads them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import ollama
import pytest

from mindrouter.gateway.dialects.ollama import models
from mindrouter.gateway.dialects.ollama.errors import error_body
from mindrouter.gateway.errors import GatewayError
from scheduler.core.jobs import ModelSpec

CHAT = ModelSpec(name="qwen3:8b", tools=True, vision=True, context_length=40960, vram_mib=5000)
EMBED = ModelSpec(name="minilm", embeddings=True)
PAIRS = [("qwen3:8b", CHAT), ("small", EMBED)]


def client() -> ollama.Client:
    def serve(sent: httpx.Request) -> httpx.Response:
        path = sent.url.path
        if path in models.MANAGING:
            error = models.managing_refused()
            return httpx.Response(error.status, content=error_body(error, "r1"))
        if path == "/api/show":
            spec = dict(PAIRS)[models.read_show(sent.read())]
            return httpx.Response(200, content=models.show_body(spec))
        body = models.tags_body(PAIRS) if path == "/api/tags" else models.ps_body(PAIRS[:1])
        return httpx.Response(200, content=body)

    return ollama.Client(host="http://router.test", transport=httpx.MockTransport(serve))


def test_a_list_of_what_may_be_asked_for() -> None:
    listed = client().list().models
    assert [model.model for model in listed] == ["qwen3:8b", "small"]
    assert listed[0].size == 5000 * 1024 * 1024
    assert len(listed[0].digest or "") == 64
    assert listed[0].digest != listed[1].digest


def test_capabilities_are_told_in_ollamas_words() -> None:
    entries = json.loads(models.tags_body(PAIRS))["models"]
    assert [entry["capabilities"] for entry in entries] == [
        ["completion", "tools", "vision"],
        ["embedding"],
    ]


def test_what_is_loaded() -> None:
    (running,) = client().ps().models
    assert running.model == "qwen3:8b"
    assert running.size_vram == running.size == 5000 * 1024 * 1024
    assert running.context_length == 40960


def test_one_model_shown() -> None:
    shown = client().show("qwen3:8b")
    assert shown.capabilities == ["completion", "tools", "vision"]
    assert shown.modelinfo == {
        "general.architecture": "unknown",
        "unknown.context_length": 40960,
    }


@pytest.mark.parametrize("body", [{"model": "m"}, {"name": "m"}, {"model": "m", "verbose": True}])
def test_a_model_is_named_in_either_word(body: dict[str, Any]) -> None:
    assert models.read_show(json.dumps(body).encode()) == "m"


@pytest.mark.parametrize("body", [b"{}", b"[]", b"", b'{"model":5}'])
def test_a_question_without_a_model_is_refused(body: bytes) -> None:
    with pytest.raises(GatewayError) as caught:
        models.read_show(body)
    assert caught.value.param == "model"


def test_models_are_not_managed_through_the_router() -> None:
    with pytest.raises(ollama.ResponseError, match="administrator") as caught:
        client().pull("m")
    assert caught.value.status_code == 403


def test_the_version() -> None:
    assert json.loads(models.version_body()) == {"version": "0.12.0"}
