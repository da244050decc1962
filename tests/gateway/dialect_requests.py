"""The smallest request of each address in another dialect, and what ends an answer there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindrouter.gateway.dialects.addresses import FORMS
from tests.running import HELLO
from tests.stubs.openai_stub import Behaviour, Call, sse

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "m", "max_tokens": 20, "messages": HELLO},
    "/anthropic/v1/messages": {"model": "m", "max_tokens": 20, "messages": HELLO},
    "/v1/messages/count_tokens": {"model": "m", "messages": HELLO},
    "/anthropic/v1/messages/count_tokens": {"model": "m", "messages": HELLO},
    "/v1/responses": {"model": "m", "input": "Hello"},
    "/api/chat": {"model": "m", "messages": HELLO},
    "/api/generate": {"model": "m", "prompt": "Hello"},
    "/api/embed": {"model": "m", "input": "Hello"},
    "/api/embeddings": {"model": "m", "prompt": "Hello"},
}
STREAMING = sorted(path for path, form in FORMS.items() if form.stream is not None)
#: The last thing that a whole stream says, by dialect's address.
LAST_WORDS = {
    "/v1/messages": "event: message_stop",
    "/anthropic/v1/messages": "event: message_stop",
    "/v1/responses": "event: response.completed",
    "/api/chat": '"done":true',
    "/api/generate": '"done":true',
}

#: What the text of an answer is, by address.
TEXT_OF: dict[str, Callable[[Any], str]] = {
    "/v1/messages": lambda d: d["content"][0]["text"],
    "/anthropic/v1/messages": lambda d: d["content"][0]["text"],
    "/v1/responses": lambda d: d["output"][0]["content"][0]["text"],
    "/api/chat": lambda d: d["message"]["content"],
    "/api/generate": lambda d: d["response"],
}


def breaks_off(*, how: str) -> Behaviour:
    """A chat stream that says one word; then an error event, a clean end, or a reset."""

    async def behave(call: Call) -> None:
        await call.start_stream()
        await call.role()
        await call.say("Hello")
        if how == "error":
            await call.connection.chunk(sse({"error": {"message": "out of memory", "code": 500}}))
            await call.connection.end_chunked()
        elif how == "end":
            await call.connection.end_chunked()
        else:
            call.connection.reset()

    return behave


def lines_of(*documents: bytes, end: bool = True) -> Behaviour:
    """Ollama's lines of JSON as a stream."""

    async def behave(call: Call) -> None:
        await call.connection.start_chunked(200, [("Content-Type", "application/x-ndjson")])
        for document in documents:
            await call.connection.chunk(document + b"\n")
        if end:
            await call.connection.end_chunked()
        else:
            call.connection.close()

    return behave
