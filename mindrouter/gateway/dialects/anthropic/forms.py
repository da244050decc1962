"""The addresses of Anthropic's API."""

from __future__ import annotations

from mindrouter.gateway.dialects.anthropic.errors import error_body, error_event
from mindrouter.gateway.dialects.anthropic.native import MessageEvents, usage_in_answer
from mindrouter.gateway.dialects.anthropic.reading import read_count_tokens, read_messages
from mindrouter.gateway.dialects.anthropic.request import to_chat
from mindrouter.gateway.dialects.anthropic.response import count_tokens_body, from_chat
from mindrouter.gateway.dialects.anthropic.stream import MessageStream
from mindrouter.gateway.dialects.form import Errors, Form, OwnAnswer
from mindrouter.gateway.dialects.translation import Reply, Timings
from mindrouter.gateway.requests import Asked
from scheduler.core.jobs import Usage

NAME = "anthropic"
#: Engines that serve ``/v1/messages`` themselves.
SPEAKERS = frozenset({"llamacpp", "vllm", "ollama"})
#: Those that also count, at ``/v1/messages/count_tokens``; for others the estimate must do.
COUNTERS = frozenset({"llamacpp", "vllm"})
#: The engine that counts a prompt's cached tokens among the others.
_COUNTS_CACHED_IN = "vllm"
ERRORS = Errors(body=error_body, event=error_event)


def _whole(body: bytes, reply: Reply, timings: Timings) -> bytes:
    return from_chat(body, reply)


def _usage_in(body: bytes, asked: Asked, engine: str) -> Usage | None:
    apart = engine != _COUNTS_CACHED_IN
    return usage_in_answer(body, cached_apart=apart, prompt_tokens=asked.prompt_tokens)


def _watch(asked: Asked, engine: str) -> MessageEvents:
    apart = engine != _COUNTS_CACHED_IN
    return MessageEvents(prompt_tokens=asked.prompt_tokens, cached_apart=apart)


MESSAGES = Form(
    dialect=NAME,
    operation="messages",
    path=b"/v1/messages",
    speakers=SPEAKERS,
    read=read_messages,
    translate=to_chat,
    whole=_whole,
    usage_in=_usage_in,
    stream=MessageStream,
    watch=_watch,
    errors=ERRORS,
)


def _count(asked: Asked) -> OwnAnswer:
    return lambda reply: count_tokens_body(asked.prompt_tokens)


def _counted(body: bytes, asked: Asked, engine: str) -> Usage:
    """Counting is free: no model reads the prompt."""
    return Usage(prompt_tokens=0, completion_tokens=0)


COUNT_TOKENS = Form(
    dialect=NAME,
    operation="messages.count_tokens",
    path=b"/v1/messages/count_tokens",
    speakers=COUNTERS,
    read=read_count_tokens,
    translate=to_chat,
    whole=_whole,
    usage_in=_counted,
    stream=None,
    watch=None,
    errors=ERRORS,
    own_answer=_count,
)
FORMS = {
    f"{start}{form.path.decode()}": form
    for start in ("", "/anthropic")
    for form in (MESSAGES, COUNT_TOKENS)
}
