"""The address of the Responses API."""

from __future__ import annotations

from mindrouter.gateway.dialects.form import Errors, Form
from mindrouter.gateway.dialects.responses.errors import error_body, error_event
from mindrouter.gateway.dialects.responses.native import ResponseEvents, usage_in_answer
from mindrouter.gateway.dialects.responses.reading import read_responses
from mindrouter.gateway.dialects.responses.request import to_chat
from mindrouter.gateway.dialects.responses.response import from_chat
from mindrouter.gateway.dialects.responses.stream import ResponseStream
from mindrouter.gateway.requests import Asked
from scheduler.core.jobs import Usage

#: Engines that serve ``/v1/responses`` themselves.
SPEAKERS = frozenset({"llamacpp", "vllm", "ollama"})
#: llama.cpp's events lack ``output_index``, without which OpenAI's own packages fail.
STREAMS_UNFIT = frozenset({"llamacpp"})


def _usage_in(body: bytes, asked: Asked, engine: str) -> Usage | None:
    return usage_in_answer(body)


def _watch(asked: Asked, engine: str) -> ResponseEvents:
    return ResponseEvents(prompt_tokens=asked.prompt_tokens)


RESPONSES = Form(
    dialect="openai",
    operation="responses",
    path=b"/v1/responses",
    speakers=SPEAKERS,
    streams_unfit=STREAMS_UNFIT,
    read=read_responses,
    translate=to_chat,
    whole=from_chat,
    usage_in=_usage_in,
    stream=ResponseStream,
    watch=_watch,
    errors=Errors(body=error_body, event=error_event),
)
FORMS = {"/v1/responses": RESPONSES}
