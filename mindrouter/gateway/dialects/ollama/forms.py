"""The addresses of Ollama's API that generate or embed."""

from __future__ import annotations

from collections.abc import Callable

from mindrouter.gateway.dialects.form import NDJSON, Errors, Form, OwnAnswer
from mindrouter.gateway.dialects.ollama import reading, request, response
from mindrouter.gateway.dialects.ollama.errors import error_body, error_event
from mindrouter.gateway.dialects.ollama.native import ChatLines, usage_in_answer
from mindrouter.gateway.dialects.ollama.stream import LineStream
from mindrouter.gateway.dialects.translation import Reply, Timings
from mindrouter.gateway.requests import Asked
from scheduler.core.jobs import Usage

NAME = "ollama"
#: SGLang copies some of these addresses, but not all that they can be asked.
SPEAKERS = frozenset({"ollama"})
ERRORS = Errors(body=error_body, event=error_event)


def _usage_in(body: bytes, asked: Asked, engine: str) -> Usage | None:
    return usage_in_answer(body, prompt_tokens=asked.prompt_tokens)


def _watch(asked: Asked, engine: str) -> ChatLines:
    return ChatLines(prompt_tokens=asked.prompt_tokens)


def _whole(form: response.Form) -> Callable[[bytes, Reply, Timings], bytes]:
    def whole(body: bytes, reply: Reply, timings: Timings) -> bytes:
        return response.from_chat(body, reply, timings, form)

    return whole


def _stream(form: response.Form) -> Callable[[Reply], LineStream]:
    def stream(reply: Reply) -> LineStream:
        return LineStream(reply, form)

    return stream


def _loading(form: response.Form, prompt_field: str) -> Callable[[Asked], OwnAnswer | None]:
    """A request without a prompt asks for a model to be loaded, which is its server's business."""

    def own_answer(asked: Asked) -> OwnAnswer | None:
        wanted = reading.asks_to_load(asked, prompt_field)
        if wanted is None:
            return None
        return lambda reply: response.load_body(reply, form, wanted)

    return own_answer


CHAT = Form(
    dialect=NAME,
    operation="ollama.chat",
    path=b"/api/chat",
    speakers=SPEAKERS,
    read=reading.read_chat,
    translate=request.chat_to_chat,
    whole=_whole("chat"),
    usage_in=_usage_in,
    stream=_stream("chat"),
    watch=_watch,
    errors=ERRORS,
    stream_type=NDJSON,
    own_answer=_loading("chat", "messages"),
)
GENERATE = Form(
    dialect=NAME,
    operation="ollama.generate",
    path=b"/api/generate",
    speakers=SPEAKERS,
    read=reading.read_generate,
    translate=request.generate_to_chat,
    whole=_whole("generate"),
    usage_in=_usage_in,
    stream=_stream("generate"),
    watch=_watch,
    errors=ERRORS,
    stream_type=NDJSON,
    own_answer=_loading("generate", "prompt"),
)
EMBED = Form(
    dialect=NAME,
    operation="ollama.embed",
    path=b"/api/embed",
    speakers=SPEAKERS,
    read=reading.read_embed,
    translate=request.embed_to_embeddings,
    whole=response.embed_from_embeddings,
    usage_in=_usage_in,
    stream=None,
    watch=None,
    errors=ERRORS,
)
EMBEDDINGS = Form(
    dialect=NAME,
    operation="ollama.embeddings",
    path=b"/api/embeddings",
    speakers=SPEAKERS,
    read=reading.read_embeddings,
    translate=request.embeddings_to_embeddings,
    whole=response.embeddings_from_embeddings,
    usage_in=_usage_in,
    stream=None,
    watch=None,
    errors=ERRORS,
)
FORMS = {form.path.decode(): form for form in (CHAT, GENERATE, EMBED, EMBEDDINGS)}
