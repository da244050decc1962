"""What the translations of all dialects have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from mindrouter.gateway.errors import GatewayError
from scheduler.core.jobs import Usage

CHAT_PATH = b"/v1/chat/completions"
COMPLETIONS_PATH = b"/v1/completions"
EMBEDDINGS_PATH = b"/v1/embeddings"

_encode = msgspec.json.Encoder().encode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """A client's request in OpenAI's form.

    ``body`` may hold ``msgspec.Raw``: values that go on as the very bytes they came as.
    ``without``: hints of the client that have no counterpart and change nothing of what the
    answer may say (where a prompt may be cached, say). They are named, so that the client can be
    told; anything else that cannot be expressed is refused.
    ``settings``: what the client's form wants repeated in the answer.
    ``begun``: the beginning of the answer, where the client wrote it to be gone on with.
    """

    path: bytes
    body: dict[str, Any]
    without: tuple[str, ...] = ()
    begun: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def body_for(self, model_name: str) -> bytes:
        """The body for a backend that calls the model ``model_name``."""
        return _encode({**self.body, "model": model_name})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an answer in a client's form needs besides the backend's own words.

    ``reply_id`` is unique to the request and gets the form's prefix; ``model`` is the name that
    the client asked for; ``created`` is in epoch seconds; ``prompt_tokens`` is the estimate that
    stands until the backend tells. ``begun`` is the ``Translated`` one for engines that repeat it
    in a whole answer (llama.cpp does, though not in a stream), and empty for all others.
    """

    reply_id: str
    model: str
    created: float
    prompt_tokens: int
    begun: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How long each part of an answer took, in seconds. ``load_seconds`` holds whatever came
    before the backend began: Ollama counts its own queue there too."""

    total_seconds: float = 0.0
    load_seconds: float = 0.0
    prompt_seconds: float = 0.0
    output_seconds: float = 0.0


class StreamTranslation(Protocol):
    """One answer's stream of OpenAI events on its way into a client's form."""

    def feed(self, events: bytes) -> bytes:
        """The client's bytes for so much of the backend's. Raises: GatewayError."""

    def finish(self, timings: Timings | None = None) -> bytes:
        """The last bytes. Raises: GatewayError when the backend had not finished."""

    def error(self, error: GatewayError, request_id: str) -> bytes:
        """What ends the stream instead when it failed."""

    def usage(self) -> Usage:
        """What the backend told so far, or an estimate."""


def thinking_fields(
    enabled: bool | None, effort: str | None = None, budget: int | None = None
) -> dict[str, Any]:
    """The OpenAI fields that turn reasoning on or off.

    ``reasoning_effort`` is OpenAI's own; whether a hybrid model reasons at all is decided by its
    chat template, under one of two names (Qwen, GLM: ``enable_thinking``; DeepSeek, Granite:
    ``thinking``). Templates skip names they do not know.
    """
    fields: dict[str, Any] = {}
    if effort is not None:
        fields["reasoning_effort"] = effort
    if enabled is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": enabled, "thinking": enabled}
        if budget is not None:
            fields["chat_template_kwargs"]["thinking_budget"] = budget
    return fields


def reasoning_of_message(text: str) -> dict[str, str]:
    """An earlier answer's reasoning: engines read it under one of two names."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def image_part(url: str, detail: str | None = None) -> dict[str, Any]:
    image = {"url": url} if detail is None else {"url": url, "detail": detail}
    return {"type": "image_url", "image_url": image}


def text_or_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Content in its plainest form: every chat template takes a text, not all take parts."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call as an assistant's message holds it; ``arguments`` is JSON text."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def stream_fields(stream: bool) -> dict[str, Any]:
    """A translated stream always needs its usage: the client's form carries it."""
    return {"stream": True, "stream_options": {"include_usage": True}} if stream else {}


def begun_answer(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Where the last message is the model's, it is the beginning of the answer: the fields that
    have vLLM and SGLang go on with it, as llama.cpp does unasked, and its text."""
    last = messages[-1]
    if last["role"] != "assistant" or "tool_calls" in last:
        return {}, ""
    content = last["content"]
    text = content if isinstance(content, str) else "\n".join(p.get("text", "") for p in content)
    return {"continue_final_message": True, "add_generation_prompt": False}, text


def json_schema_format(schema: Any, name: str = "answer", **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, **more}}


def arguments_object(text: str) -> msgspec.Raw:
    """A tool call's arguments, a text in OpenAI's form, as the object other forms have.

    A model may write what is no object, or be cut off in the middle. That text is then kept whole
    under the name ``arguments``: the client's own check of the arguments will tell the model.
    """
    stripped = text.strip()
    if not stripped:
        return msgspec.Raw(b"{}")
    try:
        _object.decode(stripped)
    except (msgspec.MsgspecError, RecursionError):
        return msgspec.Raw(_encode({"arguments": text}))
    return msgspec.Raw(stripped.encode())


def ended_early() -> GatewayError:
    return GatewayError(
        "upstream_ended_early", "The backend ended the answer without saying that it was finished."
    )


def invalid_answer(what: str) -> GatewayError:
    return GatewayError("upstream_invalid", f"The backend sent {what}.")
