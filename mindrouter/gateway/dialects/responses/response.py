"""A chat completion → a response in the form of the Responses API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mindrouter.gateway.dialects.answers import Answer, Call, read_answer
from mindrouter.gateway.dialects.completions import Ending
from mindrouter.gateway.dialects.translation import Reply, Timings
from scheduler.core.jobs import Usage

ItemStatus = Literal["in_progress", "completed", "incomplete"]
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_encode = msgspec.json.Encoder().encode


def from_chat(body: bytes, reply: Reply, timings: Timings) -> bytes:
    """Raises: GatewayError where the backend's answer is none."""
    answer = read_answer(body, reply)
    output = _items(answer, reply)
    usage = usage_fields(answer.usage(reply), answer.ending.reasoning_tokens)
    return _encode(ended_response(reply, answer.ending, output, usage, timings))


def begun_response(reply: Reply) -> dict[str, Any]:
    """A response that has no output yet."""
    return {
        "id": f"resp_{reply.reply_id}",
        "object": "response",
        "created_at": int(reply.created),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": reply.model,
        "output": [],
        "usage": None,
        **reply.settings,
    }


def ended_response(
    reply: Reply,
    ending: Ending,
    output: list[dict[str, Any]],
    usage: dict[str, Any],
    timings: Timings,
) -> dict[str, Any]:
    response = {**begun_response(reply), "output": output, "usage": usage}
    reason = _INCOMPLETE.get(ending.reason)
    if reason is None:
        response["status"] = "completed"
        response["completed_at"] = int(reply.created + timings.total_seconds)
    else:
        response["status"] = "incomplete"
        response["incomplete_details"] = {"reason": reason}
    return response


def last_status(ending: Ending) -> ItemStatus:
    """The status of the item that was being written when the answer ended."""
    return "incomplete" if ending.reason in _INCOMPLETE else "completed"


def usage_fields(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


# ---- items, and the parts of which messages and reasoning consist


def message_item(item_id: str, parts: list[dict[str, Any]], status: ItemStatus) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": parts,
    }


def reasoning_item(item_id: str, parts: list[dict[str, Any]], status: ItemStatus) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": parts,
    }


def call_item(item_id: str, call: Call, status: ItemStatus) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
    }


def text_part(text: str, logprobs: list[msgspec.Raw]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def refusal_part(text: str) -> dict[str, Any]:
    return {"type": "refusal", "refusal": text}


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def item_id(prefix: Literal["msg", "rs", "fc"], reply: Reply, position: int) -> str:
    return f"{prefix}_{reply.reply_id}_{position}"


def _items(answer: Answer, reply: Reply) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        parts = [reasoning_part(answer.reasoning)]
        items.append(reasoning_item(item_id("rs", reply, 0), parts, "completed"))
    parts = [text_part(answer.text, answer.logprobs)] if answer.text else []
    if answer.refusal:
        parts.append(refusal_part(answer.refusal))
    if parts:
        items.append(message_item(item_id("msg", reply, len(items)), parts, "completed"))
    for call in answer.calls:
        items.append(call_item(item_id("fc", reply, len(items)), call, "completed"))
    if items:
        items[-1]["status"] = last_status(answer.ending)
    return items
