"""Requests and answers of the Responses API that pass through untranslated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrouter.gateway.dialects.responses.native import ResponseEvents, usage_in_answer
from mindrouter.gateway.dialects.responses.reading import read_responses
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.requests import Asked
from scheduler.core.jobs import Needs, Usage
from tests.gateway.dialects.wire import cut, sample


def read(**request: Any) -> Asked:
    return read_responses(json.dumps({"model": "m", "input": "hi", **request}).encode(), None)


def test_the_few_fields_that_scheduling_needs() -> None:
    asked = read(stream=True, max_output_tokens=9)
    assert (asked.model, asked.stream, asked.max_tokens) == ("m", True, 9)
    assert asked.needs == Needs()
    assert asked.prompt_tokens == 1 + 4  # two letters, one message
    assert b"stream_options" not in asked.body_for("m")


IMAGE = {"type": "input_image", "image_url": "u"}
TOOL = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("request_part", "needs"),
    [
        ({"input": [{"role": "user", "content": [IMAGE]}]}, Needs(vision=True)),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": [IMAGE]}]},
            Needs(vision=True),
        ),
        ({"tools": [TOOL]}, Needs(tools=True)),
        ({"tools": []}, Needs()),
        ({"tools": [TOOL], "tool_choice": "none"}, Needs()),
        ({"text": {"format": {"type": "json_schema"}}}, Needs(json=True)),
        ({"text": {"format": {"type": "text"}}}, Needs()),
        ({"text": {}}, Needs()),
    ],
)
def test_needs_are_read_from_the_body(request_part: dict[str, Any], needs: Needs) -> None:
    assert read(**request_part).needs == needs


def test_tokens_are_estimated_from_all_that_is_said() -> None:
    asked = read(
        instructions="x" * 400,
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "y" * 400}, IMAGE]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "z" * 400},
            {"type": "function_call_output", "call_id": "a", "output": "o" * 400},
        ],
    )
    assert asked.prompt_tokens == 400 + 3 * 4 + 765


def test_the_cache_key_is_named_or_how_the_conversation_begins() -> None:
    assert read(prompt_cache_key="mine").cache_key == "mine"
    assert read().cache_key is None
    long = [{"role": "user", "content": "x" * 5000}]
    key = read(input=long).cache_key
    assert key is not None
    assert read(input=[*long, {"role": "assistant", "content": "a"}]).cache_key == key
    assert read(input=long, instructions="i").cache_key != key


@pytest.mark.parametrize(
    ("request_part", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user", "content": 5}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": "json"}, "text"),
        ({"model": None}, "model"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"background": True}, "background"),
    ],
)
def test_what_is_malformed_or_needs_a_memory_is_refused_by_name(
    request_part: dict[str, Any], param: str
) -> None:
    with pytest.raises(GatewayError) as caught:
        read(**request_part)
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)


# ---- usage


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("llamacpp", Usage(prompt_tokens=32, completion_tokens=8, cached_tokens=24)),
        ("vllm", Usage(prompt_tokens=32, completion_tokens=6)),
    ],
)
def test_usage_of_real_answers(name: str, usage: Usage) -> None:
    assert usage_in_answer(sample(f"{name}-responses.json")) == usage


def test_usage_that_cannot_be_believed_is_none() -> None:
    assert usage_in_answer(b'{"usage":null}') is None
    assert usage_in_answer(b'{"usage":{"input_tokens":-1,"output_tokens":1}}') is None
    with pytest.raises(GatewayError):
        usage_in_answer(b"<html>")


def test_a_real_stream_passes_unchanged_and_tells_its_usage() -> None:
    whole = sample("llamacpp-responses-stream.sse")
    stream = ResponseEvents(prompt_tokens=9)
    assert stream.feed(whole) + stream.finish() == whole
    assert stream.usage == Usage(prompt_tokens=32, completion_tokens=4, cached_tokens=31)
    assert stream.finished
    assert stream.over
    assert stream.estimated_tokens == 4


def test_a_stream_that_is_cut_short_is_not_finished() -> None:
    whole = sample("llamacpp-responses-stream.sse")
    stream = ResponseEvents(prompt_tokens=9)
    stream.feed(whole[: whole.index(b"event: response.completed")])
    assert not stream.finished
    assert stream.usage is None


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (b'{"type":"error","code":"server_error","message":"ill","param":null}', "ill"),
        (
            b'{"type":"response.failed","response":{"error":{"code":"server_error"}}}',
            {"code": "server_error"},
        ),
    ],
)
def test_a_failure_is_kept_from_the_client_and_ends_the_stream(event: bytes, error: Any) -> None:
    stream = ResponseEvents(prompt_tokens=9)
    assert stream.feed(b"data: " + event + b"\n\n") == b""
    assert stream.error == error
    assert stream.over
    assert not stream.finished


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_cut_of_the_bytes_gives_the_same_whole_events(data: st.DataObject) -> None:
    whole = sample("llamacpp-responses-stream.sse")
    places = data.draw(st.lists(st.integers(0, len(whole)), max_size=6))
    stream = ResponseEvents(prompt_tokens=9)
    told = [stream.feed(piece) for piece in cut(whole, places)]
    assert b"".join(told) == whole
    assert all(part == b"" or part.endswith(b"\n\n") for part in told)
