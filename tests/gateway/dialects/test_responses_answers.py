"""What open engines answer, in the form of the Responses API: whole, as a stream, as an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrouter.gateway.dialects.responses.errors import error_body, error_event
from mindrouter.gateway.dialects.responses.request import to_chat
from mindrouter.gateway.dialects.responses.response import from_chat
from mindrouter.gateway.dialects.responses.stream import ResponseStream
from mindrouter.gateway.dialects.translation import Reply, Timings
from mindrouter.gateway.errors import GatewayError
from tests.gateway.dialects.wire import (
    DONE,
    call,
    chunk,
    completion,
    cut,
    fields,
    more,
    sample,
    sse,
    usage_chunk,
)

SETTINGS = to_chat(fields({"model": "m", "input": "hi", "temperature": 0.5})).settings
REPLY = Reply(
    reply_id="r1", model="m", created=1_795_953_048.25, prompt_tokens=11, settings=SETTINGS
)
TIMINGS = Timings(total_seconds=1.5)
USAGE = {
    "input_tokens": 36,
    "input_tokens_details": {"cached_tokens": 24, "cache_write_tokens": 0},
    "output_tokens": 4,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 40,
}
#: What every answer repeats of this request.
REPEATED = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "temperature": 0.5,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}
BEGUN = {
    "id": "resp_r1",
    "object": "response",
    "created_at": 1_795_953_048,
    "status": "in_progress",
    "background": False,
    "error": None,
    "incomplete_details": None,
    "model": "m",
    "output": [],
    "usage": None,
    **REPEATED,
}


def answer(**message: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(from_chat(completion(**message), REPLY, TIMINGS))
    return made


def streamed(*events: bytes) -> list[tuple[str, Any]]:
    stream = ResponseStream(REPLY)
    told = sse(stream.feed(b"".join(events)) + stream.finish(TIMINGS))
    for number, (name, event) in enumerate(told):
        assert event.pop("sequence_number") == number
        assert event.pop("type") == name
    return told


def text_item(text: str, status: str = "completed", position: int = 0) -> dict[str, Any]:
    return {
        "id": f"msg_r1_{position}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [part(text)],
    }


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


# ---- whole answers


def test_a_text_and_its_usage() -> None:
    assert answer(content="Hi") == {
        **BEGUN,
        "status": "completed",
        "completed_at": 1_795_953_049,
        "output": [text_item("Hi")],
        "usage": USAGE,
    }


@pytest.mark.parametrize(
    ("finish", "reason"),
    [("length", "max_output_tokens"), ("content_filter", "content_filter")],
)
def test_an_answer_that_was_cut_is_incomplete(finish: str, reason: str) -> None:
    made = answer(finish=finish, content="Hi")
    assert made["status"] == "incomplete"
    assert made["incomplete_details"] == {"reason": reason}
    assert made["output"] == [text_item("Hi", "incomplete")]


def test_reasoning_text_and_calls_are_items_in_a_row() -> None:
    made = answer(
        finish="tool_calls",
        reasoning="Hm.",
        content="Looking.",
        tool_calls=[call("a", "f", '{"x": 1.50}'), call(None, "g", "{}")],
    )
    assert made["output"] == [
        {
            "id": "rs_r1_0",
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        text_item("Looking.", position=1),
        {
            "id": "fc_r1_2",
            "type": "function_call",
            "status": "completed",
            "call_id": "a",
            "name": "f",
            "arguments": '{"x": 1.50}',
        },
        {
            "id": "fc_r1_3",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_r1_1",
            "name": "g",
            "arguments": "{}",
        },
    ]


def test_a_refusal_and_log_probabilities() -> None:
    assert answer(refusal="No.")["output"][0]["content"] == [{"type": "refusal", "refusal": "No."}]
    told = [{"token": "Hi", "logprob": -0.25, "bytes": [72, 105], "top_logprobs": []}]
    made = answer(content="Hi", logprobs={"content": told})
    assert made["output"][0]["content"][0]["logprobs"] == told


def test_reasoning_tokens_are_told() -> None:
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 9,
        "completion_tokens_details": {"reasoning_tokens": 7},
    }
    assert answer(content="Hi", usage=usage)["usage"]["output_tokens_details"] == {
        "reasoning_tokens": 7
    }


def test_an_answer_without_an_end_is_an_error() -> None:
    with pytest.raises(GatewayError) as caught:
        answer(finish=None, content="Hi")
    assert caught.value.code == "upstream_ended_early"


# ---- streams


def test_a_real_stream_of_text_in_the_order_of_the_form() -> None:
    at = {"item_id": "msg_r1_0", "output_index": 0, "content_index": 0}
    begun_item = {**text_item(""), "status": "in_progress", "content": []}
    done_item = text_item("Hello, welcome to", "incomplete")
    assert streamed(sample("vllm-chat-stream.sse")) == [
        ("response.created", {"response": BEGUN}),
        ("response.in_progress", {"response": BEGUN}),
        ("response.output_item.added", {"output_index": 0, "item": begun_item}),
        ("response.content_part.added", {**at, "part": part("")}),
        ("response.output_text.delta", {**at, "delta": "Hello", "logprobs": []}),
        ("response.output_text.delta", {**at, "delta": ",", "logprobs": []}),
        ("response.output_text.delta", {**at, "delta": " welcome", "logprobs": []}),
        ("response.output_text.delta", {**at, "delta": " to", "logprobs": []}),
        ("response.output_text.done", {**at, "text": "Hello, welcome to", "logprobs": []}),
        ("response.content_part.done", {**at, "part": part("Hello, welcome to")}),
        ("response.output_item.done", {"output_index": 0, "item": done_item}),
        (
            "response.incomplete",
            {
                "response": {
                    **BEGUN,
                    "status": "incomplete",
                    "incomplete_details": {"reason": "max_output_tokens"},
                    "output": [done_item],
                    "usage": {
                        **USAGE,
                        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                    },
                }
            },
        ),
    ]


def test_the_order_is_that_of_a_real_engine_that_speaks_the_form() -> None:
    real = [name for name, _ in sse(sample("llamacpp-responses-stream.sse"))]
    deltas = [chunk(content=text) for text in ("A", "w", "esome", "!")]
    ours = [name for name, _ in streamed(*deltas, chunk("stop"), usage_chunk(), DONE)]
    assert ours == real


def test_reasoning_then_parallel_calls() -> None:
    events = streamed(
        chunk(role="assistant", content=None),
        chunk(reasoning="H"),
        chunk(reasoning="m."),
        chunk(tool_calls=[call("a", "f", "", index=0)]),
        chunk(tool_calls=[more(0, '{"x":1}')]),
        chunk(tool_calls=[call("b", "g", "{}", index=1)]),
        chunk("tool_calls"),
        usage_chunk(),
        DONE,
    )
    assert [name.removeprefix("response.") for name, _ in events[2:]] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert events[6] == (
        "response.reasoning_text.done",
        {"item_id": "rs_r1_0", "output_index": 0, "content_index": 0, "text": "Hm."},
    )
    assert events[9][1]["item"] == {
        "id": "fc_r1_1",
        "type": "function_call",
        "status": "in_progress",
        "call_id": "a",
        "name": "f",
        "arguments": "",
    }
    assert events[11] == (
        "response.function_call_arguments.done",
        {"item_id": "fc_r1_1", "output_index": 1, "name": "f", "arguments": '{"x":1}'},
    )
    output = events[-1][1]["response"]["output"]
    assert [(item["type"], item["status"]) for item in output] == [
        ("reasoning", "completed"),
        ("function_call", "completed"),
        ("function_call", "completed"),
    ]
    assert events[-1][1]["response"]["usage"] == USAGE


def test_a_refusal_after_text_is_a_part_of_its_own() -> None:
    events = streamed(chunk(content="a"), chunk(refusal="No."), chunk("stop"))
    refusal_delta = {
        "item_id": "msg_r1_0",
        "output_index": 0,
        "content_index": 1,
        "delta": "No.",
    }
    assert ("response.refusal.delta", refusal_delta) in events
    assert events[-1][1]["response"]["output"][0]["content"] == [
        part("a"),
        {"type": "refusal", "refusal": "No."},
    ]


def test_the_stream_ends_with_what_the_whole_answer_would_have_been() -> None:
    events = streamed(chunk(reasoning="Hm."), chunk(content="Hi"), chunk("stop"), usage_chunk())
    assert events[-1][1]["response"] == answer(reasoning="Hm.", content="Hi")


def test_a_backends_heartbeat_stays_a_comment() -> None:
    assert ResponseStream(REPLY).feed(b":\n\n") == b":\n\n"


def test_a_stream_without_a_finish_reason_or_done_never_ends_cleanly() -> None:
    stream = ResponseStream(REPLY)
    told = stream.feed(chunk(content="Hel"))
    assert b"response.completed" not in told
    with pytest.raises(GatewayError) as caught:
        stream.finish(TIMINGS)
    ((name, event),) = sse(stream.error(caught.value, "r1"))
    assert name == event["type"] == "error"
    assert event["sequence_number"] == len(sse(told))
    assert event["code"] == event["error"]["code"] == "upstream_ended_early"


def test_parts_of_two_calls_at_once_are_an_error() -> None:
    stream = ResponseStream(REPLY)
    with pytest.raises(GatewayError):
        stream.feed(
            chunk(tool_calls=[call("a", "f", "{", 0), call("b", "g", "{", 1), more(0, "}")])
        )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_how_the_bytes_are_cut_changes_nothing(data: st.DataObject) -> None:
    whole = sample("llamacpp-chat-stream.sse") + sample("vllm-chat-tools-stream.sse")
    places = data.draw(st.lists(st.integers(0, len(whole)), max_size=6))
    at_once, in_pieces = ResponseStream(REPLY), ResponseStream(REPLY)
    expected = at_once.feed(whole) + at_once.finish(TIMINGS)
    told = b"".join(in_pieces.feed(piece) for piece in cut(whole, places))
    assert told + in_pieces.finish(TIMINGS) == expected


# ---- errors


def test_errors_have_openais_form() -> None:
    error = GatewayError("invalid_request", "Why.", param="input")
    assert json.loads(error_body(error, "r1")) == {
        "error": {
            "message": "Why.",
            "type": "invalid_request_error",
            "param": "input",
            "code": "invalid_request",
        }
    }
    ((name, event),) = sse(error_event(error, "r1"))
    assert name == "error"
    assert {k: event[k] for k in ("type", "code", "message", "param", "sequence_number")} == {
        "type": "error",
        "code": "invalid_request",
        "message": "Why.",
        "param": "input",
        "sequence_number": 0,
    }
