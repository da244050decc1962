"""A chat completion → a message in Anthropic's form."""

from __future__ import annotations

from typing import Any

import msgspec

from mindrouter.gateway.dialects.answers import Answer, Call, read_answer
from mindrouter.gateway.dialects.completions import Ending
from mindrouter.gateway.dialects.translation import Reply, arguments_object
from scheduler.core.jobs import Usage

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_encode = msgspec.json.Encoder().encode


def from_chat(body: bytes, reply: Reply) -> bytes:
    """Raises: GatewayError where the backend's answer is none."""
    answer = read_answer(body, reply)
    refused = bool(answer.refusal)
    message = begun_message(reply, usage_fields(answer.usage(reply)))
    message["content"] = _blocks(answer)
    message |= stop_fields(answer.ending, called=bool(answer.calls), refused=refused)
    return _encode(message)


def count_tokens_body(tokens: int) -> bytes:
    """The answer of ``/v1/messages/count_tokens``."""
    return _encode({"input_tokens": tokens})


def begun_message(reply: Reply, usage: dict[str, int]) -> dict[str, Any]:
    """A message that has no content yet."""
    return {
        "id": f"msg_{reply.reply_id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def stop_fields(ending: Ending, *, called: bool, refused: bool) -> dict[str, str | None]:
    """Why it stopped. Engines say "stop" even of a call that the client asked for by name, and
    those that tell which stop sequence they met say no more than "stop" of that either."""
    reason = _STOP_REASONS.get(ending.reason, "end_turn")
    sequence = None
    if refused:
        reason = "refusal"
    elif reason == "end_turn" and called:
        reason = "tool_use"
    elif reason == "end_turn" and ending.stop_sequence is not None:
        reason, sequence = "stop_sequence", ending.stop_sequence
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage_fields(usage: Usage) -> dict[str, int]:
    """Anthropic counts the prompt's cached tokens apart from the others."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def thinking_block(text: str) -> dict[str, Any]:
    """Open models sign nothing, but the form wants a signature."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks = [thinking_block(answer.reasoning)] if answer.reasoning else []
    blocks += [{"type": "text", "text": t} for t in (answer.text, answer.refusal) if t]
    return blocks + [_tool_use(call) for call in answer.calls]


def _tool_use(call: Call) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": call.call_id,
        "name": call.name,
        "input": arguments_object(call.arguments),
    }
