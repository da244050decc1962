"""The table of addresses: each is read, translated and answered in its own form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mindrouter.gateway.dialects.addresses import FORMS, errors_at
from mindrouter.gateway.dialects.translation import Timings
from mindrouter.gateway.errors import GatewayError
from scheduler.core.jobs import Usage
from tests.gateway.dialects.wire import DONE, REPLY, chunk, completion, sample, usage_chunk

MESSAGES = [{"role": "user", "content": "hi"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"max_tokens": 5, "messages": MESSAGES},
    "/anthropic/v1/messages": {"max_tokens": 5, "messages": MESSAGES},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/anthropic/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "hi"},
    "/api/embed": {"input": "hi"},
    "/api/embeddings": {"prompt": "hi"},
}
EMBEDDINGS = b'{"data":[{"embedding":[0.5]}],"usage":{"prompt_tokens":2}}'
STREAMING = sorted(path for path, form in FORMS.items() if form.stream is not None)


def test_these_are_all() -> None:
    assert set(FORMS) == set(REQUESTS)


@pytest.mark.parametrize("path", sorted(path for path in REQUESTS if "count" not in path))
def test_a_request_goes_there_and_back(path: str) -> None:
    form = FORMS[path]
    body = json.dumps({"model": "m", "stream": False, **REQUESTS[path]}).encode()
    if form.stream is None:
        body = body.replace(b'"stream": false, ', b"")
    asked = form.read(body, None)
    assert asked.model == "m"
    chat = form.translate(asked.fields)
    assert json.loads(chat.body_for("served"))["model"] == "served"
    embeds = chat.path == b"/v1/embeddings"
    answer = EMBEDDINGS if embeds else completion(content="Hi")
    whole = form.whole(answer, REPLY, Timings())
    assert b"0.5" in whole if embeds else b'"Hi"' in whole


@pytest.mark.parametrize(
    "path", ["/v1/messages/count_tokens", "/anthropic/v1/messages/count_tokens"]
)
def test_a_count_is_answered_by_estimate(path: str) -> None:
    form = FORMS[path]
    asked = form.read(json.dumps({"model": "m", **REQUESTS[path]}).encode(), None)
    own = form.own_answer(asked)
    assert own is not None
    assert json.loads(own(REPLY)) == {"input_tokens": asked.prompt_tokens}


@pytest.mark.parametrize("path", STREAMING)
def test_a_stream_goes_there_and_back(path: str) -> None:
    form = FORMS[path]
    assert form.stream is not None
    stream = form.stream(REPLY)
    told = stream.feed(chunk(content="Hi") + chunk("stop") + usage_chunk() + DONE)
    told += stream.finish(Timings())
    assert b'"Hi"' in told
    assert stream.usage() == Usage(prompt_tokens=36, completion_tokens=4, cached_tokens=24)
    assert form.takes_comments == (form.stream_type != b"application/x-ndjson")


@pytest.mark.parametrize("path", STREAMING)
def test_a_native_stream_that_ends_at_once_is_not_finished(path: str) -> None:
    form = FORMS[path]
    assert form.watch is not None
    asked = form.read(json.dumps({"model": "m", **REQUESTS[path]}).encode(), None)
    watched = form.watch(asked, "ollama")
    assert watched.finish() == b""
    assert not watched.finished


@pytest.mark.parametrize(
    ("path", "engine", "name", "usage"),
    [
        (
            "/v1/messages",
            "llamacpp",
            "llamacpp-messages",
            Usage(prompt_tokens=32, completion_tokens=8, cached_tokens=31),
        ),
        ("/v1/messages", "vllm", "vllm-messages", Usage(prompt_tokens=32, completion_tokens=6)),
        ("/v1/responses", "vllm", "vllm-responses", Usage(prompt_tokens=32, completion_tokens=6)),
    ],
)
def test_usage_is_read_as_the_engine_counts(
    path: str, engine: str, name: str, usage: Usage
) -> None:
    form = FORMS[path]
    asked = form.read(json.dumps({"model": "m", **REQUESTS[path]}).encode(), None)
    assert form.usage_in(sample(f"{name}.json"), asked, engine) == usage
    assert engine in form.speakers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"error": {"message": "Why.", "code": "not_found"}}),
        ("/v1/responses", {"error": {"message": "Why.", "code": "not_found"}}),
        (
            "/v1/messages/count_tokens",
            {"type": "error", "error": {"type": "not_found_error", "message": "Why."}},
        ),
        (
            "/anthropic/v1/models",
            {"type": "error", "error": {"type": "not_found_error", "message": "Why."}},
        ),
        ("/api/nowhere", {"error": "Why."}),
    ],
)
def test_errors_are_in_the_form_of_their_address(path: str, body: dict[str, Any]) -> None:
    told = json.loads(errors_at(path).body(GatewayError("not_found", "Why."), "r1"))
    told.pop("request_id", None)
    if isinstance(told["error"], dict):
        told["error"] = {k: v for k, v in told["error"].items() if k in body["error"]}
    assert told == body


def test_a_request_id_is_in_the_bodies_that_have_a_place_for_it() -> None:
    told = json.loads(errors_at("/v1/messages").body(GatewayError("not_found", "Why."), "r1"))
    assert told["request_id"] == "r1"


def test_an_error_event_of_openais_form_is_one_event() -> None:
    event = errors_at("/v1/completions").event(GatewayError("not_found", "Why."), "r1")
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
