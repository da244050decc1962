"""OpenAI's own SDK reads what the translation writes."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest
from pydantic import BaseModel

from mindrouter.gateway.dialects.responses.errors import error_body
from mindrouter.gateway.dialects.responses.reading import read_responses
from mindrouter.gateway.dialects.responses.request import to_chat
from mindrouter.gateway.dialects.responses.response import from_chat
from mindrouter.gateway.dialects.responses.stream import ResponseStream
from mindrouter.gateway.dialects.translation import Reply, Timings
from mindrouter.gateway.errors import GatewayError
from tests.gateway.dialects.clients import Backend, translated
from tests.gateway.dialects.wire import DONE, call, chunk, completion, sample, usage_chunk

TOOLS: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}]


def client(backend: Backend) -> openai.OpenAI:
    def serve(request: httpx2.Request) -> httpx2.Response:
        try:
            asked = read_responses(request.read(), None)
            chat = to_chat(asked.fields)
            answer = backend.ask(chat)
            reply = Reply(
                reply_id="r1",
                model=asked.model,
                created=1_795_953_048.0,
                prompt_tokens=asked.prompt_tokens,
                settings=chat.settings,
            )
            if not asked.stream:
                return httpx2.Response(200, content=from_chat(answer, reply, Timings()))
        except GatewayError as error:
            return httpx2.Response(error.status, content=error_body(error, "r1"))
        stream = ResponseStream(reply)
        body = translated(stream, answer, stream.finish)
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=body)

    return openai.OpenAI(
        api_key="k",
        base_url="http://router.test/v1",
        max_retries=0,
        http_client=openai.DefaultHttpx2Client(transport=httpx2.MockTransport(serve)),
    )


def test_a_response() -> None:
    backend = Backend(completion(content="Hi", reasoning="Hm."))
    made = client(backend).responses.create(model="m", input="hi", instructions="s")
    assert made.output_text == "Hi"
    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert made.status == "completed"
    assert made.usage is not None
    assert made.usage.input_tokens_details.cached_tokens == 24
    assert backend.asked[0]["messages"][0] == {"role": "system", "content": "s"}


def test_a_conversation_with_tools() -> None:
    """The answer's items go back as they are, as programs that call tools do."""
    tool_calls = [call("a", "f", '{"x":1}'), call("b", "f", "{}")]
    backend = Backend(completion("tool_calls", reasoning="Hm.", tool_calls=tool_calls))
    sdk = client(backend)
    made = sdk.responses.create(model="m", input="hi", tools=TOOLS)
    calls = [item for item in made.output if item.type == "function_call"]
    assert [(c.call_id, c.arguments) for c in calls] == [("a", '{"x":1}'), ("b", "{}")]
    results = [{"type": "function_call_output", "call_id": c.call_id, "output": "1"} for c in calls]
    conversation: Any = [{"role": "user", "content": "hi"}, *made.output, *results]
    backend.answer = completion(content="Done.")
    sdk.responses.create(model="m", input=conversation, tools=TOOLS)
    asked = backend.asked[1]["messages"]
    assert [message["role"] for message in asked] == ["user", "assistant", "tool", "tool"]
    assert asked[1]["reasoning_content"] == "Hm."


def test_a_parsed_answer() -> None:
    class Person(BaseModel):
        name: str

    backend = Backend(completion(content='{"name":"Ada"}'))
    made = client(backend).responses.parse(model="m", input="hi", text_format=Person)
    assert made.output_parsed == Person(name="Ada")
    assert backend.asked[0]["response_format"]["json_schema"]["name"] == "Person"


def test_a_stream_of_text() -> None:
    backend = Backend(sample("vllm-chat-stream.sse"))
    with client(backend).responses.stream(model="m", input="hi") as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(texts) == "Hello, welcome to"


def test_a_stream_of_reasoning_and_calls() -> None:
    backend = Backend(
        chunk(reasoning="Hm.")
        + chunk(content="Looking.")
        + chunk(tool_calls=[call("a", "f", '{"x":1}', 0)])
        + chunk(tool_calls=[call("b", "f", "{}", 1)])
        + chunk("tool_calls")
        + usage_chunk()
        + DONE
    )
    with client(backend).responses.stream(model="m", input="hi", tools=TOOLS) as stream:
        for _ in stream:
            pass
        made = stream.get_final_response()
    assert [item.type for item in made.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert made.output_text == "Looking."
    assert made.usage is not None
    assert made.usage.output_tokens == 4


def test_every_event_is_of_the_sdks_types() -> None:
    backend = Backend(
        chunk(reasoning="Hm.")
        + chunk(content="a")
        + chunk(refusal="No.")
        + chunk(tool_calls=[call("a", "f", "{}", 0)])
        + chunk("tool_calls")
        + usage_chunk()
        + DONE
    )
    events = list(client(backend).responses.create(model="m", input="hi", stream=True))
    for event in events:
        type(event).model_validate(event.model_dump(by_alias=True), strict=True)
    assert {type(event).__name__ for event in events} >= {
        "ResponseCreatedEvent",
        "ResponseReasoningTextDeltaEvent",
        "ResponseTextDeltaEvent",
        "ResponseRefusalDeltaEvent",
        "ResponseFunctionCallArgumentsDoneEvent",
        "ResponseCompletedEvent",
    }


def test_a_stream_that_breaks_off_raises_after_what_was_seen() -> None:
    events = client(Backend(chunk(content="Hel"))).responses.create(
        model="m", input="hi", stream=True
    )
    seen = [next(events).type for _ in range(5)]
    assert seen[-1] == "response.output_text.delta"
    with pytest.raises(openai.APIError, match="without saying that it was finished"):
        next(events)


def test_a_refusal_names_the_field() -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client(Backend(b"")).responses.create(model="m", input="hi", store=True)
    assert caught.value.param == "store"
