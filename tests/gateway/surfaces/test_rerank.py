"""``/v1/rerank``, as Jina's API, vLLM and llama.cpp have it."""

from __future__ import annotations

from typing import Any

import pytest

from backends.models import Alias, Backend, BackendModel
from tests.running import RunningRouter
from tests.stubs.openai_stub import Call, OpenAIStub, refuse
from tests.stubs.surfaces import (
    llamacpp_without_reranking,
    reranks,
    vllm_without_the_path,
)

ASKED: dict[str, Any] = {
    "model": "m",
    "query": "What is the capital of France?",  # 30 letters: 8 tokens
    "documents": ["Paris is the capital.", "Bananas are yellow."],  # 21 and 19 letters: 6 and 5
    "top_n": 2,
    "return_documents": True,
}
USAGE = {"total_tokens": 56}


@pytest.mark.parametrize(
    ("path", "engine", "there"),
    [
        ("/v1/rerank", "vllm", "/v1/rerank"),
        ("/v2/rerank", "llamacpp", "/v1/rerank"),
        ("/rerank", "openai", "/rerank"),
        ("/rerank", "sglang", "/v1/rerank"),
    ],
)
async def test_it_passes_unchanged_and_costs_what_is_told(
    router: RunningRouter, stub: OpenAIStub, path: str, engine: str, there: str
) -> None:
    await router.change(lambda: Backend.objects.update(engine=engine))
    stub.then(reranks(USAGE))
    answer = await router.client.post(path, json=ASKED)
    assert answer.status_code == 200
    assert answer.headers["x-mindrouter-backend"] == "a"
    told = answer.json()
    assert [row["index"] for row in told["results"]] == [1, 0]
    assert told["results"][1]["document"]["text"] == "Paris is the capital."
    assert told["usage"] == USAGE
    assert (stub.calls[0].path, stub.calls[0].body) == (there, ASKED)
    record = await router.record()
    assert (record.dialect, record.endpoint, record.outcome) == ("openai", "rerank", "completed")
    assert (record.prompt_tokens, record.completion_tokens) == (56, 0)
    assert record.usage_estimated is False


async def test_the_form_of_text_embeddings_inference_passes_too(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    async def behave(call: Call) -> None:
        await call.json([{"index": 0, "score": 0.9}])

    stub.then(behave)
    asked = {"model": "m", "query": "a" * 8, "texts": ["b" * 4, "b" * 4]}
    answer = await router.client.post("/rerank", json=asked)
    assert (answer.json(), stub.calls[0].body) == ([{"index": 0, "score": 0.9}], asked)
    record = await router.record()
    assert (record.prompt_tokens, record.usage_estimated) == (2 * 2 + 2 * 1, True)


async def test_without_usage_the_query_counts_once_for_each_document(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(reranks({}))
    assert (await router.client.post("/v1/rerank", json=ASKED)).status_code == 200
    record = await router.record()
    assert record.prompt_tokens == 2 * 8 + 6 + 5
    assert (record.completion_tokens, record.usage_estimated) == (0, True)


async def test_many_documents_may_be_longer_together_than_the_models_context(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.change(lambda: BackendModel.objects.update(context_length=512))
    stub.then(reranks(USAGE))
    documents = ["word " * 200] * 10  # 250 tokens each
    answer = await router.client.post("/v1/rerank", json=ASKED | {"documents": documents})
    assert answer.status_code == 200


async def test_an_alias_is_rewritten(router: RunningRouter, stub: OpenAIStub) -> None:
    await router.change(Alias.objects.create, name="best", targets=["m"])
    stub.then(reranks(USAGE))
    assert (await router.client.post("/v1/rerank", json=ASKED | {"model": "best"})).is_success
    assert stub.calls[0].body["model"] == "m"


async def test_a_model_that_is_known_not_to_rerank_is_refused_before_it_waits(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.change(lambda: BackendModel.objects.update(rerank=False))
    answer = await router.client.post("/v1/rerank", json=ASKED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "capability_missing")
    assert "does not rerank" in answer.json()["error"]["message"]
    assert stub.calls == []
    record = await router.record()
    assert (record.outcome, record.reason) == ("refused", "capability_missing")


@pytest.mark.parametrize("unable", [vllm_without_the_path, llamacpp_without_reranking])
async def test_a_backend_that_turns_out_unable_leaves_it_to_another(
    router: RunningRouter, stub: OpenAIStub, unable: Any
) -> None:
    async with await OpenAIStub.start() as other:
        stub.behaviour = unable
        other.behaviour = reranks(USAGE)
        await router.backend(other, "b")
        for _ in range(3):
            assert (await router.client.post("/v1/rerank", json=ASKED)).status_code == 200
    records = await router.records()
    assert {record.selected_backend for record in records} == {"b"}
    assert {record.outcome for record in records} == {"completed"}
    tried = [[attempt["backend"] for attempt in record.attempts] for record in records]
    assert ["a", "b"] in tried


@pytest.mark.parametrize("unable", [vllm_without_the_path, llamacpp_without_reranking])
async def test_where_no_backend_turns_out_able_it_is_refused_by_that_name(
    router: RunningRouter, stub: OpenAIStub, unable: Any
) -> None:
    stub.behaviour = unable
    answer = await router.client.post("/v1/rerank", json=ASKED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "capability_missing")
    assert "/v1/rerank" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    record = await router.record()
    assert (record.outcome, record.charged_tokens) == ("failed", 0)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"query": None}, "query"),
        ({"documents": []}, "documents"),
        ({"model": ""}, "model"),
    ],
)
async def test_what_is_missing_is_named(
    router: RunningRouter, stub: OpenAIStub, change: dict[str, Any], param: str
) -> None:
    answer = await router.client.post("/v1/rerank", json=ASKED | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", param)
    assert stub.calls == []


async def test_an_unknown_model_is_not_found(router: RunningRouter) -> None:
    answer = await router.client.post("/v1/rerank", json=ASKED | {"model": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_backends_own_refusal_keeps_its_status_and_words(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(refuse(400, "top_n must be positive"))
    answer = await router.client.post("/v1/rerank", json=ASKED)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "top_n must be positive",
    )
