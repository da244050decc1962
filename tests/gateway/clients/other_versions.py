"""Packages that cannot share an environment with the newest ones, each in its own; and Node's.

Not collected by default: ``make test-clients`` makes the environments and runs this file.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.clients.acting import ARGUMENTS, DATA_URL, as_told
from tests.running import RunningRouter, until
from tests.stubs.openai_stub import OpenAIStub, held

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
NODE = HERE / "node"
WORDS = "Hello, world"
VECTOR = [0.25, -0.5, 1.0]
CITY = json.loads(ARGUMENTS)
CALLS = [[f"call_{n}", "get_weather", ARGUMENTS] for n in range(2)]
PARSED_CALLS = [[f"call_{n}", "get_weather", CITY] for n in range(2)]

pytestmark = pytest.mark.timeout(300)  # clients that wait as they are told, on a busy machine
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "node_modules").is_dir(),
    reason="needs Node 20 with npm, and the packages that 'make test-clients' installs for them",
)


@pytest.fixture(autouse=True)
async def _backend(router: RunningRouter, stub: OpenAIStub) -> None:
    """It speaks no more than chat, completions and embeddings."""
    stub.behaviour = as_told
    await router.backend(stub, "a", engine="sglang")


@asynccontextmanager
async def whoever_waits_is_removed(router: RunningRouter) -> AsyncIterator[None]:
    """There is a model "full": the one request that comes to wait for it is removed."""
    ended = asyncio.Event()

    def waiting() -> list[str]:
        tickets = (claim.ticket for claim in router.runtime._claims.values())
        full = (t for t in tickets if t.job.model_name == "full" and t.state == "queued")
        return [ticket.job.request_id for ticket in full]

    async def remove() -> None:
        await until(lambda: bool(waiting()), within=60)
        assert await router.runtime._evict(*waiting())

    async with await OpenAIStub.start("full") as full, asyncio.TaskGroup() as tasks:
        full.behaviour = held(ended)
        await router.backend(full, "full", max_concurrent=1)
        tasks.create_task(router.chat(model="full"))
        await full.until_calls(1)
        tasks.create_task(remove())
        yield
        ended.set()


async def run(router: RunningRouter, *command: str | Path) -> Any:
    """What a client's script has told."""
    process = await asyncio.create_subprocess_exec(
        *command,
        router.url,
        router.key,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "DATA_URL": DATA_URL},
    )
    output, _ = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])  # litellm says other things before


async def run_python(router: RunningRouter, name: str) -> Any:
    """A script in the environment of its name."""
    python = ROOT / ".venv-clients" / name / "bin" / "python"
    # -P: a script is named as its package, and must not be found in its place.
    return await run(router, python, "-P", HERE / "scripts" / f"{name}.py")


async def has_seen_and_stopped(router: RunningRouter, stub: OpenAIStub) -> None:
    """The picture has come to the backend, and the client's leaving stopped it."""
    assert any(DATA_URL in json.dumps(call.body) for call in stub.calls)
    (endless,) = (call for call in stub.calls if "endless" in json.dumps(call.body))
    await asyncio.wait_for(endless.ended.wait(), 60)
    reasons = [record.reason for record in await router.records()]
    assert reasons.count("client_disconnected") == 1


async def test_openai_1_and_anthropic_0(router: RunningRouter, stub: OpenAIStub) -> None:
    async with whoever_waits_is_removed(router):
        assert await run_python(router, "older") == {
            "chat": [WORDS, 10],
            "stream": WORDS,
            "tools": CALLS,
            "schema": 36,
            "embeddings": VECTOR,
            "models": ["full", "m"],
            "responses": WORDS,
            "unknown model": "model_not_found",
            "waits after 429": [WORDS, True],
            "waits after 503": [WORDS, True],
            "hopeless": [403, "permission_denied"],
            "message": [WORDS, "end_turn", True],
            "message stream": WORDS,
            "message tools": PARSED_CALLS,
            "count": 6,
            "unknown model of anthropic": "not_found_error",
            "before the break": "Hello",
            "broken": True,
            "message before the break": "Hello",
            "message broken": True,
        }
    await has_seen_and_stopped(router, stub)


