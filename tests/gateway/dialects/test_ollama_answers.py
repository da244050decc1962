"""What open engines answer, in Ollama's form: whole, as lines, and as an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrouter.gateway.dialects.ollama.errors import error_body, error_event
from mindrouter.gateway.dialects.ollama.response import (
    embed_from_embeddings,
    embeddings_from_embeddings,
    from_chat,
    load_body,
)
from mindrouter.gateway.dialects.ollama.stream import LineStream
from mindrouter.gateway.dialects.translation import Timings
from mindrouter.gateway.errors import GatewayError
from tests.gateway.dialects.wire import (
    DONE,
    REPLY,
    call,
    chunk,
    completion,
    cut,
    lines,
    more,
    sample,
    usage_chunk,
)

TIMINGS = Timings(total_seconds=1.5, load_seconds=0.25, prompt_seconds=0.125, output_seconds=1.125)
BEGUN = "2026-11-29T11:50:48.000000Z"
ENDED = "2026-11-29T11:50:49.500000Z"


def answer(form: Any = "chat", **message: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(from_chat(completion(**message), REPLY, TIMINGS, form))
    return made


def streamed(*events: bytes, form: Any = "chat") -> list[Any]:
    stream = LineStream(REPLY, form)
    return lines(stream.feed(b"".join(events)) + stream.finish(TIMINGS))


def ending(done_reason: str = "stop", prompt: int = 36, output: int = 4) -> dict[str, Any]:
    return {
        "done": True,
        "done_reason": done_reason,
        "total_duration": 1_500_000_000,
        "load_duration": 250_000_000,
        "prompt_eval_count": prompt,
        "prompt_eval_duration": 125_000_000,
        "eval_count": output,
        "eval_duration": 1_125_000_000,
    }


# ---- whole answers


def test_a_chat_with_its_counts_and_durations() -> None:
    assert answer(content="Hi") == {
        "model": "m",
        "created_at": ENDED,
        "message": {"role": "assistant", "content": "Hi"},
        **ending(),
    }


def test_a_generated_text() -> None:
    assert answer("generate", content="Hi", reasoning="Hm.") == {
        "model": "m",
        "created_at": ENDED,
        "response": "Hi",
        "thinking": "Hm.",
        **ending(),
    }


def test_a_bare_completion_of_a_real_engine_with_its_own_durations() -> None:
    made = json.loads(from_chat(sample("llamacpp-completions.json"), REPLY, TIMINGS, "generate"))
    assert made["response"] == " a canvas of endless possibilities, where every"
    assert made["done_reason"] == "length"
    assert (made["prompt_eval_count"], made["eval_count"]) == (3, 8)
    # its own 23.137 ms and 83.803 ms, not ours
    assert (made["prompt_eval_duration"], made["eval_duration"]) == (23_137_000, 83_803_000)


def test_tool_calls_have_their_arguments_as_objects() -> None:
    made = answer(
        finish="tool_calls",
        tool_calls=[call("a", "f", '{"x": 1.50}'), call("b", "g", ""), call("c", "h", '"x"')],
    )
    assert made["message"] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "a", "function": {"index": 0, "name": "f", "arguments": {"x": 1.5}}},
            {"id": "b", "function": {"index": 1, "name": "g", "arguments": {}}},
            {"id": "c", "function": {"index": 2, "name": "h", "arguments": {"arguments": '"x"'}}},
        ],
    }
    assert made["done_reason"] == "stop"


def test_thinking_and_a_refusal() -> None:
    message = {"role": "assistant", "content": "Hi", "thinking": "Hm."}
    assert answer(content="Hi", reasoning_content="Hm.")["message"] == message
    assert answer(refusal="No.")["message"] == {"role": "assistant", "content": "No."}


def test_log_probabilities() -> None:
    told = [{"token": "Hi", "logprob": -0.25, "bytes": [72, 105], "top_logprobs": []}]
    assert answer(content="Hi", logprobs={"content": told})["logprobs"] == told


def test_usage_that_was_not_told_is_estimated() -> None:
    made = answer(content="12345678", usage=None)
    assert (made["prompt_eval_count"], made["eval_count"]) == (11, 2)


def test_an_answer_without_an_end_is_an_error() -> None:
    with pytest.raises(GatewayError) as caught:
        answer(finish=None, content="Hi")
    assert caught.value.code == "upstream_ended_early"


EMBEDDINGS = (
    b'{"object":"list","data":[{"index":1,"embedding":[0.30,-1e-5]},'
    b'{"index":0,"embedding":[0.1]}],"usage":{"prompt_tokens":6,"total_tokens":6}}'
)


def test_embeddings_come_in_the_order_of_the_texts_and_to_the_digit() -> None:
    assert embed_from_embeddings(EMBEDDINGS, REPLY, TIMINGS) == (
        b'{"model":"m","embeddings":[[0.1],[0.30,-1e-5]],"total_duration":1500000000,'
        b'"load_duration":250000000,"prompt_eval_count":6}'
    )


def test_the_older_form_has_one_embedding() -> None:
    one = b'{"data":[{"embedding":[0.5,1]}]}'
    assert embeddings_from_embeddings(one, REPLY, TIMINGS) == b'{"embedding":[0.5,1]}'
    with pytest.raises(GatewayError):
        embeddings_from_embeddings(EMBEDDINGS, REPLY, TIMINGS)


@pytest.mark.parametrize("body", [b"<html>", b'{"data":5}', b'{"data":[{"embedding":"AAAA"}]}'])
def test_what_holds_no_embeddings_is_an_error(body: bytes) -> None:
    with pytest.raises(GatewayError) as caught:
        embed_from_embeddings(body, REPLY, TIMINGS)
    assert caught.value.code == "upstream_invalid"


def test_a_request_without_a_prompt_is_answered_without_a_backend() -> None:
    assert json.loads(load_body(REPLY, "chat", "load")) == {
        "model": "m",
        "created_at": BEGUN,
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "load",
    }
    assert json.loads(load_body(REPLY, "generate", "unload"))["done_reason"] == "unload"


# ---- streams


def line(**content: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "", **content}
    return {"model": "m", "created_at": BEGUN, "message": message, "done": False}


def last(**counts: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": ""}
    return {"model": "m", "created_at": ENDED, "message": message, **ending(**counts)}


def test_a_real_stream_of_text() -> None:
    assert streamed(sample("vllm-chat-stream.sse")) == [
        line(content="Hello"),
        line(content=","),
        line(content=" welcome"),
        line(content=" to"),
        last(done_reason="length"),
    ]


def test_a_stream_of_generated_text() -> None:
    events = [
        b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"b","finish_reason":"stop"}]}\n\n',
        usage_chunk(),
        DONE,
    ]
    assert streamed(*events, form="generate") == [
        {"model": "m", "created_at": BEGUN, "response": "a", "done": False},
        {"model": "m", "created_at": BEGUN, "response": "b", "done": False},
        {"model": "m", "created_at": ENDED, "response": "", **ending()},
    ]


def test_parallel_calls_come_whole_before_the_end_however_they_were_cut() -> None:
    assert streamed(
        chunk(role="assistant", content=""),
        chunk(reasoning="Hm."),
        chunk(tool_calls=[call("a", "f", '{"x"', 0), call("b", "g", "", 1)]),
        chunk(tool_calls=[more(1, "{}"), more(0, ":1}")]),
        chunk("tool_calls"),
        usage_chunk(),
        DONE,
    ) == [
        line(thinking="Hm."),
        line(
            tool_calls=[
                {"id": "a", "function": {"index": 0, "name": "f", "arguments": {"x": 1}}},
                {"id": "b", "function": {"index": 1, "name": "g", "arguments": {}}},
            ]
        ),
        last(),
    ]


def test_log_probabilities_come_with_their_text() -> None:
    told = [{"token": "a", "logprob": -0.5}]
    first, *_ = streamed(chunk(content="a", logprobs={"content": told}), chunk("stop"))
    assert first == {**line(content="a"), "logprobs": told}


def test_comments_are_left_out_since_every_line_must_be_json() -> None:
    assert LineStream(REPLY, "chat").feed(b": queued position=1\n\n:\n\n") == b""


def test_a_stream_without_a_finish_reason_or_done_never_ends_cleanly() -> None:
    stream = LineStream(REPLY, "chat")
    assert lines(stream.feed(chunk(content="Hel"))) == [line(content="Hel")]
    with pytest.raises(GatewayError) as caught:
        stream.finish(TIMINGS)
    assert lines(stream.error(caught.value, "r1")) == [{"error": caught.value.message}]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_how_the_bytes_are_cut_changes_nothing(data: st.DataObject) -> None:
    whole = sample("llamacpp-chat-stream.sse") + sample("vllm-chat-tools-stream.sse")
    places = data.draw(st.lists(st.integers(0, len(whole)), max_size=6))
    at_once, in_pieces = LineStream(REPLY, "chat"), LineStream(REPLY, "chat")
    expected = at_once.feed(whole) + at_once.finish(TIMINGS)
    told = b"".join(in_pieces.feed(piece) for piece in cut(whole, places))
    assert told + in_pieces.finish(TIMINGS) == expected


# ---- errors


def test_errors_are_a_bare_text() -> None:
    error = GatewayError("model_not_found", "model 'x' not found")
    assert error_body(error, "r1") == b'{"error":"model \'x\' not found"}'
    assert error_event(error, "r1") == b'{"error":"model \'x\' not found"}\n'
