"""The engines by name, and how to tell which one answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backends.engines import llamacpp, ollama, openai, sglang, vllm
from backends.engines.observation import Observation
from backends.engines.replies import Question, Replies, json_of, mapping, text


@dataclass(frozen=True, slots=True)
class Reader:
    """How an engine is polled: the first question tells whether it lives, the others are asked
    when it does, ``follow_up`` names what the answers call for, ``parse`` puts all together."""

    questions: tuple[Question, ...]
    follow_up: Callable[[Replies], tuple[Question, ...]]
    parse: Callable[[Replies], Observation]


ENGINES: dict[str, Reader] = {
    "vllm": Reader(vllm.QUESTIONS, vllm.follow_up, vllm.parse),
    "llamacpp": Reader(llamacpp.QUESTIONS, llamacpp.follow_up, llamacpp.parse),
    "ollama": Reader(ollama.QUESTIONS, ollama.follow_up, ollama.parse),
    "sglang": Reader(sglang.QUESTIONS, sglang.follow_up, sglang.parse),
    "openai": Reader(openai.QUESTIONS, openai.follow_up, openai.parse),
}

#: Asked of a backend of unknown engine.
DETECTION = (openai.MODELS, ollama.VERSION, vllm.VERSION, sglang.INFO)

_OWNERS = {"vllm": "vllm", "llamacpp": "llamacpp", "sglang": "sglang"}


def detect(replies: Replies) -> str:
    """The engine that gave these answers, or "" when they tell nothing.

    Ollama comes first, for it alone has ``/api/version``: SGLang and llama.cpp copy some of its
    other paths. A server that only lists models is a plain OpenAI-compatible one.
    """
    if text(mapping(json_of(replies, ollama.VERSION)).get("version")):
        return "ollama"
    models = openai.listed(replies)
    for _, entry in models or ():
        owner = entry.get("owned_by")
        if isinstance(owner, str) and owner in _OWNERS:
            return _OWNERS[owner]
    if any(reply.server.startswith("llama.cpp") for reply in replies.values()):
        return "llamacpp"
    if text(mapping(json_of(replies, sglang.INFO)).get("model_path"), 1000):
        return "sglang"
    return "" if models is None else "openai"
