"""Ollama's own SDK reads what the translation writes."""

from __future__ import annotations

from typing import Any

import httpx
import ollama
import pytest

from mindrouter.gateway.dialects.ollama import reading, request, response
from mindrouter.gateway.dialects.ollama.errors import error_body
from mindrouter.gateway.dialects.ollama.stream import LineStream
from mindrouter.gateway.dialects.translation import Timings
from mindrouter.gateway.errors import GatewayError
from tests.gateway.dialects.clients import Backend, translated
from tests.gateway.dialects.ollama_requests import PNG
from tests.gateway.dialects.wire import DONE, REPLY, call, chunk, completion, sample, usage_chunk

HI = [{"role": "user", "content": "hi"}]
TIMINGS = Timings(total_seconds=1.5, output_seconds=1.0)
FORMS: dict[str, tuple[Any, Any, Any]] = {
    "/api/chat": (reading.read_chat, request.chat_to_chat, "chat"),
    "/api/generate": (reading.read_generate, request.generate_to_chat, "generate"),
}
EMBEDDING: dict[str, tuple[Any, Any, Any]] = {
    "/api/embed": (
        reading.read_embed,
        request.embed_to_embeddings,
        response.embed_from_embeddings,
    ),
    "/api/embeddings": (
        reading.read_embeddings,
        request.embeddings_to_embeddings,
        response.embeddings_from_embeddings,
    ),
}


def client(backend: Backend) -> ollama.Client:
    def serve(sent: httpx.Request) -> httpx.Response:
        path = sent.url.path
        try:
            read, to, form = (FORMS | EMBEDDING)[path]
            asked = read(sent.read(), None)
            answer = backend.ask(to(asked.fields))
            if path in EMBEDDING:
                return httpx.Response(200, content=form(answer, REPLY, TIMINGS))
            if not asked.stream:
                body = response.from_chat(answer, REPLY, TIMINGS, form)
                return httpx.Response(200, content=body)
        except GatewayError as error:
            return httpx.Response(error.status, content=error_body(error, "r1"))
        stream = LineStream(REPLY, form)
        return httpx.Response(
            200, content=translated(stream, answer, lambda: stream.finish(TIMINGS))
        )

    return ollama.Client(host="http://router.test", transport=httpx.MockTransport(serve))


def test_a_chat_with_an_image_and_options() -> None:
    backend = Backend(completion(content="Hi", reasoning="Hm."))
    made = client(backend).chat(
        model="m",
        messages=[{"role": "user", "content": "what?", "images": [PNG]}],
        options={"temperature": 0, "num_predict": 5},
        format="json",
        think=True,
        keep_alive="5m",
    )
    assert (made.message.content, made.message.thinking) == ("Hi", "Hm.")
    assert (made.prompt_eval_count, made.eval_count) == (36, 4)
    assert made.total_duration == 1_500_000_000
    assert backend.asked[0]["max_tokens"] == 5
    assert backend.asked[0]["response_format"] == {"type": "json_object"}


def test_a_conversation_with_tools() -> None:
    """The answer's message goes back as it is, as programs that call tools do."""

    def weather(city: str) -> str:
        """Weather of a city.

        Args:
          city: its name
        """
        return city

    tool_calls = [call("a", "weather", '{"city":"Paris"}'), call("b", "weather", "{}")]
    backend = Backend(completion("tool_calls", tool_calls=tool_calls))
    sdk = client(backend)
    made = sdk.chat(model="m", messages=HI, tools=[weather])
    assert made.message.tool_calls is not None
    assert [c.function.arguments for c in made.message.tool_calls] == [{"city": "Paris"}, {}]
    results = [{"role": "tool", "tool_name": "weather", "content": text} for text in "12"]
    backend.answer = completion(content="Done.")
    sdk.chat(model="m", messages=[*HI, made.message, *results], tools=[weather])
    asked = backend.asked[1]["messages"]
    assert [c["id"] for c in asked[1]["tool_calls"]] == ["call_0", "call_1"]
    assert [m["tool_call_id"] for m in asked[2:]] == ["call_0", "call_1"]


def test_a_stream() -> None:
    backend = Backend(sample("vllm-chat-stream.sse"))
    parts = list(client(backend).chat(model="m", messages=HI, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "Hello, welcome to"
    assert parts[-1].done
    assert parts[-1].done_reason == "length"
    assert parts[-1].prompt_eval_count == 36


def test_a_stream_with_calls() -> None:
    answer = chunk(tool_calls=[call("a", "f", '{"x":1}', 0)]) + chunk("tool_calls")
    parts = list(
        client(Backend(answer + usage_chunk() + DONE)).chat(model="m", messages=HI, stream=True)
    )
    calls = [c for part in parts for c in part.message.tool_calls or ()]
    assert [(c.function.name, c.function.arguments) for c in calls] == [("f", {"x": 1})]


def test_generate() -> None:
    backend = Backend(completion(content="Hi"))
    made = client(backend).generate(model="m", prompt="hi", system="s")
    assert made.response == "Hi"
    assert backend.asked[0]["messages"][0] == {"role": "system", "content": "s"}
    backend.answer = sample("vllm-chat-stream.sse")
    parts = list(client(backend).generate(model="m", prompt="hi", stream=True))
    assert "".join(part.response or "" for part in parts) == "Hello, welcome to"


def test_embeddings() -> None:
    backend = Backend(b'{"data":[{"embedding":[0.5,1.0]}],"usage":{"prompt_tokens":2}}')
    made = client(backend).embed(model="m", input=["a"], dimensions=2)
    assert list(made.embeddings[0]) == [0.5, 1.0]
    assert made.prompt_eval_count == 2
    assert list(client(backend).embeddings(model="m", prompt="a").embedding) == [0.5, 1.0]


def test_a_stream_that_breaks_off_raises_after_what_was_seen() -> None:
    parts = client(Backend(chunk(content="Hel"))).chat(model="m", messages=HI, stream=True)
    assert next(parts).message.content == "Hel"
    with pytest.raises(ollama.ResponseError, match="without saying that it was finished"):
        next(parts)


def test_a_refusal_names_the_field() -> None:
    with pytest.raises(ollama.ResponseError, match=r"options\.mirostat") as caught:
        client(Backend(b"")).chat(model="m", messages=HI, options={"mirostat": 2})
    assert caught.value.status_code == 400
