"""What open engines answer, in Anthropic's form: whole, as a stream, and as an error."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrouter.gateway.dialects.anthropic.errors import error_body, error_event
from mindrouter.gateway.dialects.anthropic.response import count_tokens_body, from_chat
from mindrouter.gateway.dialects.anthropic.stream import MessageStream
from mindrouter.gateway.errors import GatewayError
from tests.gateway.dialects.wire import (
    DONE,
    REPLY,
    call,
    chunk,
    completion,
    cut,
    json_objects,
    more,
    names,
    sample,
    sse,
    texts,
    usage_chunk,
)


def message(**answer: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(from_chat(completion(**answer), REPLY))
    return made


def streamed(*events: bytes) -> list[tuple[str, Any]]:
    stream = MessageStream(REPLY)
    return sse(stream.feed(b"".join(events)) + stream.finish())


# ---- whole answers


def test_a_text_and_its_usage() -> None:
    assert message(content="Hi") == {
        "id": "msg_r1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hi"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        # 36 of the prompt, of which 24 were cached: Anthropic counts those apart
        "usage": {
            "input_tokens": 12,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 24,
            "output_tokens": 4,
        },
    }


def test_what_a_real_engine_answers() -> None:
    made = json.loads(from_chat(sample("llamacpp-chat.json"), REPLY))
    text = "Hello, welcome to my little corner of the world."
    assert made["content"] == [{"type": "text", "text": text}]
    assert made["usage"]["input_tokens"] == 36
    assert made["usage"]["output_tokens"] == 12


def test_what_the_client_began_is_not_repeated_to_it() -> None:
    reply = replace(REPLY, begun="The answer")
    made = json.loads(from_chat(completion(content="The answer is 4."), reply))
    assert made["content"] == [{"type": "text", "text": " is 4."}]


def test_reasoning_comes_first_and_calls_come_last() -> None:
    made = message(
        finish="tool_calls",
        reasoning="Hm.",
        content="Looking.",
        tool_calls=[call("a", "weather", '{"city": "Paris"}'), call(None, "time", "")],
    )
    assert made["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "id": "call_r1_1", "name": "time", "input": {}},
    ]
    assert made["stop_reason"] == "tool_use"


def test_reasoning_is_read_under_either_name_but_once() -> None:
    for names_given in ({"reasoning": "Hm."}, {"reasoning_content": "Hm.", "reasoning": "Hm."}):
        made = message(content="Hi", **names_given)
        assert [block["type"] for block in made["content"]] == ["thinking", "text"]


@pytest.mark.parametrize("written", ['"Paris"', '{"city": "Par', "[1]"])
def test_arguments_that_are_no_object_are_kept_as_they_were_written(written: str) -> None:
    made = message(finish="length", tool_calls=[call("a", "f", written)])
    assert made["content"][0]["input"] == {"arguments": written}


@pytest.mark.parametrize(
    ("answer", "stop_reason", "stop_sequence"),
    [
        ({"finish": "stop"}, "end_turn", None),
        ({"finish": "length"}, "max_tokens", None),
        ({"finish": "content_filter"}, "refusal", None),
        ({"finish": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
        ({"finish": "stop", "stop_reason": 128009}, "end_turn", None),
        ({"finish": "stop", "refusal": "No."}, "refusal", None),
        # vLLM says "stop" of a call that was asked for by name
        ({"finish": "stop", "tool_calls": [call("a", "f", "{}")]}, "tool_use", None),
        ({"finish": "length", "tool_calls": [call("a", "f", "{}")]}, "max_tokens", None),
    ],
)
def test_stop_reasons(answer: dict[str, Any], stop_reason: str, stop_sequence: str | None) -> None:
    made = message(content="Hi", **answer)
    assert (made["stop_reason"], made["stop_sequence"]) == (stop_reason, stop_sequence)


def test_usage_that_was_not_told_is_estimated() -> None:
    made = message(content="12345678", usage=None)
    assert made["usage"]["input_tokens"] == 11
    assert made["usage"]["output_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"<html>", "upstream_invalid"),
        (b'{"choices":[]}', "upstream_invalid"),
        (b'{"choices":[{"message":{"content":5}}]}', "upstream_invalid"),
        (b'{"error":{"message":"out of memory"}}', "upstream_error"),
        (completion(finish=None, content="Hi"), "upstream_ended_early"),
    ],
)
def test_an_answer_that_is_none_is_an_error(body: bytes, code: str) -> None:
    with pytest.raises(GatewayError) as caught:
        from_chat(body, REPLY)
    assert caught.value.code == code


def test_the_answer_to_a_count() -> None:
    assert json.loads(count_tokens_body(32)) == {"input_tokens": 32}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(names, json_objects), max_size=3), st.none() | texts)
def test_calls_and_text_are_those_of_the_model(
    calls: list[tuple[str, dict[str, Any]]], text: str | None
) -> None:
    tool_calls = [call(f"c{n}", name, json.dumps(a)) for n, (name, a) in enumerate(calls)]
    content = message(content=text, tool_calls=tool_calls)["content"]
    assert [block["text"] for block in content if block["type"] == "text"] == (
        [text] if text else []
    )
    uses = [block for block in content if block["type"] == "tool_use"]
    assert [(use["name"], use["input"]) for use in uses] == calls


# ---- streams

START = {
    "type": "message_start",
    "message": {
        "id": "msg_r1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 11,  # the estimate
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        },
    },
}
PING = ("ping", {"type": "ping"})


def block_start(index: int, block: dict[str, Any]) -> tuple[str, Any]:
    event = {"type": "content_block_start", "index": index, "content_block": block}
    return "content_block_start", event


def delta(index: int, **fields: str) -> tuple[str, Any]:
    event = {"type": "content_block_delta", "index": index, "delta": fields}
    return "content_block_delta", event


def block_stop(index: int) -> tuple[str, Any]:
    return "content_block_stop", {"type": "content_block_stop", "index": index}


def ending(stop_reason: str, *counts: int, stop_sequence: str | None = None) -> list[Any]:
    usage = dict(
        zip(
            (
                "input_tokens",
                "cache_creation_input_tokens",
                "cache_read_input_tokens",
                "output_tokens",
            ),
            counts,
            strict=True,
        )
    )
    stop = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
    return [
        ("message_delta", {"type": "message_delta", "delta": stop, "usage": usage}),
        ("message_stop", {"type": "message_stop"}),
    ]


def test_a_real_stream_of_text() -> None:
    assert streamed(sample("vllm-chat-stream.sse")) == [
        ("message_start", START),
        PING,
        block_start(0, {"type": "text", "text": ""}),
        delta(0, type="text_delta", text="Hello"),
        delta(0, type="text_delta", text=","),
        delta(0, type="text_delta", text=" welcome"),
        delta(0, type="text_delta", text=" to"),
        block_stop(0),
        *ending("max_tokens", 36, 0, 0, 4),
    ]


def test_the_end_tells_what_was_cached() -> None:
    events = streamed(sample("llamacpp-chat-stream.sse"))
    assert events[-2:] == ending("max_tokens", 1, 0, 35, 8)


def test_a_real_stream_of_a_tool_call() -> None:
    call_id = "chatcmpl-tool-b8236b7bfb8c3bbe"
    block = {"type": "tool_use", "id": call_id, "name": "get_weather", "input": {}}
    assert streamed(sample("vllm-chat-tools-stream.sse")) == [
        ("message_start", START),
        PING,
        block_start(0, block),
        delta(0, type="input_json_delta", partial_json='"'),
        delta(0, type="input_json_delta", partial_json="Paris"),
        delta(0, type="input_json_delta", partial_json='"'),
        block_stop(0),
        # no usage in this stream: the prompt's estimate, and four events with content
        *ending("max_tokens", 11, 0, 0, 4),
    ]


def test_reasoning_then_text_then_parallel_calls_are_blocks_in_a_row() -> None:
    events = streamed(
        chunk(role="assistant", content=None),
        chunk(reasoning_content="Hm"),
        chunk(reasoning="."),
        chunk(content="Looking."),
        chunk(tool_calls=[call("a", "f", "", index=0)]),
        chunk(tool_calls=[more(0, '{"x":1}')]),
        chunk(tool_calls=[call("b", "g", "{}", index=1)]),
        chunk("tool_calls"),
        usage_chunk(),
        DONE,
    )
    assert events[2:] == [
        block_start(0, {"type": "thinking", "thinking": "", "signature": ""}),
        delta(0, type="thinking_delta", thinking="Hm"),
        delta(0, type="thinking_delta", thinking="."),
        block_stop(0),
        block_start(1, {"type": "text", "text": ""}),
        delta(1, type="text_delta", text="Looking."),
        block_stop(1),
        block_start(2, {"type": "tool_use", "id": "a", "name": "f", "input": {}}),
        delta(2, type="input_json_delta", partial_json='{"x":1}'),
        block_stop(2),
        block_start(3, {"type": "tool_use", "id": "b", "name": "g", "input": {}}),
        delta(3, type="input_json_delta", partial_json="{}"),
        block_stop(3),
        *ending("tool_use", 12, 0, 24, 4),
    ]


def test_a_stop_sequence_and_a_refusal() -> None:
    met = streamed(chunk(content="a"), chunk("stop", stop_reason="END"), usage_chunk())
    assert met[-2:] == ending("stop_sequence", 12, 0, 24, 4, stop_sequence="END")
    refused = streamed(chunk(refusal="No."), chunk("stop"), usage_chunk())
    assert refused[3] == delta(0, type="text_delta", text="No.")
    assert refused[-2:] == ending("refusal", 12, 0, 24, 4)


def test_an_empty_answer_has_no_blocks() -> None:
    assert streamed(chunk("stop"), DONE) == [
        ("message_start", START),
        PING,
        *ending("end_turn", 11, 0, 0, 0),
    ]


def test_a_backends_heartbeat_becomes_a_ping() -> None:
    assert MessageStream(REPLY).feed(b":\n\n") == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_only_the_first_of_several_choices_is_told() -> None:
    second = chunk(content="b").replace(b'"index": 0', b'"index": 1')
    events = streamed(chunk(content="a"), second, chunk("stop"))
    assert [e for name, e in events if name == "content_block_delta"] == [
        delta(0, type="text_delta", text="a")[1]
    ]


def test_a_stream_without_a_finish_reason_or_done_never_ends_cleanly() -> None:
    stream = MessageStream(REPLY)
    told = stream.feed(chunk(content="Hel"))
    assert b"message_stop" not in told
    with pytest.raises(GatewayError) as caught:
        stream.finish()
    assert caught.value.code == "upstream_ended_early"
    assert sse(stream.error(caught.value, "r1")) == [
        (
            "error",
            {
                "type": "error",
                "error": {"type": "api_error", "message": caught.value.message},
                "request_id": "r1",
            },
        )
    ]


@pytest.mark.parametrize(
    "broken",
    [
        b"data: {\n\n",
        b'data: {"choices":5}\n\n',
        chunk(tool_calls=[call("a", "f", "{", 0)])
        + chunk(tool_calls=[call("b", "g", "{", 1)])
        + chunk(tool_calls=[more(0, "}")]),
    ],
)
def test_what_cannot_be_read_is_an_error_not_a_gap(broken: bytes) -> None:
    with pytest.raises(GatewayError) as caught:
        MessageStream(REPLY).feed(broken)
    assert caught.value.code == "upstream_invalid"


def test_a_backends_error_event_is_an_error() -> None:
    with pytest.raises(GatewayError, match="out of memory"):
        MessageStream(REPLY).feed(b'data: {"error":{"message":"out of memory"}}\n\n')


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_how_the_bytes_are_cut_changes_nothing(data: st.DataObject) -> None:
    whole = (
        sample("llamacpp-chat-stream.sse")
        + b":\n\n"
        + sample("vllm-chat-tools-stream.sse").replace(b"\n", b"\r\n")
    )
    places = data.draw(st.lists(st.integers(0, len(whole)), max_size=6))
    at_once, in_pieces = MessageStream(REPLY), MessageStream(REPLY)
    expected = at_once.feed(whole) + at_once.finish()
    told = b"".join(in_pieces.feed(piece) for piece in cut(whole, places))
    assert told + in_pieces.finish() == expected


# ---- errors


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("invalid_request", "invalid_request_error"),
        ("invalid_api_key", "authentication_error"),
        ("permission_denied", "permission_error"),
        ("model_not_found", "not_found_error"),
        ("body_too_large", "request_too_large"),
        ("rate_limit_exceeded", "rate_limit_error"),
        ("queue_full", "rate_limit_error"),
        ("internal_error", "api_error"),
        ("upstream_error", "api_error"),
        ("no_backend_available", "overloaded_error"),
        ("upstream_timeout", "timeout_error"),
    ],
)
def test_errors_have_anthropics_types(code: str, kind: str) -> None:
    body = json.loads(error_body(GatewayError(code, "Why."), "r1"))
    assert body == {
        "type": "error",
        "error": {"type": kind, "message": "Why."},
        "request_id": "r1",
    }


def test_an_error_event_is_one_event() -> None:
    event = error_event(GatewayError("upstream_error", "Why."), "r1")
    assert [name for name, _ in sse(event)] == ["error"]
