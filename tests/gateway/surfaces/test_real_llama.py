"""Reranking by a real llama.cpp server, in front of which nothing is made up.

Its small model was never trained to rerank: that it answers is real, its scores mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from backends.models import BackendModel
from backends.services import probe_backends
from tests.llama import llama_server
from tests.running import RunningRouter

pytestmark = pytest.mark.llama

ASKED: dict[str, Any] = {
    "model": "smollm2",
    "query": "What is Paris?",
    "documents": ["Paris is a city.", "Bananas are yellow."],
}


@pytest.fixture(scope="module")
def reranker() -> Iterator[str]:
    with llama_server("--reranking", "--ctx", "1024") as url:
        yield url


async def test_it_reranks_and_is_found_out_by_a_poll(router: RunningRouter, reranker: str) -> None:
    number = await router.backend(reranker, "real", engine="auto", models=("smollm2",))
    await router.change(probe_backends, [number])
    [row] = await router.ask(lambda: list(BackendModel.objects.filter(backend_id=number)))
    assert (row.detected_rerank, row.detected_transcription) == (True, False)
    answer = await router.client.post("/v1/rerank", json=ASKED)
    assert answer.status_code == 200
    assert sorted(row["index"] for row in answer.json()["results"]) == [0, 1]
    told = answer.json()["usage"]["prompt_tokens"]
    record = await router.record()
    assert (record.selected_backend, record.prompt_tokens) == ("real", told)
    assert (record.completion_tokens, record.usage_estimated) == (0, False)


async def test_what_it_cannot_do_is_refused_by_that_name(
    router: RunningRouter, reranker: str
) -> None:
    await router.backend(reranker, "real", engine="llamacpp", models=("smollm2",))
    speech = {"model": "smollm2", "input": "Hello", "voice": "alloy"}
    answer = await router.client.post("/v1/audio/speech", json=speech)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "capability_missing")
    audio = {"model": (None, "smollm2"), "file": ("a.wav", b"RIFF")}
    answer = await router.client.post("/v1/audio/transcriptions", files=audio)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "capability_missing")
    assert "does not support audio input" in answer.json()["error"]["message"]
