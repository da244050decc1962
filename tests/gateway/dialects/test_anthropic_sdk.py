"""Anthropic's own SDK reads what the translation writes."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2
import pytest

from mindrouter.gateway.dialects.anthropic.errors import error_body
from mindrouter.gateway.dialects.anthropic.reading import read_messages
from mindrouter.gateway.dialects.anthropic.request import to_chat
from mindrouter.gateway.dialects.anthropic.response import from_chat
from mindrouter.gateway.dialects.anthropic.stream import MessageStream
from mindrouter.gateway.errors import GatewayError
from tests.gateway.dialects.clients import Backend, translated
from tests.gateway.dialects.wire import (
    DONE,
    REPLY,
    call,
    chunk,
    completion,
    more,
    sample,
    usage_chunk,
)

HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]


def client(backend: Backend) -> anthropic.Anthropic:
    def serve(request: httpx2.Request) -> httpx2.Response:
        try:
            asked = read_messages(request.read(), None)
            answer = backend.ask(to_chat(asked.fields))
        except GatewayError as error:
            return httpx2.Response(error.status, content=error_body(error, "r1"))
        if not asked.stream:
            return httpx2.Response(200, content=from_chat(answer, REPLY))
        stream = MessageStream(REPLY)
        body = translated(stream, answer, stream.finish)
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=body)

    transport = httpx2.MockTransport(serve)
    return anthropic.Anthropic(
        api_key="k",
        base_url="http://router.test",
        max_retries=0,
        http_client=anthropic.DefaultHttpxClient(transport=transport),
    )


def test_a_message() -> None:
    backend = Backend(completion(content="Hi", reasoning="Hm."))
    made = client(backend).messages.create(model="m", max_tokens=5, messages=HI)
    assert [block.type for block in made.content] == ["thinking", "text"]
    assert made.stop_reason == "end_turn"
    assert made.usage.input_tokens == 12
    assert made.usage.cache_read_input_tokens == 24
    assert backend.asked == [{"model": "served", "messages": HI, "max_tokens": 5}]


def test_a_conversation_with_tools() -> None:
    """The answer's blocks go back as they are, as programs that call tools do."""
    tool_calls = [call("a", "f", '{"x":1}'), call("b", "f", "{}")]
    backend = Backend(completion("tool_calls", reasoning="Hm.", tool_calls=tool_calls))
    sdk = client(backend)
    made = sdk.messages.create(model="m", max_tokens=5, messages=HI, tools=TOOLS)
    uses = [block for block in made.content if block.type == "tool_use"]
    assert [(use.id, use.input) for use in uses] == [("a", {"x": 1}), ("b", {})]
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "1"} for use in uses]
    conversation: Any = [
        *HI,
        {"role": "assistant", "content": made.content},
        {"role": "user", "content": results},
    ]
    backend.answer = completion(content="Done.")
    sdk.messages.create(model="m", max_tokens=5, messages=conversation, tools=TOOLS)
    asked = backend.asked[1]["messages"]
    assert [message["role"] for message in asked] == ["user", "assistant", "tool", "tool"]
    assert asked[1]["reasoning_content"] == "Hm."
    assert asked[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x":1}'}


def test_a_stream_of_text() -> None:
    backend = Backend(sample("vllm-chat-stream.sse"))
    with client(backend).messages.stream(model="m", max_tokens=5, messages=HI) as stream:
        assert "".join(stream.text_stream) == "Hello, welcome to"
        made = stream.get_final_message()
    assert made.stop_reason == "max_tokens"
    assert (made.usage.input_tokens, made.usage.output_tokens) == (36, 4)
    assert backend.asked[0]["stream_options"] == {"include_usage": True}


def test_a_stream_of_thinking_and_parallel_calls() -> None:
    backend = Backend(
        chunk(role="assistant", content="")
        + chunk(reasoning="Hm.")
        + chunk(tool_calls=[call("a", "f", '{"x"', 0)])
        + b":\n\n"
        + chunk(tool_calls=[more(0, ":1}")])
        + chunk(tool_calls=[call("b", "g", "", 1)])
        + chunk("tool_calls")
        + usage_chunk()
        + DONE
    )
    with client(backend).messages.stream(
        model="m", max_tokens=5, messages=HI, tools=TOOLS
    ) as stream:
        made = stream.get_final_message()
    assert [block.type for block in made.content] == ["thinking", "tool_use", "tool_use"]
    uses = [block for block in made.content if block.type == "tool_use"]
    assert [(use.name, use.input) for use in uses] == [("f", {"x": 1}), ("g", {})]
    assert made.stop_reason == "tool_use"


def test_a_stream_that_breaks_off_raises_after_what_was_seen() -> None:
    backend = Backend(chunk(content="Hel"))
    seen = []
    with (
        pytest.raises(anthropic.APIStatusError, match="without saying that it was finished"),
        client(backend).messages.stream(model="m", max_tokens=5, messages=HI) as stream,
    ):
        seen.extend(stream.text_stream)
    assert seen == ["Hel"]


def test_a_refusal_names_the_field() -> None:
    document: Any = [{"role": "user", "content": [{"type": "document", "source": {}}]}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        client(Backend(b"")).messages.create(model="m", max_tokens=5, messages=document)
    assert "messages[0].content[0].type" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        ("invalid_api_key", anthropic.AuthenticationError),
        ("permission_denied", anthropic.PermissionDeniedError),
        ("model_not_found", anthropic.NotFoundError),
        ("rate_limit_exceeded", anthropic.RateLimitError),
        ("internal_error", anthropic.InternalServerError),
    ],
)
def test_errors_raise_what_programs_catch(code: str, raised: type[Exception]) -> None:
    class Refusing(Backend):
        def ask(self, translated: Any) -> bytes:
            raise GatewayError(code, "Why.")

    with pytest.raises(raised, match=r"Why\."):
        client(Refusing(b"")).messages.create(model="m", max_tokens=5, messages=HI)
