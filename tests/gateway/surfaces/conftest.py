"""A router with one scripted backend "a" of the model "m", and OpenAI's package in front."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI

from tests.running import RunningRouter
from tests.stubs.openai_stub import OpenAIStub


@pytest.fixture(autouse=True)
async def _backend(router: RunningRouter, stub: OpenAIStub) -> None:
    await router.backend(stub, "a")


@pytest.fixture
async def client(router: RunningRouter) -> AsyncIterator[AsyncOpenAI]:
    url = f"{router.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key=router.key, max_retries=0) as made:
        yield made
