"""Random Responses requests, and the way back from the chat request that each becomes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.gateway.dialects.wire import json_objects, names, texts

_input_text = st.builds(lambda t: {"type": "input_text", "text": t}, texts)
_input_image = st.fixed_dictionaries(
    {
        "type": st.just("input_image"),
        "image_url": st.sampled_from(["https://example.org/i.png", "data:image/png;base64,iVBO"]),
    },
    optional={"detail": st.sampled_from(["low", "high", "auto"])},
)
_user = st.builds(
    lambda parts: {"role": "user", "content": parts},
    st.lists(_input_text | _input_image, min_size=1, max_size=3),
)
_reasoning = st.builds(
    lambda t: {"type": "reasoning", "content": [{"type": "reasoning_text", "text": t}]}, texts
)
_said = st.builds(
    lambda parts: {"role": "assistant", "content": parts},
    st.lists(
        st.builds(lambda t: {"type": "output_text", "text": t}, texts), min_size=1, max_size=2
    ),
)
_call = st.builds(
    lambda call_id, name, arguments: {
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": json.dumps(arguments),
    },
    names,
    names,
    json_objects,
)
_output = st.builds(
    lambda call_id, output: {
        "type": "function_call_output",
        "call_id": call_id,
        "output": output,
    },
    names,
    st.lists(_input_text, min_size=1, max_size=1) | st.tuples(_input_text, _input_image).map(list),
)
_turn = st.builds(
    lambda user, thought, said, calls, outputs: [user, *thought, *said, *calls, *outputs],
    _user,
    st.lists(_reasoning, max_size=1),
    st.lists(_said, min_size=1, max_size=1),
    st.lists(_call, max_size=2),
    st.lists(_output, max_size=2),
)
_tool = st.fixed_dictionaries(
    {"type": st.just("function"), "name": names},
    optional={"description": texts, "parameters": json_objects, "strict": st.booleans()},
)
_schema_format = st.fixed_dictionaries(
    {"type": st.just("json_schema"), "name": names, "schema": json_objects},
    optional={"description": texts, "strict": st.booleans()},
)
requests = st.fixed_dictionaries(
    {
        "model": names,
        "input": st.builds(
            lambda turns, last: [item for turn in turns for item in turn] + [last],
            st.lists(_turn, max_size=2),
            _user,
        ),
    },
    optional={
        "instructions": texts,
        "stream": st.just(True),
        "max_output_tokens": st.integers(1, 9999),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "top_logprobs": st.integers(1, 20),
        "tools": st.lists(_tool, min_size=1, max_size=2),
        "tool_choice": st.sampled_from(
            ["auto", "none", "required", {"type": "function", "name": "f"}]
        ),
        "parallel_tool_calls": st.booleans(),
        "reasoning": st.sampled_from(
            [{"effort": effort} for effort in ("none", "minimal", "low", "high")]
        ),
        "text": st.fixed_dictionaries(
            {"format": st.just({"type": "json_object"}) | _schema_format},
            optional={"verbosity": st.sampled_from(["low", "high"])},
        ),
        "user": texts,
        "safety_identifier": texts,
        "prompt_cache_key": texts,
    },
)
_SAME = ("temperature", "top_p", "parallel_tool_calls", "user", "safety_identifier")


def back_to_responses(body: dict[str, Any]) -> dict[str, Any]:
    """The Responses request that a chat request came from. Takes every field out of ``body``."""
    request: dict[str, Any] = {"model": body.pop("model")}
    chat = body.pop("messages")
    if chat[0]["role"] == "system":
        request["instructions"] = chat.pop(0)["content"]
    request["input"] = [item for message in chat for item in _back_to_items(message)]
    for name in (*_SAME, "prompt_cache_key"):
        if name in body:
            request[name] = body.pop(name)
    if "max_tokens" in body:
        request["max_output_tokens"] = body.pop("max_tokens")
    if body.pop("stream", False):
        request["stream"] = True
        assert body.pop("stream_options") == {"include_usage": True}
    request |= _back_to_tools(body) | _back_to_reasoning(body) | _back_to_text(body)
    assert body == {}
    return request


def _back_to_tools(body: dict[str, Any]) -> dict[str, Any]:
    request: dict[str, Any] = {}
    if "tools" in body:
        request["tools"] = [{"type": "function", **t["function"]} for t in body.pop("tools")]
    choice = body.pop("tool_choice", None)
    if isinstance(choice, dict):
        choice = {"type": "function", "name": choice["function"]["name"]}
    if choice is not None:
        request["tool_choice"] = choice
    return request


def _back_to_reasoning(body: dict[str, Any]) -> dict[str, Any]:
    if body.pop("chat_template_kwargs", None) == {"enable_thinking": False, "thinking": False}:
        return {"reasoning": {"effort": "none"}}
    if "reasoning_effort" in body:
        return {"reasoning": {"effort": body.pop("reasoning_effort")}}
    return {}


def _back_to_text(body: dict[str, Any]) -> dict[str, Any]:
    request: dict[str, Any] = {}
    if "top_logprobs" in body:
        assert body.pop("logprobs") is True
        request["top_logprobs"] = body.pop("top_logprobs")
    text: dict[str, Any] = {}
    if "verbosity" in body:
        text["verbosity"] = body.pop("verbosity")
    if "response_format" in body:
        wanted = body.pop("response_format")
        text["format"] = {"type": wanted["type"], **wanted.get("json_schema", {})}
    return {**request, "text": text} if text else request


def _back_to_items(message: dict[str, Any]) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        output = _parts(message["content"], "input_text")
        call_id = message["tool_call_id"]
        return [{"type": "function_call_output", "call_id": call_id, "output": output}]
    if message["role"] == "user":
        return [{"role": "user", "content": _parts(message["content"], "input_text")}]
    items: list[dict[str, Any]] = []
    if "reasoning_content" in message:
        thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
        items.append({"type": "reasoning", "content": [thought]})
    items.append({"role": "assistant", "content": _parts(message["content"], "output_text")})
    calls = message.get("tool_calls", [])
    return items + [{"type": "function_call", "call_id": c["id"], **c["function"]} for c in calls]


def _parts(content: Any, kind: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": kind, "text": content}]
    return [_part(part, kind) for part in content]


def _part(part: dict[str, Any], kind: str) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": kind, "text": part["text"]}
    image = part["image_url"]
    made = {"type": "input_image", "image_url": image["url"]}
    return {**made, "detail": image["detail"]} if "detail" in image else made
