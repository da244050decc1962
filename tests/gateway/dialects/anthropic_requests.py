"""Random Messages requests, and the way back from the chat request that each becomes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.gateway.dialects.wire import json_objects, names, texts

_text = st.builds(lambda t: {"type": "text", "text": t}, texts.filter(lambda t: t[:7] != "Error: "))
_image = st.sampled_from(
    [
        {"type": "image", "source": {"type": "url", "url": "https://example.org/i.png"}},
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/jpeg", "data": "/9j/4AAQ"},
        },
    ]
)
_result = st.builds(
    lambda tool_use_id, content, failed: {
        "type": "tool_result",
        "tool_use_id": tool_use_id,
        "content": content,
        "is_error": failed,
    },
    names,
    st.lists(_text, min_size=1, max_size=1) | st.tuples(_text, _image).map(list),
    st.booleans(),
)
_use = st.builds(
    lambda use_id, name, given: {"type": "tool_use", "id": use_id, "name": name, "input": given},
    names,
    names,
    json_objects,
)
_thought = st.builds(lambda t: {"type": "thinking", "thinking": t}, texts)
_user = st.builds(
    lambda results, others: {"role": "user", "content": results + others},
    st.lists(_result, max_size=2),
    st.lists(_text | _image, min_size=1, max_size=3),
)
_assistant = st.builds(
    lambda thoughts, said, uses: {"role": "assistant", "content": [*thoughts, *said, *uses]},
    st.lists(_thought, max_size=1),
    st.lists(_text, min_size=1, max_size=2),
    st.lists(_use, max_size=2),
)
_tool = st.fixed_dictionaries(
    {"name": names, "input_schema": json_objects},
    optional={"description": texts, "strict": st.booleans()},
)
requests = st.fixed_dictionaries(
    {
        "model": names,
        "max_tokens": st.integers(1, 9999),
        "messages": st.builds(
            lambda pairs, last: [m for pair in pairs for m in pair] + [last],
            st.lists(st.tuples(_user, _assistant), max_size=2),
            _user,
        ),
    },
    optional={
        "system": st.lists(_text, min_size=1, max_size=2),
        "stream": st.just(True),
        "temperature": st.floats(0, 1),
        "top_p": st.floats(0, 1),
        "top_k": st.integers(0, 100),
        "stop_sequences": st.lists(texts, min_size=1, max_size=2),
        "tools": st.lists(_tool, min_size=1, max_size=2),
        "tool_choice": st.sampled_from(
            [
                {"type": "auto"},
                {"type": "any", "disable_parallel_tool_use": True},
                {"type": "none"},
                {"type": "tool", "name": "f"},
            ]
        ),
        "thinking": st.sampled_from(
            [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}]
        ),
        "output_config": st.builds(
            lambda schema: {"format": {"type": "json_schema", "schema": schema}}, json_objects
        ),
        "metadata": st.builds(lambda user: {"user_id": user}, texts),
    },
)


def back_to_messages(body: dict[str, Any]) -> dict[str, Any]:
    """The Messages request that a chat request came from. Takes every field out of ``body``."""
    request = {name: body.pop(name) for name in ("model", "max_tokens")}
    chat = body.pop("messages")
    if chat[0]["role"] == "system":
        request["system"] = _blocks(chat.pop(0)["content"])
    request["messages"] = _back_to_turns(chat)
    if body.pop("stream", False):
        request["stream"] = True
        assert body.pop("stream_options") == {"include_usage": True}
    request |= _back_to_sampling(body) | _back_to_tools(body)
    if "response_format" in body:
        schema = body.pop("response_format")["json_schema"]["schema"]
        request["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    assert body == {}
    return request


def _back_to_sampling(body: dict[str, Any]) -> dict[str, Any]:
    request = {n: body.pop(n) for n in ("temperature", "top_p", "top_k") if n in body}
    if "stop" in body:
        request["stop_sequences"] = body.pop("stop")
    if "user" in body:
        request["metadata"] = {"user_id": body.pop("user")}
    if "chat_template_kwargs" in body:
        switches = body.pop("chat_template_kwargs")
        request["thinking"] = (
            {"type": "enabled", "budget_tokens": switches["thinking_budget"]}
            if switches["thinking"]
            else {"type": "disabled"}
        )
    return request


def _back_to_tools(body: dict[str, Any]) -> dict[str, Any]:
    request: dict[str, Any] = {}
    if "tools" in body:
        request["tools"] = [_back_to_tool(tool) for tool in body.pop("tools")]
    if "tool_choice" in body:
        request["tool_choice"] = _back_to_choice(body.pop("tool_choice"))
        if "parallel_tool_calls" in body:
            parallel = body.pop("parallel_tool_calls")
            request["tool_choice"]["disable_parallel_tool_use"] = not parallel
    return request


def _back_to_turns(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for message in chat:
        if message["role"] == "tool":
            results.append(_back_to_result(message))
        elif message["role"] == "user":
            turns.append({"role": "user", "content": results + _blocks(message["content"])})
            results = []
        else:
            turns.append({"role": "assistant", "content": _back_to_answer(message)})
    assert not results
    return turns


def _back_to_answer(message: dict[str, Any]) -> list[dict[str, Any]]:
    blocks = []
    if "reasoning_content" in message:
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"]})
    blocks += _blocks(message["content"])
    for made in message.get("tool_calls", []):
        blocks.append(
            {
                "type": "tool_use",
                "id": made["id"],
                "name": made["function"]["name"],
                "input": json.loads(made["function"]["arguments"]),
            }
        )
    return blocks


def _back_to_result(message: dict[str, Any]) -> dict[str, Any]:
    content = _blocks(message["content"])
    failed = content[0]["text"].startswith("Error: ")
    if failed:
        content[0]["text"] = content[0]["text"][7:]
    return {
        "type": "tool_result",
        "tool_use_id": message["tool_call_id"],
        "content": content,
        "is_error": failed,
    }


def _blocks(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_back_to_block(part) for part in content]


def _back_to_block(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    url = part["image_url"]["url"]
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    media_type, encoded = url[5:].split(";base64,")
    source = {"type": "base64", "media_type": media_type, "data": encoded}
    return {"type": "image", "source": source}


def _back_to_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    function["input_schema"] = function.pop("parameters")
    return dict(function)


def _back_to_choice(choice: Any) -> dict[str, Any]:
    if isinstance(choice, dict):
        return {"type": "tool", "name": choice["function"]["name"]}
    return {"type": {"auto": "auto", "required": "any", "none": "none"}[choice]}