async def test_langchain(router: RunningRouter, stub: OpenAIStub) -> None:
    assert await run_python(router, "langchain") == {
        "chat": [WORDS, 10],
        "stream": WORDS,
        "embeddings": VECTOR,
        "responses": WORDS,
        "tools": [CITY] * 2,
        "schema": {"age": 36},
        "unknown model": "model_not_found",
        "waits after 429": [WORDS, True],
        "broken": ["Hello", True],
    }
    await has_seen_and_stopped(router, stub)


async def test_litellm(router: RunningRouter, stub: OpenAIStub) -> None:
    assert await run_python(router, "litellm") == {
        "chat": [WORDS, 10],
        "stream": WORDS,
        "tools": CALLS,
        "schema": {"age": 36},
        "embeddings": VECTOR,
        "unknown model": 404,
        "waits after 429": [WORDS, True],
        "broken": ["Hello", True],
        "message": [WORDS, 10],
        "ollama chat": [WORDS, 10],
        "ollama stream": WORDS,
    }
    await has_seen_and_stopped(router, stub)


@needs_node
async def test_npm_openai(router: RunningRouter, stub: OpenAIStub) -> None:
    async with whoever_waits_is_removed(router):
        assert await run(router, "node", NODE / "openai.mjs") == {
            "chat": [WORDS, 10],
            "stream": [WORDS, 10],
            "tools": CALLS,
            "tools stream": CALLS,
            "vision": WORDS,
            "schema": {"age": 36},
            "embeddings": VECTOR,
            "models": ["full", "m"],
            "responses": WORDS,
            "responses stream": WORDS,
            "unknown model": "model_not_found",
            "waits after 429": [WORDS, True],
            "waits after 503": [WORDS, True],
            "hopeless": [403, "permission_denied"],
            "before the break": "Hello",
            "broken": True,
            "cancelled": True,
        }
    await has_seen_and_stopped(router, stub)


@needs_node
async def test_npm_ai(router: RunningRouter, stub: OpenAIStub) -> None:
    assert await run(router, "node", NODE / "ai.mjs") == {
        "chat": [WORDS, 10],
        "stream": [WORDS, 10],
        "tools": PARSED_CALLS,
        "tools stream": PARSED_CALLS,
        "vision": WORDS,
        "schema": {"age": 36},
        "embeddings": VECTOR,
        "unknown model": [404, False, "No backend has the model x."],
        "waits after 429": [WORDS, True],
        "waits after 503": [WORDS, True],
        "broken": ["Hello", True],
        "cancelled": "abort",
    }
    await has_seen_and_stopped(router, stub)


@needs_node
async def test_npm_anthropic(router: RunningRouter, stub: OpenAIStub) -> None:
    async with whoever_waits_is_removed(router):
        assert await run(router, "node", NODE / "anthropic.mjs") == {
            "chat": [WORDS, "end_turn", 3],
            "stream": WORDS,
            "tools": PARSED_CALLS,
            "tools stream": PARSED_CALLS,
            "vision": WORDS,
            "count": 6,
            "models": ["full", "m"],
            "unknown model": "not_found_error",
            "waits after 429": [WORDS, True],
            "waits after 503": [WORDS, True],
            "hopeless": [403, "permission_error"],
            "broken": ["Hello", True],
            "cancelled": True,
        }
    await has_seen_and_stopped(router, stub)


@needs_node
async def test_npm_ollama(router: RunningRouter, stub: OpenAIStub) -> None:
    assert await run(router, "node", NODE / "ollama.mjs") == {
        "chat": [WORDS, "stop", 3],
        "stream": WORDS,
        "generate": WORDS,
        "tools": [["get_weather", CITY]] * 2,
        "vision": WORDS,
        "schema": {"age": 36},
        "embeddings": [VECTOR],
        "models": ["m"],
        "unknown model": [404, "No backend has the model x."],
        "busy": 429,
        "broken": ["Hello", True],
        "cancelled": "AbortError",
    }
    await has_seen_and_stopped(router, stub)
