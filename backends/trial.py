"""A real request straight to a backend, past queue and shares: does it serve?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from audit.models import Deed
from backends.catalog import effective_engine, models_by_name
from backends.engines.replies import Question, Reply, mapping, mappings, number
from backends.fetch import UnansweredError, ask, new_client
from backends.models import Backend
from backends.probe import Target
from backends.services import run, target_of
from scheduler.core.jobs import ModelSpec

#: Enough for a server that has to load the model first.
TRIAL_SECONDS = 60.0
PROMPT = "Say hello in one short sentence."
_MAX_TOKENS = 64
_MOST_SHOWN = 2000
#: What a model that is for something else than text is asked, by its capability.
_TRIED_WITH: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "embeddings": ("/v1/embeddings", lambda prompt: {"input": prompt}),
    "rerank": ("/v1/rerank", lambda prompt: {"query": prompt, "documents": [prompt]}),
    "speech": ("/v1/audio/speech", lambda prompt: {"input": prompt, "voice": "alloy"}),
    "images": ("/v1/images/generations", lambda prompt: {"prompt": prompt}),
    "moderation": ("/v1/moderations", lambda prompt: {"input": prompt}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of one request. ``status`` None: no answer; ``error`` "" after a good one."""

    backend: str
    model_name: str
    path: str
    seconds: float
    status: int | None = None
    answer: str = ""
    error: str = ""

    @property
    def succeeded(self) -> bool:
        return not self.error


def offered_models(backend: Backend) -> dict[str, str]:
    """{model name: what it is tried with, "" for a chat}, as the backend names them, for those it
    offers.

    Takes the rows of ``backend.models`` and ``backend.status``.
    """
    status = getattr(backend, "status", None)
    engine = effective_engine(backend.engine, status.detected_engine if status else "")
    specs = models_by_name(engine, backend.models.all()).values()
    return {spec.name: _purpose(spec) for spec in sorted(specs, key=lambda s: s.name)}


def _purpose(spec: ModelSpec) -> str:
    """Transcribing is none: it takes a recording, and most models that hear also chat."""
    return next((name for name in _TRIED_WITH if getattr(spec, name) is True), "")


def try_backend(backend: Backend, model_name: str, prompt: str = PROMPT) -> Trial:
    """Ask one model of a backend. Raises nothing for what the server does."""
    purpose = offered_models(backend).get(model_name, "")
    _note(backend, model_name)
    found: Trial = run(_try, backend.name, target_of(backend), model_name, purpose, prompt)
    return found


def try_first_models(backends: Iterable[Backend]) -> list[Trial]:
    """Ask the first model of each backend, all at the same time."""
    asked = []
    for backend in backends:
        models = offered_models(backend)
        name = next(iter(models), "")
        _note(backend, name)
        asked.append((backend.name, target_of(backend), name, models.get(name, ""), PROMPT))
    found: list[Trial] = run(_try_all, asked)
    return found


def _note(backend: Backend, model_name: str) -> None:
    Deed.note(f"backend {backend.name}, model {model_name or 'none'}", "tested")


async def _try_all(asked: Sequence[tuple[str, Target, str, str, str]]) -> list[Trial]:
    return list(await asyncio.gather(*(_try(*one) for one in asked)))


async def _try(name: str, target: Target, model_name: str, purpose: str, prompt: str) -> Trial:
    question = _question(purpose, model_name, prompt)
    started = time.monotonic()

    def trial(**found: Any) -> Trial:
        seconds = time.monotonic() - started
        path = question.path
        return Trial(backend=name, model_name=model_name, path=path, seconds=seconds, **found)

    if not model_name:
        return trial(error="It offers no model.")
    key = target.api_key
    headers = {"authorization": f"Bearer {key}"} if key else None
    try:
        async with (
            asyncio.timeout(TRIAL_SECONDS),
            new_client(connect_timeout=target.connect_timeout, headers=headers) as client,
        ):
            reply = await ask(client, target.root, question)
    except TimeoutError:
        return trial(error=f"No whole answer within {TRIAL_SECONDS:g} s.")
    except UnansweredError as error:
        return trial(error=str(error))
    answer = read_answer(reply)
    if purpose == "speech" and reply.status == 200 and not reply.body.startswith((b"{", b"<")):
        answer = _heard(reply)
    return trial(status=reply.status, **answer)


def _question(purpose: str, model_name: str, prompt: str) -> Question:
    chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": _MAX_TOKENS}
    path, fields = "/v1/chat/completions", chat
    if purpose:
        path, ask_with = _TRIED_WITH[purpose]
        fields = ask_with(prompt)
    return Question(path, "POST", msgspec.json.encode({"model": model_name, **fields}))


def read_answer(reply: Reply) -> dict[str, str]:
    """``answer`` and ``error`` of a reply; exactly one of them is not empty."""
    try:
        document = mapping(msgspec.json.decode(reply.body))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        document = {}
    if reply.status != 200:
        return {"answer": "", "error": _message(document) or f"Status {reply.status}."}
    text = _said(document) or _vector(document) or _made(document)
    if text:
        return {"answer": text[:_MOST_SHOWN], "error": ""}
    return {"answer": "", "error": "The answer has nothing in it that was asked for."}


def _message(document: dict[str, Any]) -> str:
    error = document.get("error")
    message = mapping(error).get("message", error) or document.get("detail")
    return message[:_MOST_SHOWN] if isinstance(message, str) else ""


def _said(document: dict[str, Any]) -> str:
    """The text of a chat; of a model that is still thinking, its thoughts."""
    for choice in mappings(document.get("choices"))[:1]:
        message = mapping(choice.get("message"))
        for name in ("content", "reasoning_content", "reasoning"):
            text = message.get(name)
            if isinstance(text, str) and text.strip():
                return text.strip()
    return ""


def _vector(document: dict[str, Any]) -> str:
    for entry in mappings(document.get("data"))[:1]:
        vector = entry.get("embedding")
        if isinstance(vector, list) and vector and all(_is_number(value) for value in vector):
            return f"An embedding of {len(vector)} numbers."
    return ""


def _made(document: dict[str, Any]) -> str:
    """Of an answer that ranks, judges or draws."""
    for entry in mappings(document.get("data"))[:1]:
        if entry.get("b64_json") or entry.get("url"):
            return "An image."
    for entry in mappings(document.get("results"))[:1]:
        if "relevance_score" in entry:
            return f"A score of {entry['relevance_score']}."
        if "flagged" in entry:
            return "Flagged." if entry["flagged"] else "Not flagged."
    return ""


def _heard(reply: Reply) -> dict[str, str]:
    if not reply.body:
        return {"answer": "", "error": "The answer is empty."}
    return {"answer": f"{len(reply.body):,} bytes of audio.", "error": ""}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and number(abs(value)) is not None
