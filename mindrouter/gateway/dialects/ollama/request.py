"""A request in Ollama's form → one in OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from mindrouter.gateway.dialects.ollama.messages import Message, image_parts, to_chat_messages
from mindrouter.gateway.dialects.ollama.options import (
    Options,
    format_fields,
    sampling_fields,
    think_fields,
)
from mindrouter.gateway.dialects.strict import (
    Strict,
    cannot_translate,
    malformed,
    object_text,
    read_strictly,
)
from mindrouter.gateway.dialects.translation import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    EMBEDDINGS_PATH,
    Translated,
    begun_answer,
    stream_fields,
    text_or_parts,
)

_NULL = msgspec.Raw(b"null")
_Think = bool | Literal["low", "medium", "high"] | None
#: How long a model stays loaded is the backend's own affair.
_KEEP_ALIVE = "keep_alive"


class _Tool(Strict):
    function: msgspec.Raw
    type: Literal["function"] | None = None


class _Generating(Strict, kw_only=True):
    model: str
    options: Options | None = None
    format: msgspec.Raw = _NULL
    stream: bool | None = None
    think: _Think = None
    keep_alive: int | float | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    shift: bool | None = None


class _Chat(_Generating, kw_only=True):
    messages: list[Message]
    tools: list[_Tool] | None = None


class _Generate(_Generating, kw_only=True):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None
    raw: bool | None = None


class _Embed(Strict):
    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: Options | None = None
    keep_alive: int | float | str | None = None


class _Embeddings(Strict):
    model: str
    prompt: str
    options: Options | None = None
    keep_alive: int | float | str | None = None


_chat = msgspec.json.Decoder(_Chat)
_generate = msgspec.json.Decoder(_Generate)
_embed = msgspec.json.Decoder(_Embed)
_embeddings = msgspec.json.Decoder(_Embeddings)


def chat_to_chat(fields: Mapping[str, msgspec.Raw]) -> Translated:
    """``/api/chat``. Raises: GatewayError, which names what cannot be expressed."""
    request = read_strictly(fields, _chat)
    if not request.messages:
        raise malformed("messages", "there are none")
    messages = to_chat_messages(request.messages)
    continuing, begun = begun_answer(messages)
    body: dict[str, Any] = {"messages": messages, **continuing}
    if request.tools:
        body["tools"] = [_function(tool, f"tools[{n}]") for n, tool in enumerate(request.tools)]
    return _generating(request, CHAT_PATH, body, begun)


def generate_to_chat(fields: Mapping[str, msgspec.Raw]) -> Translated:
    """``/api/generate``: a chat of one message, or a bare completion where the prompt is to be
    taken as it stands. Raises: GatewayError, which names what cannot be expressed."""
    request = read_strictly(fields, _generate)
    for name in ("template", "context"):
        if getattr(request, name):
            raise cannot_translate(name)
    if request.raw or request.suffix:
        return _generating(request, COMPLETIONS_PATH, _bare(request))
    parts = [{"type": "text", "text": request.prompt}] if request.prompt else []
    parts += image_parts(request.images or [], "images")
    if not parts:
        raise malformed("prompt", "it is empty")
    messages: list[dict[str, Any]] = [{"role": "user", "content": text_or_parts(parts)}]
    if request.system:
        messages.insert(0, {"role": "system", "content": request.system})
    return _generating(request, CHAT_PATH, {"messages": messages})


def embed_to_embeddings(fields: Mapping[str, msgspec.Raw]) -> Translated:
    """``/api/embed``. Raises: GatewayError, which names what cannot be expressed."""
    request = read_strictly(fields, _embed)
    body: dict[str, Any] = {"model": request.model, "input": request.input}
    if request.truncate is not False:
        body["truncate_prompt_tokens"] = -1  # vLLM's word for what Ollama does by default
    if request.dimensions is not None:
        body["dimensions"] = request.dimensions
    return _embedding(request, body)


def embeddings_to_embeddings(fields: Mapping[str, msgspec.Raw]) -> Translated:
    """``/api/embeddings``. Raises: GatewayError, which names what cannot be expressed."""
    request = read_strictly(fields, _embeddings)
    return _embedding(request, {"model": request.model, "input": request.prompt})


def _generating(
    request: _Generating, path: bytes, body: dict[str, Any], begun: str = ""
) -> Translated:
    without: set[str] = set()
    if request.keep_alive is not None:
        without.add(_KEEP_ALIVE)
    for name in ("truncate", "shift"):
        if getattr(request, name) is not None:
            raise cannot_translate(name, "what to do with a long prompt is the backend's choice")
    body = {
        "model": request.model,
        **body,
        **sampling_fields(request.options, without),
        **format_fields(request.format),
        **think_fields(request.think),
        **_logprobs(request, path),
        **stream_fields(request.stream is not False),
    }
    return Translated(path=path, body=body, without=tuple(sorted(without)), begun=begun)


def _function(tool: _Tool, path: str) -> dict[str, Any]:
    object_text(tool.function, f"{path}.function")
    return {"type": "function", "function": tool.function}


def _logprobs(request: _Generating, path: bytes) -> dict[str, Any]:
    if not request.logprobs and not request.top_logprobs:
        return {}
    if path == COMPLETIONS_PATH:
        raise cannot_translate("logprobs", "not together with 'raw' or 'suffix'")
    body: dict[str, Any] = {"logprobs": True}
    if request.top_logprobs:
        body["top_logprobs"] = request.top_logprobs
    return body


def _bare(request: _Generate) -> dict[str, Any]:
    for name in ("system", "images", "think"):
        if getattr(request, name):
            raise cannot_translate(name, "not together with 'raw' or 'suffix'")
    body: dict[str, Any] = {"prompt": request.prompt or ""}
    if request.suffix:
        body["suffix"] = request.suffix
    return body


def _embedding(request: _Embed | _Embeddings, body: dict[str, Any]) -> Translated:
    without = {name for name in ("options", _KEEP_ALIVE) if getattr(request, name) is not None}
    body["encoding_format"] = "float"
    return Translated(path=EMBEDDINGS_PATH, body=body, without=tuple(sorted(without)))
