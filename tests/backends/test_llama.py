"""Polls of a real llama.cpp server with a real small model, from start to stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest

from backends.engines.observation import ModelInfo
from backends.probe import ProbeResult, Target, probe
from backends.services import probe_backends
from backends.trial import try_backend
from tests.factories import make_backend
from tests.llama import llama_server

pytestmark = pytest.mark.llama

Start = Callable[..., str]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a server with these options; its URL. All are stopped in the end."""
    with ExitStack() as running:

        def one(*options: str) -> str:
            return running.enter_context(llama_server(*options))

        yield one


async def until(url: str, wanted: Callable[[ProbeResult], bool]) -> ProbeResult:
    """Poll until the result is as wanted; what happens in the server takes its time."""
    ends = time.monotonic() + 20
    while True:
        result = await probe(Target(base_url=url, known_engine="llamacpp"))
        if wanted(result) or time.monotonic() > ends:
            return result
        await asyncio.sleep(0.05)


async def test_an_idle_server_tells_its_model_slots_and_abilities(start: Start) -> None:
    url = start("--slots", "2", "--ctx", "1024", "--alias", "tiny")
    result = await probe(Target(base_url=url + "/v1"))
    assert (result.reachable, result.engine, result.error) == (True, "llamacpp", "")
    seen = result.observation
    assert seen is not None
    assert seen.models == (
        ModelInfo(
            name="tiny",
            vision=False,
            tools=False,
            json=True,
            embeddings=False,
            rerank=False,
            transcription=False,
            context_length=512,  # of 1024 for two slots
        ),
    )
    assert (seen.running, seen.waiting, seen.slots, seen.loaded) == (0, 0, 2, {"tiny": None})


async def test_a_busy_server_tells_what_runs_and_what_waits(start: Start) -> None:
    url = start("--slots", "2", "--ctx", "4096")
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        requests = [
            asyncio.create_task(client.post(f"{url}/v1/completions", json=body)) for _ in range(5)
        ]
        result = await until(
            url, lambda r: r.observation is not None and r.observation.waiting == 3
        )
        assert result.observation is not None
        assert (result.observation.running, result.observation.waiting) == (2, 3)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
    result = await until(url, lambda r: r.observation is not None and r.observation.running == 0)
    assert result.observation is not None
    assert result.observation.running == 0


async def test_a_server_with_a_key_and_embeddings_is_read_with_the_key_only(start: Start) -> None:
    url = start("--embeddings", "--api-key", "sk-right")
    refused = await probe(Target(base_url=url, api_key="sk-wrong"))
    assert (refused.reachable, refused.engine) == (None, "llamacpp")
    assert "refuses the router's key" in refused.error
    result = await probe(Target(base_url=url, api_key="sk-right"))
    assert result.observation is not None
    assert [model.embeddings for model in result.observation.models or ()] == [True]


async def test_polls_let_a_server_sleep_and_do_not_wake_it(start: Start) -> None:
    url = start("--sleep", "1")
    asleep = await until(url, lambda r: bool(r.observation and r.observation.sleeping))
    for _ in range(3):
        again = await probe(Target(base_url=url, known_engine="llamacpp"))
        assert again.observation is not None
        assert (again.reachable, again.observation.sleeping) == (True, True)
    assert asleep.observation is not None
    assert asleep.observation.loaded == {}


@pytest.mark.django_db
def test_its_model_can_be_asked_for_after_one_probe(start: Start) -> None:
    from backends.catalog import models_by_name
    from backends.services import probe_backends

    backend = make_backend(base_url=start("--alias", "tiny"))
    probe_backends([backend.pk])
    spec = models_by_name("llamacpp", backend.models.all())["tiny"]
    assert (spec.name, spec.tools, spec.context_length) == ("tiny", False, 2048)


@pytest.mark.django_db(transaction=True)
def test_a_real_server_answers_a_trial_chat_and_a_trial_embedding(start: Start) -> None:
    chat = make_backend(base_url=start("--api-key", "sk-real"), api_key="sk-real")
    vectors = make_backend(base_url=start("--embeddings"))
    probe_backends([chat.pk, vectors.pk])
    said = try_backend(chat, "smollm2")
    assert (said.status, said.error, said.path) == (200, "", "/v1/chat/completions")
    assert said.answer
    embedded = try_backend(vectors, "smollm2")
    assert (embedded.status, embedded.error, embedded.path) == (200, "", "/v1/embeddings")
    assert embedded.answer == "An embedding of 576 numbers."
