"""What streams in any client's own form have in common: how a backend tells of an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from mindrouter.gateway.dialects.anthropic.native import MessageEvents
from mindrouter.gateway.dialects.native import NativeStream
from mindrouter.gateway.dialects.ollama.native import ChatLines
from mindrouter.gateway.dialects.responses.native import ResponseEvents
from mindrouter.gateway.surfaces.answers import SurfaceEvents
from scheduler.core.jobs import Usage

FORMS: dict[str, Callable[[], NativeStream]] = {
    "messages": partial(MessageEvents, prompt_tokens=9, cached_apart=False),
    "responses": partial(ResponseEvents, prompt_tokens=9),
    "other surfaces": partial(SurfaceEvents, prompt_tokens=9, output_tokens=None),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'{"message":"ill","code":503}', {"message": "ill", "code": 503}),
        (b"ill", "ill"),
        (b"", "error"),
    ],
)
def test_an_event_that_is_named_error_is_one_in_every_form(
    form: Callable[[], NativeStream], line_end: bytes, data: bytes, told: object
) -> None:
    ping = b'event: ping\ndata: {"message":"event: error"}\n\n'
    failure = b"event: error\ndata: %b\n\n" % data
    stream = form()
    assert stream.feed((ping + failure + ping).replace(b"\n", line_end)) == ping
    assert stream.error == told
    assert stream.over


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_llama_cpps_older_error_field_is_an_error_in_every_form(
    form: Callable[[], NativeStream],
) -> None:
    told = {"message": "ill", "code": 503}
    for failure in (
        b'error: {"message":"ill","code":503}\n\n',
        b'id: 7\nerror: {"error":{"message":"ill","code":503}}\n\n',
    ):
        stream = form()
        assert stream.feed(b": error: x\n\n" + failure) == b": error: x\n\n"
        assert stream.error == told


DELTAS = {
    "messages": b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n',
    "responses": b'event: x\ndata: {"type":"response.output_text.delta"}\n\n',
    "other surfaces": b'event: x\ndata: {"type":"transcript.text.delta"}\n\n',
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_no_cut_parts_a_line_end_or_changes_an_error_a_count_or_what_is_passed_on(
    name: str, line_end: bytes
) -> None:
    told = b'{"type":"error","error":{"type":"overloaded_error","message":"busy","code":529}}'
    deltas = b": hello\n\n" + DELTAS[name] * 2
    whole = (deltas + b"event: error\nid: 7\ndata: %b\n\n" % told).replace(b"\n", line_end)
    for at in range(len(whole) + 1):
        stream = FORMS[name]()
        passed = stream.feed(whole[:at]) + stream.feed(b"") + stream.feed(whole[at:])
        assert passed == deltas, at
        assert stream.error == {"type": "overloaded_error", "message": "busy", "code": 529}, at
        assert stream.estimated_tokens == 2, at


@pytest.mark.parametrize("name", FORMS)
def test_a_byte_order_mark_is_one_at_the_beginning_of_a_stream_only(name: str) -> None:
    mark, delta = b"\xef\xbb\xbf", DELTAS[name]
    bare = delta.partition(b"\n")[2]  # the mark stands before what is to be read
    failure = b"event: error\ndata: ill\n\n"
    for whole, kept, told in (
        (mark + bare + delta, bare + delta, None),
        (mark + failure, b"", "ill"),
        (mark + b"error: ill\n\n", b"", "ill"),
    ):
        for at in range(len(whole) + 1):
            stream = FORMS[name]()
            passed = stream.feed(whole[:at]) + stream.feed(whole[at:])
            assert (passed, stream.error) == (kept, told), at
            assert stream.estimated_tokens == (2 if kept else 0), at
    stream = FORMS[name]()
    assert stream.feed(delta + mark + delta) == delta + mark + delta
    stream = FORMS[name]()
    assert stream.feed(mark + bare[:-2]) + stream.finish() == bare
    assert stream.estimated_tokens == 1


def test_a_byte_order_mark_before_lines_hides_no_first_one() -> None:
    line = b'{"message":{"content":"a"},"done":true,"eval_count":5,"prompt_eval_count":3}\n'
    stream = ChatLines(prompt_tokens=9)
    assert stream.feed(b"\xef\xbb\xbf" + line) == line
    assert stream.usage == Usage(prompt_tokens=3, completion_tokens=5)


def test_a_carriage_return_at_the_end_of_a_read_ends_its_line_at_once() -> None:
    stream = FORMS["messages"]()
    delta = DELTAS["messages"]
    assert stream.feed(delta.replace(b"\n", b"\r")) == delta
    assert stream.feed(b"\n" + delta.replace(b"\n", b"\r\n")) == delta
