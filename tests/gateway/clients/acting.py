"""What the fake backend behind a real client answers: tool calls, JSON, half an answer."""

from __future__ import annotations

import json
from typing import Any

from tests.stubs.openai_stub import Call, ordinary, refuse

ARGUMENTS = '{"city": "Paris"}'
WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
AGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
DATA_URL = f"data:image/png;base64,{PNG}"
JPEG_LINK = "https://example.org/cat.jpg"


async def calls_tools(call: Call) -> None:
    """Two parallel calls of ``get_weather``."""
    if call.is_stream:
        await call.start_stream()
        await call.role()
        for index in range(2):
            begun = {"name": "get_weather", "arguments": ""}
            entry = {"index": index, "id": f"call_{index}", "type": "function", "function": begun}
            await call.event(call.chunk({"tool_calls": [entry]}))
            for part in (ARGUMENTS[:5], ARGUMENTS[5:]):
                entry = {"index": index, "function": {"arguments": part}}
                await call.event(call.chunk({"tool_calls": [entry]}))
        await call.finish("tool_calls")
        if call.wants_usage:
            await call.usage()
        await call.end()
        return
    document = call.document()
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    document["choices"][0]["finish_reason"] = "tool_calls"
    document["choices"][0]["message"] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"call_{index}", "type": "function", "function": function} for index in range(2)
        ],
    }
    await call.json(document)


async def breaks(call: Call) -> None:
    """Half an answer, then a reset."""
    await call.start_stream()
    await call.role()
    await call.say("Hello")
    call.connection.reset()


async def endless(call: Call) -> None:
    """A word, and then nothing until the client leaves."""
    await call.start_stream()
    await call.role()
    await call.say("Hello")
    await call.connection.gone.wait()


async def as_told(call: Call) -> None:
    """What the words of the request ask for, so that a client's script needs no second channel.

    "busy 429" is refused once, and served when it comes again.
    """
    words = json.dumps(call.body.get("messages"))
    if "use tools" in words:
        await calls_tools(call)
    elif "break" in words:
        await breaks(call)
    elif "endless" in words:
        await endless(call)
    elif "busy" in words and _is_first(call):
        status = 429 if "429" in words else 503
        await refuse(status, "full", [("Retry-After", "3")])(call)
    elif "age" in words and "response_format" in call.body:
        document = call.document()
        document["choices"][0]["message"]["content"] = '{"age": 36}'
        await call.json(document)
    else:
        await ordinary(call)


def _is_first(call: Call) -> bool:
    return [c.body for c in call.stub.calls].count(call.body) == 1
