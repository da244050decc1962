"""Polls over real connections to loopback stubs: what is asked, what is found, what goes wrong."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from backends import probe as probe_module
from backends.probe import ProbeResult, Target, probe
from tests.stubs.engines import (
    FAULTS,
    STUBS,
    Answer,
    OllamaModel,
    Stub,
    llamacpp_stub,
    ollama_stub,
    openai_stub,
    vllm_stub,
)


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports are used again: what one stub told must not be taken for the next one's."""
    monkeypatch.setattr(probe_module, "details", probe_module._Details())


@pytest.mark.parametrize("engine", STUBS)
@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_each_engine_is_found_out_whatever_its_url_ends_in(engine: str, suffix: str) -> None:
    with STUBS[engine]() as stub:
        result = await probe(Target(base_url=stub.url + suffix))
    assert (result.reachable, result.engine, result.error) == (True, engine, "")
    assert result.observation is not None
    assert result.observation.models


@pytest.mark.parametrize(
    ("engine", "asked"),
    [
        ("vllm", ["/health", "/metrics", "/v1/models", "/version"]),
        ("llamacpp", ["/health", "/metrics", "/props", "/v1/models"]),
        ("ollama", ["/api/ps", "/api/tags", "/api/version"]),
        (
            "sglang",
            ["/health", "/model_info", "/v1/loads?include=core,memory,queues", "/v1/models"],
        ),
        ("openai", ["/v1/models"]),
    ],
)
async def test_a_known_engine_is_asked_nothing_but_its_own_few_questions(
    engine: str, asked: list[str]
) -> None:
    with STUBS[engine]() as stub:
        await probe(Target(base_url=stub.url))
        stub.asked.clear()
        result = await probe(Target(base_url=stub.url, known_engine=engine))
    assert result.reachable
    assert sorted(request.path for request in stub.asked) == asked


async def test_another_server_at_the_same_address_is_noticed() -> None:
    with llamacpp_stub("m") as stub:
        result = await probe(Target(base_url=stub.url, known_engine="vllm"))
    assert (result.engine, result.reachable) == ("llamacpp", True)


async def test_an_engine_chosen_by_hand_is_not_doubted() -> None:
    with llamacpp_stub("m") as stub:
        result = await probe(Target(base_url=stub.url, engine="openai"))
    assert (result.engine, stub.count("/api/version")) == ("openai", 0)


async def test_the_key_is_sent_as_bearer_token_and_never_shown() -> None:
    target = Target(base_url="", api_key="sk-secret")
    with openai_stub() as stub:
        await probe(Target(base_url=stub.url, api_key="sk-secret"))
        await probe(Target(base_url=stub.url))
    sent = {request.headers.get("authorization") for request in stub.asked}
    assert sent == {"Bearer sk-secret", None}
    assert "sk-secret" not in repr(target)


async def test_a_refused_key_is_said_to_be_the_reason() -> None:
    with vllm_stub() as stub:
        stub.fault = "401"
        result = await probe(Target(base_url=stub.url))
    assert result == ProbeResult(reachable=None, error="it refuses the router's key (401)")


async def test_details_of_ollamas_models_are_asked_once_each() -> None:
    models = [OllamaModel(f"m{n}:latest") for n in range(3)]
    with ollama_stub(*models) as stub:
        for _ in range(3):
            result = await probe(Target(base_url=stub.url, known_engine="ollama"))
        assert stub.count("/api/show") == 3
    assert result.observation is not None
    assert [model.tools for model in result.observation.models or ()] == [True] * 3


async def test_a_new_digest_is_a_new_model() -> None:
    model = OllamaModel("m:latest", digest="a")
    with ollama_stub(model) as stub:
        target = Target(base_url=stub.url, known_engine="ollama")
        await probe(target)
        pulled = {"name": "m:latest", "digest": "b", "size": 1}
        stub.answers["/api/tags"] = Answer({"models": [pulled]})
        model.capabilities = ("completion",)
        result = await probe(target)
        assert stub.count("/api/show") == 2
    assert result.observation is not None
    assert [m.tools for m in result.observation.models or ()] == [False]


async def test_very_many_models_are_looked_into_a_few_at_a_time() -> None:
    models = [OllamaModel(f"m{n}:latest") for n in range(40)]
    with ollama_stub(*models) as stub:
        target = Target(base_url=stub.url, known_engine="ollama")
        first = await probe(target)
        second = await probe(target)
        assert stub.count("/api/show") == 40
    details = [
        [model.detailed for model in result.observation.models or ()].count(True)
        for result in (first, second)
        if result.observation
    ]
    assert details == [32, 40]


# ---- what goes wrong


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("known_engine", ["", "vllm", "ollama", "llamacpp", "sglang", "openai"])
async def test_whatever_a_server_does_a_poll_ends_with_a_reason(
    fault: str, known_engine: str
) -> None:
    with vllm_stub() as stub:
        stub.fault = fault
        result = await probe(Target(base_url=stub.url, known_engine=known_engine))
    assert result.observation is None
    assert result.error
    assert result.reachable is (False if fault == "503" else None)


