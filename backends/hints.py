"""Hints to Ollama: load a model now, or put it out of memory. Other engines load by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from backends.catalog import effective_engine
from backends.engines.replies import Question
from backends.fetch import UnansweredError, ask, new_client
from backends.models import BackendModel
from backends.probe import Target
from backends.services import run, target_of
from backends.trial import read_answer

#: How long Ollama keeps a loaded model that nobody asks for.
KEEP_ALIVE = "30m"
#: Ollama drops a load whose client leaves, so this must do for large models.
LOAD_SECONDS = 180.0


def takes_hints(row: BackendModel) -> bool:
    """Whether the model's backend is an Ollama server. Takes ``row.backend.status``."""
    status = getattr(row.backend, "status", None)
    detected = status.detected_engine if status else ""
    return effective_engine(row.backend.engine, detected) == "ollama"


def hint(rows: Sequence[BackendModel], *, load: bool) -> list[str]:
    """Load or unload these models of Ollama servers, all at the same time; returns for each ""
    or what went wrong."""
    asked = [(target_of(row.backend), _question(row, load=load)) for row in rows]
    found: list[str] = run(_ask_all, asked)
    return found


def _question(row: BackendModel, *, load: bool) -> Question:
    # Without a prompt nothing is generated. To unload, /api/generate serves embedding models too.
    values = (row.embeddings, row.detected_embeddings)
    embeds = next((value for value in values if value is not None), False)
    if load and embeds:
        body: dict[str, Any] = {"model": row.name, "input": [], "keep_alive": KEEP_ALIVE}
        return Question("/api/embed", "POST", msgspec.json.encode(body))
    body = {"model": row.name, "stream": False, "keep_alive": KEEP_ALIVE if load else 0}
    return Question("/api/generate", "POST", msgspec.json.encode(body))


async def _ask_all(asked: Sequence[tuple[Target, Question]]) -> list[str]:
    return list(await asyncio.gather(*(_ask(*one) for one in asked)))


async def _ask(target: Target, question: Question) -> str:
    key = target.api_key
    headers = {"authorization": f"Bearer {key}"} if key else None
    try:
        async with (
            asyncio.timeout(LOAD_SECONDS),
            new_client(connect_timeout=target.connect_timeout, headers=headers) as client,
        ):
            reply = await ask(client, target.root, question)
    except TimeoutError:
        return f"no answer within {LOAD_SECONDS:g} s"
    except UnansweredError as error:
        return str(error)
    return "" if reply.status == 200 else read_answer(reply)["error"]
