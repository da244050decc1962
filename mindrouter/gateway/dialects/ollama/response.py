"""Answers in OpenAI's form → Ollama's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from mindrouter.gateway.dialects.answers import Call, read_answer
from mindrouter.gateway.dialects.completions import Ending
from mindrouter.gateway.dialects.translation import (
    Reply,
    Timings,
    arguments_object,
    invalid_answer,
)
from mindrouter.gateway.told import read_usage
from scheduler.core.jobs import Usage

#: Which of the two generating addresses was asked: their answers differ in where the text is.
Form = Literal["chat", "generate"]
_NULL = msgspec.Raw(b"null")
_encode = msgspec.json.Encoder().encode


class _Embedding(msgspec.Struct):
    embedding: msgspec.Raw
    index: int = 0


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    usage: msgspec.Raw = _NULL


_embeddings = msgspec.json.Decoder(_Embeddings)


def from_chat(body: bytes, reply: Reply, timings: Timings, form: Form) -> bytes:
    """Raises: GatewayError where the backend's answer is none."""
    answer = read_answer(body, reply)
    content = content_fields(
        form, text=answer.text or answer.refusal, thinking=answer.reasoning, calls=answer.calls
    )
    if answer.logprobs:
        content["logprobs"] = answer.logprobs
    last = last_fields(answer.ending, answer.usage(reply), timings)
    return _encode({**head_fields(reply, timings.total_seconds), **content, **last})


def embed_from_embeddings(body: bytes, reply: Reply, timings: Timings) -> bytes:
    """``/api/embed``. Raises: GatewayError where the backend's answer is none."""
    parsed = _read_embeddings(body)
    usage = read_usage(parsed.usage)
    return _encode(
        {
            "model": reply.model,
            "embeddings": [row.embedding for row in parsed.data],
            "total_duration": nanoseconds(timings.total_seconds),
            "load_duration": nanoseconds(timings.load_seconds),
            "prompt_eval_count": usage.prompt_tokens if usage else reply.prompt_tokens,
        }
    )


def embeddings_from_embeddings(body: bytes, reply: Reply, timings: Timings) -> bytes:
    """``/api/embeddings``. Raises: GatewayError where the backend's answer is none."""
    rows = _read_embeddings(body).data
    if len(rows) != 1:
        raise invalid_answer(f"{len(rows)} embeddings for one text")
    return _encode({"embedding": rows[0].embedding})


def load_body(reply: Reply, form: Form, reason: Literal["load", "unload"]) -> bytes:
    """The answer to a request without a prompt."""
    content = content_fields(form, text="")
    return _encode({**head_fields(reply), **content, "done": True, "done_reason": reason})


def _read_embeddings(body: bytes) -> _Embeddings:
    try:
        parsed = _embeddings.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        raise invalid_answer("an answer that holds no embeddings") from None
    if any(bytes(memoryview(row.embedding)[:1]) != b"[" for row in parsed.data):
        raise invalid_answer("embeddings that are no lists of numbers")
    parsed.data.sort(key=lambda row: row.index)
    return parsed


# ---- the parts of an answer, whole or of a stream


def head_fields(reply: Reply, after_seconds: float = 0.0) -> dict[str, Any]:
    moment = datetime.fromtimestamp(reply.created + after_seconds, UTC)
    written = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {"model": reply.model, "created_at": written}


def content_fields(
    form: Form, *, text: str, thinking: str = "", calls: list[Call] | None = None
) -> dict[str, Any]:
    if form == "generate":
        content: dict[str, Any] = {"response": text}
        if thinking:
            content["thinking"] = thinking
        return content
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [_tool_call(call, n) for n, call in enumerate(calls)]
    return {"message": message}


def last_fields(ending: Ending, usage: Usage, timings: Timings) -> dict[str, Any]:
    """How it ended and what it took. An engine's own durations are better than ours."""
    prompt, output = ending.prompt_seconds, ending.output_seconds
    return {
        "done": True,
        "done_reason": "stop" if ending.reason in _CALLED else ending.reason,
        "total_duration": nanoseconds(timings.total_seconds),
        "load_duration": nanoseconds(timings.load_seconds),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": nanoseconds(timings.prompt_seconds if prompt is None else prompt),
        "eval_count": usage.completion_tokens,
        "eval_duration": nanoseconds(timings.output_seconds if output is None else output),
    }


_CALLED = frozenset({"tool_calls", "function_call"})


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _tool_call(call: Call, position: int) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "function": {
            "index": position,
            "name": call.name,
            "arguments": arguments_object(call.arguments),
        },
    }