async def test_nothing_listening_is_told_from_nothing_answering() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but it does not listen: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = await probe(Target(base_url=url))
    assert result.reachable is False
    with vllm_stub() as stub:
        stub.fault = "hang"
        result = await probe(Target(base_url=stub.url, total_seconds=0.2))
    assert result == ProbeResult(reachable=None, error="no whole answer within 0.2 s")


async def test_a_name_that_does_not_resolve_is_no_refusal() -> None:
    result = await probe(Target(base_url="http://no-such-host.invalid:1"))
    assert result.reachable is None
    assert result.error.startswith("GET /v1/models: ")


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1", "http://a\tb", "ftp://x"])
async def test_a_url_that_is_none_is_an_error_and_no_exception(url: str) -> None:
    result = await probe(Target(base_url=url))
    assert (result.reachable, result.observation) == (None, None)
    assert result.error


async def test_one_answer_that_never_comes_costs_only_itself() -> None:
    with vllm_stub() as stub:
        stub.answers["/metrics"] = stub.hang
        result = await probe(Target(base_url=stub.url, known_engine="vllm", total_seconds=2))
    assert (result.reachable, result.error) == (True, "no whole answer within 2 s")
    assert result.observation is not None
    assert result.observation.running is None
    assert [model.name for model in result.observation.models or ()] == ["smollm2"]


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "sglang"])
async def test_a_server_that_is_loading_is_not_ready_and_asked_no_more(engine: str) -> None:
    with STUBS[engine]() as stub:
        stub.answers["/health"] = FAULTS["503"]
        result = await probe(Target(base_url=stub.url, engine=engine))
        assert len(stub.asked) == 1
    assert (result.reachable, result.error) == (False, "503: not ready to serve")


async def test_a_loading_server_of_unknown_engine_is_not_ready_either() -> None:
    with llamacpp_stub() as stub:
        stub.fault = "503"
        result = await probe(Target(base_url=stub.url))
    assert (result.reachable, result.engine) == (False, "llamacpp")


async def test_a_dead_engine_behind_a_living_server_is_not_ready() -> None:
    with vllm_stub() as stub:
        stub.answers["/health"] = Answer(status=503)
        result = await probe(Target(base_url=stub.url))
    assert (result.reachable, result.engine) == (False, "vllm")


async def test_a_sleeping_vllm_is_not_ready_and_a_sleeping_llamacpp_is() -> None:
    with vllm_stub() as stub:
        page = b'vllm:engine_sleep_state{sleep_state="awake"} 0\n'
        stub.answers["/metrics"] = Answer(page)
        result = await probe(Target(base_url=stub.url))
    assert (result.reachable, result.error) == (False, "asleep until it is woken")
    with llamacpp_stub() as stub:
        props = stub.answers["/props"]
        assert isinstance(props, Answer)
        props.body["is_sleeping"] = True
        result = await probe(Target(base_url=stub.url))
        assert stub.count("/v1/embeddings") == 0
    assert result.reachable is True
    assert result.observation is not None
    assert result.observation.loaded == {}


async def test_no_redirect_is_followed() -> None:
    with openai_stub() as secret, Stub({}) as stub:
        stub.answers["/v1/models"] = Answer(status=302, headers={"Location": secret.url})
        await probe(Target(base_url=stub.url))
        assert secret.asked == []


async def test_a_compressed_answer_is_not_unpacked() -> None:
    with openai_stub() as stub:
        stub.answers["/v1/models"] = Answer(b"\x1f\x8b" * 9, headers={"Content-Encoding": "gzip"})
        result = await probe(Target(base_url=stub.url))
    assert "compressed" in result.error


async def test_an_endless_answer_is_broken_off() -> None:
    with openai_stub() as stub:
        stub.fault = "huge"
        result = await probe(Target(base_url=stub.url))
    assert result.error.startswith("GET /v1/models: an answer of more than 4194304 bytes")


async def test_hanging_servers_are_given_up_together_and_in_time() -> None:
    with vllm_stub() as stub:
        stub.fault = "hang"
        began = time.monotonic()
        targets = [Target(base_url=stub.url, total_seconds=0.5) for _ in range(20)]
        results = await asyncio.gather(*map(probe, targets))
        assert time.monotonic() - began < 5  # one after the other would take 10
    assert {result.reachable for result in results} == {None}


async def test_after_a_refusal_the_details_are_asked_anew() -> None:
    with llamacpp_stub() as stub:
        target = Target(base_url=stub.url, known_engine="llamacpp")
        await probe(target)
        stub.fault = "503"  # started again, with other flags perhaps
        await probe(target)
        stub.fault = None
        stub.answers["POST /v1/embeddings"] = Answer(status=400)
        result = await probe(target)
    assert result.observation is not None
    assert [model.embeddings for model in result.observation.models or ()] == [True]
