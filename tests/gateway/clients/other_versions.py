"""Packages that cannot share an environment with the newest ones, each in its own.

Not collected by default: ``make test-clients`` makes the environments and runs this file.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.gateway.clients.acting import breaks, calls_tools
from tests.running import RunningRouter
from tests.stubs.openai_stub import OpenAIStub, ordinary

ROOT = Path(__file__).resolve().parents[3]
WORDS = "Hello, world"


async def run(router: RunningRouter, name: str) -> Any:
    """What a script in the environment of its name has told."""
    script = Path(__file__).parent / "scripts" / f"{name}.py"
    process = await asyncio.create_subprocess_exec(
        str(ROOT / ".venv-clients" / name / "bin" / "python"),
        str(script),
        router.url,
        router.key,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    return json.loads(output)


async def test_openai_1_and_anthropic_0(router: RunningRouter, stub: OpenAIStub) -> None:
    await router.backend(stub, "a", engine="sglang")
    stub.then(*[ordinary] * 6, breaks)
    assert await run(router, "older") == {
        "chat": [WORDS, 10],
        "stream": WORDS,
        "embeddings": [0.25, -0.5, 1.0],
        "models": ["m"],
        "responses": WORDS,
        "unknown model": "model_not_found",
        "message": [WORDS, "end_turn", True],
        "message stream": WORDS,
        "count": 6,
        "unknown model of anthropic": "not_found_error",
        "before the break": "Hello",
        "broken": True,
    }


async def test_langchain(router: RunningRouter, stub: OpenAIStub) -> None:
    await router.backend(stub, "a", engine="sglang")
    stub.then(*[ordinary] * 4, calls_tools)
    assert await run(router, "langchain") == {
        "chat": [WORDS, 10],
        "stream": WORDS,
        "embeddings": [0.25, -0.5, 1.0],
        "responses": WORDS,
        "tools": [{"city": "Paris"}] * 2,
    }
