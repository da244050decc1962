"""Random requests in Ollama's form, and the way back from the request that each becomes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.gateway.dialects.wire import json_objects, names, texts

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
JPEG = "/9j/4AAQSkZJRgABAQAAAQABAAD="

_images = st.lists(st.sampled_from([PNG, JPEG]), min_size=1, max_size=2)
_user = st.fixed_dictionaries(
    {"role": st.just("user"), "content": texts}, optional={"images": _images}
)
_call = st.builds(
    lambda name, arguments: {"function": {"name": name, "arguments": arguments}},
    names,
    json_objects,
)


def _turn(content: str, thinking: str | None, calls: list[Any], answers: list[str]) -> list[Any]:
    """What the model said and, for each of its calls, what came of it."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if not calls:
        return [message]
    results = [
        {"role": "tool", "tool_name": call["function"]["name"], "content": answer}
        for call, answer in zip(calls, answers, strict=False)
    ]
    return [{**message, "tool_calls": calls}, *results]


_turns = st.builds(
    _turn,
    texts,
    st.none() | texts,
    st.lists(_call, max_size=2),
    st.lists(texts, min_size=2, max_size=2),
)
_tool = st.builds(
    lambda name, schema: {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": schema},
    },
    names,
    json_objects,
)
_options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "top_k": st.integers(0, 100),
        "min_p": st.floats(0, 1),
        "seed": st.integers(-1, 2**31),
        "stop": st.lists(texts, min_size=1, max_size=2),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repeat_penalty": st.floats(0, 2),
        "num_predict": st.integers(0, 9999),
    },
).filter(bool)
_common = {
    "stream": st.sampled_from([True, False]),
    "options": _options,
    "format": st.just("json") | json_objects,
    "think": st.sampled_from([True, False, "low", "high"]),
    "logprobs": st.just(True),
}
chats = st.fixed_dictionaries(
    {
        "model": names,
        "messages": st.builds(
            lambda system, pairs, last: (
                system + [m for user, turn in pairs for m in [user, *turn]] + [last]
            ),
            st.lists(st.builds(lambda t: {"role": "system", "content": t}, texts), max_size=1),
            st.lists(st.tuples(_user, _turns), max_size=2),
            _user,
        ),
    },
    optional={**_common, "tools": st.lists(_tool, min_size=1, max_size=2)},
)
generates = st.fixed_dictionaries(
    {"model": names, "prompt": texts},
    optional={**_common, "system": texts, "images": _images},
)


def back_to_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The ``/api/chat`` request that a chat request came from. Takes every field out."""
    names_of_calls: dict[str, str] = {}
    request = {
        "model": body.pop("model"),
        "messages": [_back_to_message(m, names_of_calls) for m in body.pop("messages")],
    }
    if "tools" in body:
        request["tools"] = body.pop("tools")
    return request | _back_to_common(body)


def back_to_generate(body: dict[str, Any]) -> dict[str, Any]:
    """The ``/api/generate`` request that a chat request came from. Takes every field out."""
    request: dict[str, Any] = {"model": body.pop("model")}
    *system, user = body.pop("messages")
    if system:
        request["system"] = system[0]["content"]
    text, images = _back_to_content(user["content"])
    request["prompt"] = text
    if images:
        request["images"] = images
    return request | _back_to_common(body)


def with_stream_said(request: dict[str, Any]) -> dict[str, Any]:
    """Ollama streams unless told otherwise."""
    return {"stream": True, **request}


def _back_to_common(body: dict[str, Any]) -> dict[str, Any]:
    request: dict[str, Any] = {"stream": body.pop("stream", False)}
    if request["stream"]:
        assert body.pop("stream_options") == {"include_usage": True}
    if "response_format" in body:
        wanted = body.pop("response_format")
        as_object = wanted == {"type": "json_object"}
        request["format"] = "json" if as_object else wanted["json_schema"]["schema"]
    if "chat_template_kwargs" in body:
        request["think"] = body.pop("chat_template_kwargs")["enable_thinking"]
        request["think"] = body.pop("reasoning_effort", request["think"])
    if body.pop("logprobs", False):
        request["logprobs"] = True
    if "max_tokens" in body:
        body["num_predict"] = body.pop("max_tokens")
    if "repetition_penalty" in body:
        assert body.pop("repetition_penalty") == body["repeat_penalty"]
    return {**request, "options": body} if body else request


def _back_to_message(message: dict[str, Any], names_of_calls: dict[str, str]) -> dict[str, Any]:
    text, images = _back_to_content(message["content"])
    made: dict[str, Any] = {"role": message["role"], "content": text}
    if images:
        made["images"] = images
    if "reasoning_content" in message:
        made["thinking"] = message["reasoning_content"]
    if "tool_call_id" in message:
        made["tool_name"] = names_of_calls[message["tool_call_id"]]
    if "tool_calls" in message:
        made["tool_calls"] = [_back_to_call(c, names_of_calls) for c in message["tool_calls"]]
    return made


def _back_to_call(call: dict[str, Any], names_of_calls: dict[str, str]) -> dict[str, Any]:
    function = call["function"]
    assert call["id"] not in names_of_calls  # each call has an id of its own
    names_of_calls[call["id"]] = function["name"]
    arguments = json.loads(function["arguments"])
    return {"function": {"name": function["name"], "arguments": arguments}}


def _back_to_content(content: Any) -> tuple[str, list[str]]:
    if isinstance(content, str):
        return content, []
    texts_said = [part["text"] for part in content if part["type"] == "text"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    return "".join(texts_said), [url.split(";base64,")[1] for url in urls]
