"""Requests and answers in Anthropic's form that pass through untranslated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrouter.gateway.dialects.anthropic.native import MessageEvents, usage_in_answer
from mindrouter.gateway.dialects.anthropic.reading import read_count_tokens, read_messages
from mindrouter.gateway.errors import GatewayError
from scheduler.core.jobs import Needs, Usage
from tests.gateway.dialects.wire import cut, sample

HI = {"role": "user", "content": "hi"}


def written(**request: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 5, "messages": [HI], **request}).encode()


# ---- reading


def test_the_few_fields_that_scheduling_needs() -> None:
    asked = read_messages(written(stream=True, max_tokens=99), None)
    assert (asked.model, asked.stream, asked.max_tokens) == ("m", True, 99)
    assert asked.needs == Needs()
    assert asked.prompt_tokens == 1 + 4  # two letters, one message
    assert asked.cache_key is None


def test_only_the_models_name_changes_for_a_backend_that_speaks_the_form() -> None:
    asked = read_messages(
        b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"\xc3\xa4"}],"x":1.50}',
        None,
    )
    assert asked.body_for("real") == (
        b'{"model":"real","max_tokens":1,"messages":[{"role":"user","content":"\xc3\xa4"}],"x":1.50}'
    )


def test_a_stream_passes_on_without_additions() -> None:
    assert b"stream_options" not in read_messages(written(stream=True), None).body_for("m")


IMAGE = {"type": "image", "source": {"type": "url", "url": "u"}}
TOOL = {"name": "f", "input_schema": {}}


@pytest.mark.parametrize(
    ("request_part", "needs"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, Needs(vision=True)),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}
                        ],
                    }
                ]
            },
            Needs(vision=True),
        ),
        ({"tools": [TOOL]}, Needs(tools=True)),
        ({"tools": []}, Needs()),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, Needs()),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, Needs(tools=True)),
        ({"output_config": {"format": {"type": "json_schema"}}}, Needs(json=True)),
        ({"output_config": {"effort": "low"}}, Needs()),
        ({"output_format": {"type": "json_schema"}}, Needs(json=True)),
    ],
)
def test_needs_are_read_from_the_body(request_part: dict[str, Any], needs: Needs) -> None:
    assert read_messages(written(**request_part), None).needs == needs


def test_tokens_are_estimated_from_all_that_is_said() -> None:
    content = [
        {"type": "text", "text": "x" * 400},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"k": "y" * 393}},  # 402 bytes
        {"type": "tool_result", "tool_use_id": "a", "content": "z" * 400},
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "zz"}]},
        IMAGE,
    ]
    asked = read_messages(
        written(system="s" * 396, messages=[{"role": "user", "content": content}]), None
    )
    # (400 + 402 + 400 + 2 + 396) / 4, one message, one image
    assert asked.prompt_tokens == 400 + 4 + 765


def test_of_blocks_within_tool_results_that_nest_on_only_the_bytes_are_counted() -> None:
    """To look into each of hundreds would read the innermost hundreds of times."""

    def tokens(content: str) -> int:
        message = '{"model":"m","max_tokens":1,"messages":[{"role":"user","content":%s}]}'
        return read_messages((message % content).encode(), None).prompt_tokens

    def within(content: str, times: int) -> str:
        return '[{"type":"tool_result","content":' * times + content + "}]" * times

    text = '[{"type":"text","text":"%s"}]' % ("x" * 400)
    assert tokens(within(text, 2)) == 100 + 4
    assert tokens(within(text, 3)) == (len(text) + 3) // 4 + 4
    deep = within(text, 200)
    assert tokens(deep) == (len(deep) - len(within("", 3)) + 3) // 4 + 4


def test_the_cache_key_is_how_the_conversation_begins() -> None:
    long = {"role": "user", "content": "x" * 5000}
    first = read_messages(written(messages=[long, HI]), None).cache_key
    other_end = read_messages(written(messages=[long, {**HI, "content": "?"}]), None).cache_key
    other_system = read_messages(written(messages=[long], system="s"), None).cache_key
    assert first is not None
    assert first == other_end != other_system
    assert read_messages(written(messages=[long]), "mine").cache_key == "mine"


@pytest.mark.parametrize(
    ("request_part", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"system": 5}, "system"),
        ({"model": ""}, "model"),
        ({"tools": {}}, "tools"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_a_malformed_field_is_refused_by_name(request_part: dict[str, Any], param: str) -> None:
    with pytest.raises(GatewayError) as caught:
        read_messages(written(**request_part), None)
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)


def test_counting_needs_no_limit_and_generates_nothing() -> None:
    body = json.dumps({"model": "m", "messages": [HI], "stream": True}).encode()
    asked = read_count_tokens(body, None)
    assert (asked.max_tokens, asked.stream, asked.prompt_tokens) == (0, False, 5)


# ---- usage


@pytest.mark.parametrize(
    ("name", "cached_apart", "usage"),
    [
        # llama.cpp: 1 input token beside 31 cached ones
        ("llamacpp", True, Usage(prompt_tokens=32, completion_tokens=8, cached_tokens=31)),
        ("vllm", False, Usage(prompt_tokens=32, completion_tokens=6)),
    ],
)
def test_usage_of_real_answers(name: str, cached_apart: bool, usage: Usage) -> None:
    body = sample(f"{name}-messages.json")
    assert usage_in_answer(body, cached_apart=cached_apart, prompt_tokens=9) == usage


def test_vllm_counts_cached_tokens_in() -> None:
    counts = {"input_tokens": 32, "output_tokens": 6, "cache_read_input_tokens": 24}
    body = json.dumps({"type": "message", "usage": counts}).encode()
    assert usage_in_answer(body, cached_apart=False, prompt_tokens=9) == Usage(
        prompt_tokens=32, completion_tokens=6, cached_tokens=24
    )


def test_usage_that_cannot_be_believed_is_none() -> None:
    for counts in ({"input_tokens": -1, "output_tokens": 1}, {"input_tokens": 1}):
        body = json.dumps({"type": "message", "usage": counts}).encode()
        assert usage_in_answer(body, cached_apart=True, prompt_tokens=9) is None
    with pytest.raises(GatewayError):
        usage_in_answer(b"<html>", cached_apart=True, prompt_tokens=9)


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("llamacpp", Usage(prompt_tokens=32, completion_tokens=4, cached_tokens=31)),
        ("vllm", Usage(prompt_tokens=32, completion_tokens=3)),
    ],
)
def test_real_streams_pass_unchanged_and_tell_their_usage(name: str, usage: Usage) -> None:
    whole = sample(f"{name}-messages-stream.sse")
    stream = MessageEvents(prompt_tokens=9, cached_apart=name == "llamacpp")
    assert stream.feed(whole) + stream.finish() == whole
    assert stream.usage == usage
    assert stream.finished
    assert stream.over
    assert stream.first_token_seen
    assert stream.estimated_tokens == usage.completion_tokens


def test_a_stream_that_is_cut_short_is_not_finished() -> None:
    whole = sample("vllm-messages-stream.sse")
    stream = MessageEvents(prompt_tokens=9, cached_apart=False)
    stream.feed(whole[: whole.index(b"event: message_delta")])
    assert not stream.finished
    assert stream.usage is None
    assert stream.estimated_tokens == 3


def test_an_error_event_is_kept_from_the_client_and_ends_the_stream() -> None:
    stream = MessageEvents(prompt_tokens=9, cached_apart=False)
    error = b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"ill"}}\n\n'
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    assert stream.feed(ping + error + ping) == ping
    assert stream.error == {"type": "api_error", "message": "ill"}
    assert stream.over
    assert not stream.finished
    assert stream.feed(ping) == b""


def test_words_in_the_text_are_not_taken_for_events() -> None:
    delta = (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        b'"delta":{"type":"text_delta","text":"\\"usage\\" \\"error\\" message_stop"}}\n\n'
    )
    stream = MessageEvents(prompt_tokens=9, cached_apart=False)
    assert stream.feed(delta) == delta
    assert not stream.over


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_cut_of_the_bytes_gives_the_same_whole_events(data: st.DataObject) -> None:
    whole = sample("llamacpp-messages-stream.sse")
    places = data.draw(st.lists(st.integers(0, len(whole)), max_size=6))
    stream = MessageEvents(prompt_tokens=9, cached_apart=True)
    told = [stream.feed(piece) for piece in cut(whole, places)]
    assert b"".join(told) == whole
    assert all(part == b"" or part.endswith(b"\n\n") for part in told)
    assert stream.usage == Usage(prompt_tokens=32, completion_tokens=4, cached_tokens=31)
