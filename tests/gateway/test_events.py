"""A backend's events on their way: whole ones only, whatever the reads cut."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrouter.gateway import events
from mindrouter.gateway.events import EventStream, split_events
from scheduler.core.jobs import Usage

DONE = b"data: [DONE]\n\n"


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def delta(content: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    told = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": told | more, "finish_reason": finish}
    return event({"id": "c1", "object": "chat.completion.chunk", "choices": [choice]})


def usage(prompt: int = 98, output: int = 2, **more: Any) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return event({"id": "c1", "choices": [], "usage": counts} | more)


def compact(data: bytes) -> bytes:
    """As vLLM writes it, without a space behind a colon or a comma."""
    return b"data: " + data[6:].replace(b'": ', b'":').replace(b", ", b",")


ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
STOP = delta(finish="stop")
GREETING = ROLE + delta("Größe ") + delta("漢字") + delta("😀!") + STOP


def relay(reads: Iterable[bytes], *, hide_usage: bool = True) -> tuple[bytes, EventStream]:
    """What a client gets of these reads, each piece of which must be whole events."""
    stream = EventStream(hide_usage=hide_usage)
    passed = []
    for data in reads:
        if stream.over:
            break
        block = stream.feed(data)
        assert block == b"" or block.endswith((b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n"))
        passed.append(block)
    if not stream.over:
        passed.append(stream.finish())
    return b"".join(passed), stream


def bytewise(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


# ---- any cut


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    cuts = sorted(draw(st.sets(st.integers(1, len(data) - 1), max_size=30)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


_ORDINARY = [
    ROLE,
    delta("Größe "),
    delta("漢字"),
    delta("😀!"),
    delta("data: x\n\ndata: [DONE]\n\n"),
    delta("\u2028\u0085 and \r\n"),
    delta('"usage": {"prompt_tokens": 5}, "error": {}, "finish_reason": "stop"'),
    delta(reasoning_content="Hm."),
    delta(tool_calls=[{"index": 0, "function": {"name": "get_weather"}}]),
    delta("end", finish="stop"),
    STOP,
    delta(finish="length"),
    usage(),
    usage(7, 5, prompt_tokens_details={"cached_tokens": 3}),
    event({"choices": [{"index": 0, "delta": {}}], "usage": None}),
    b": ping\n\n",
    b":\n\n",
    b"event: message\nid: 7\nretry: 10\ndata: {}\n\n",
    b'data: {"choices":\ndata: []}\n\n',
    b"\n\n",
    DONE,
]
_LINE_ENDS = [b"\n", b"\r\n"]


@settings(deadline=None, max_examples=250)
@given(
    data=st.data(),
    parts=st.lists(st.sampled_from(_ORDINARY), min_size=1, max_size=12),
    line_end=st.sampled_from(_LINE_ENDS),
    hide_usage=st.booleans(),
)
def test_no_cut_changes_what_the_client_gets_or_what_is_counted(
    data: st.DataObject, parts: list[bytes], line_end: bytes, hide_usage: bool
) -> None:
    whole = b"".join(parts).replace(b"\n", line_end)
    passed, at_once = relay([whole], hide_usage=hide_usage)
    got, stream = relay(data.draw(cut(whole)), hide_usage=hide_usage)
    assert got == passed
    assert stream.usage == at_once.usage
    assert stream.estimated_tokens == at_once.estimated_tokens
    assert stream.first_token_seen == at_once.first_token_seen
    assert (stream.finished, stream.done) == (at_once.finished, at_once.done)
    if not hide_usage:
        answer = parts[: parts.index(DONE) + 1] if DONE in parts else parts
        assert got == b"".join(answer).replace(b"\n", line_end)


def test_a_last_blank_line_that_a_cut_leaves_alone_is_passed_on() -> None:
    reads = [delta("a").replace(b"\n", b"\r\n") + b"\r\n", b"\r\n", b"\r\n"]
    assert relay(reads)[0] == b"".join(reads)


@settings(deadline=None, max_examples=150)
@given(reads=st.lists(st.binary(max_size=40) | st.sampled_from(_ORDINARY), max_size=12))
def test_bytes_that_are_no_events_break_nothing(reads: list[bytes]) -> None:
    relay_anything = EventStream(hide_usage=True)
    for data in reads:
        relay_anything.feed(data)
    relay_anything.finish()
    assert relay_anything.estimated_tokens >= 0


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_a_bytewise_stream_passes_as_it_is(line_end: bytes) -> None:
    whole = (GREETING + DONE).replace(b"\n", line_end)
    passed, stream = relay(bytewise(whole))
    assert passed == whole
    assert stream.first_token_seen


def test_an_event_is_passed_on_as_soon_as_its_last_byte_has_come() -> None:
    stream = EventStream(hide_usage=True)
    first, second = delta("a"), delta("b")
    assert stream.feed(first + second[:-1]) == first
    assert stream.feed(second[-1:]) == second


def test_whole_events_in_one_read_are_passed_on_as_the_same_object() -> None:
    block = delta("a") + delta("b")
    assert EventStream(hide_usage=True).feed(block) is block


# ---- usage


def test_usage_behind_an_error_counts_no_more_than_what_else_follows_it() -> None:
    failed = event({"error": {"message": "no"}})
    for whole in (failed + usage(), b"error: {}\n\n" + usage()):
        for reads in ([GREETING + whole], bytewise(GREETING + whole)):
            passed, stream = relay(reads)
            assert (passed, stream.usage) == (GREETING, None)


def test_usage_that_an_error_tells_itself_is_read() -> None:
    told = event({"error": {"message": "no"}, "usage": {"prompt_tokens": 98}})
    for reads in ([GREETING + usage(7, 1) + told], bytewise(GREETING + usage(7, 1) + told)):
        _, stream = relay(reads)
        assert stream.usage == Usage(prompt_tokens=98, completion_tokens=0)


@pytest.mark.parametrize(
    "told",
    [
        b'event: error\ndata: {"message":"m","usage":{"prompt_tokens":50}}\n\n',
        b'error: {"message":"m","usage":{"prompt_tokens":50}}\n\n',
        b'data: {"object":"error","error":null,"message":"m","usage":{"prompt_tokens":50}}\n\n',
    ],
    ids=["named", "field", "older"],
)
def test_usage_that_an_error_tells_is_read_in_whatever_form_it_comes(told: bytes) -> None:
    whole = GREETING + usage(7, 1) + told + usage(8, 1)
    for reads in ([whole], bytewise(whole), [whole[: whole.rindex(told) + len(told) - 2]]):
        passed, stream = relay(reads)
        assert passed == GREETING
        assert stream.error is not None
        assert stream.usage == Usage(prompt_tokens=50, completion_tokens=0)


def test_a_usage_event_is_read_and_hidden_from_a_client_that_did_not_ask() -> None:
    passed, stream = relay([GREETING, usage(98, 2), DONE])
    assert passed == GREETING + DONE
    assert stream.usage == Usage(prompt_tokens=98, completion_tokens=2)


def test_a_usage_event_is_shown_to_a_client_that_asked() -> None:
    passed, stream = relay([GREETING, usage(98, 2), DONE], hide_usage=False)
    assert passed == GREETING + usage(98, 2) + DONE
    assert stream.usage == Usage(prompt_tokens=98, completion_tokens=2)


def test_a_usage_event_without_choices_is_hidden_too() -> None:
    bare = event({"usage": {"prompt_tokens": 3, "completion_tokens": 4}})
    passed, stream = relay([GREETING, bare, DONE])
    assert passed == GREETING + DONE
    assert stream.usage == Usage(prompt_tokens=3, completion_tokens=4)


def test_usage_beside_content_is_read_and_kept() -> None:
    counts = {"prompt_tokens": 3, "completion_tokens": 4}
    last = event({"choices": [{"delta": {"content": "x"}}], "usage": counts})
    passed, stream = relay([last, DONE])
    assert passed == last + DONE
    assert stream.usage == Usage(prompt_tokens=3, completion_tokens=4)


def test_of_several_usages_the_last_one_counts() -> None:
    running = [
        event(
            {
                "choices": [{"delta": {"content": "x"}}],
                "usage": {"prompt_tokens": 9, "completion_tokens": n},
            }
        )
        for n in (1, 2, 3)
    ]
    _, stream = relay([*running, DONE])
    assert stream.usage == Usage(prompt_tokens=9, completion_tokens=3)


def test_cached_tokens_are_read() -> None:
    counts = {
        "prompt_tokens": 36,
        "completion_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 35},
    }
    _, stream = relay([GREETING, event({"choices": [], "usage": counts}), DONE])
    assert stream.usage == Usage(prompt_tokens=36, completion_tokens=8, cached_tokens=35)


@pytest.mark.parametrize(
    "counts",
    [
        {},
        {"prompt_tokens": None, "completion_tokens": 4},
        {"prompt_tokens": -1, "completion_tokens": 4},
        {"prompt_tokens": 4, "completion_tokens": -1},
        {"prompt_tokens": "many"},
        {"prompt_tokens": 10**12, "completion_tokens": 4},
        {"prompt_tokens": 4, "completion_tokens": 10**40},
        {"prompt_tokens": 4, "completion_tokens": [4]},
        {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": -5}},
    ],
)
def test_a_usage_that_cannot_be_believed_is_none_and_is_hidden_all_the_same(
    counts: dict[str, Any],
) -> None:
    passed, stream = relay([GREETING, event({"choices": [], "usage": counts}), DONE])
    assert stream.usage is None
    assert stream.estimated_tokens == 3
    assert passed == GREETING + DONE


def test_words_about_usage_in_a_text_are_no_usage() -> None:
    text = delta('{"usage": {"prompt_tokens": 5, "completion_tokens": 5}}')
    passed, stream = relay([text, DONE])
    assert passed == text + DONE
    assert stream.usage is None


# ---- counting


def test_events_with_content_are_counted_and_no_others() -> None:
    words = [delta(f"word{n} ") for n in range(37)]
    comment = b": ping\n\n"
    for reads in (
        [ROLE, *words, comment, STOP, usage(), DONE],
        [ROLE + b"".join(words) + STOP + DONE],
    ):
        _, stream = relay(reads)
        assert stream.estimated_tokens == 37


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("size", [1, 7, 200, 10_000])
def test_events_are_counted_whatever_their_lines_end_with_and_however_they_are_cut(
    line_end: bytes, size: int
) -> None:
    words = [b"id: 1\n" + delta(f"word{n} ") for n in range(37)]
    data = b"".join([ROLE, *words, b": ping\n\n", STOP, DONE]).replace(b"\n", line_end)
    _, stream = relay([data[at : at + size] for at in range(0, len(data), size)])
    assert stream.estimated_tokens == 37


def test_events_are_counted_where_some_lines_end_in_another_way() -> None:
    a, b, c, d = (compact(delta(word)) for word in "abcd")
    for b_and_c in ((b + c).replace(b"\n", b"\r"), b[:-1] + b"\r\n" + c.replace(b"\n", b"\r")):
        # A read that ends as most do, and in which nothing else makes it worth a look.
        _, stream = relay([a, b_and_c + d, compact(STOP), DONE])
        assert stream.estimated_tokens == 4


def test_a_role_alone_is_no_token() -> None:
    for role in (ROLE, ROLE.replace(b'""', b"null")):
        _, stream = relay([role])
        assert not stream.first_token_seen
        assert stream.estimated_tokens == 0


@pytest.mark.parametrize(
    "first",
    [
        delta("Hel"),
        delta(reasoning_content="Let me see"),
        delta(reasoning="Let me see"),
        delta(tool_calls=[{"index": 0, "id": "call_1", "function": {"name": "get_weather"}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"ci'}}]),
        delta(refusal="No"),
        event({"choices": [{"index": 0, "text": "Hel"}]}),
    ],
)
def test_text_reasoning_and_tool_calls_are_tokens(first: bytes) -> None:
    _, stream = relay([ROLE, first])
    assert stream.first_token_seen
    assert stream.estimated_tokens == 1


# ---- the end


def test_a_finish_reason_without_done_is_an_end() -> None:
    _, stream = relay([GREETING])
    assert stream.finished
    assert not stream.done


def test_a_finish_reason_is_remembered_over_later_events() -> None:
    _, stream = relay([GREETING, *[b": ping\n\n"] * 5, usage()])
    assert stream.finished


def test_content_alone_is_no_end() -> None:
    _, stream = relay([ROLE, delta("Hel"), delta("lo [DONE]"), delta("data: [DONE]")])
    assert not stream.finished


@pytest.mark.parametrize("last", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n"])
def test_a_last_event_without_its_blank_line_is_passed_on_with_it(last: bytes) -> None:
    passed, stream = relay([GREETING, last])
    assert passed.rstrip() == GREETING + last.rstrip()
    assert passed.endswith(b"\n\n")
    assert stream.done


@pytest.mark.parametrize("end", [b"", b"\n", b"\r"])
def test_a_last_error_without_its_blank_line_is_one_in_whatever_form_it_comes(end: bytes) -> None:
    for name in (b"error: ", b"event: error\ndata: ", b'data: {"error":'):
        last = name + b'{"message":"x"}' + (b"}" if b"{" in name else b"") + end
        for reads in ([ROLE, last], bytewise(ROLE + last)):
            passed, stream = relay(reads)
            assert passed == ROLE
            assert stream.error == {"message": "x"}


def test_a_byte_order_mark_before_a_single_event_without_its_blank_line_hides_nothing() -> None:
    mark = b"\xef\xbb\xbf"
    for only in (delta("a"), b'error: {"message":"x"}\n\n', DONE):
        whole = mark + only[:-2]
        for reads in ([whole], bytewise(whole)):
            passed, stream = relay(reads)
            assert passed == (b"" if only.startswith(b"error") else only)
            assert stream.estimated_tokens == (only == delta("a"))
            assert stream.over == (only != delta("a"))


def test_nothing_is_left_behind_an_error() -> None:
    stream = EventStream(hide_usage=True)
    assert stream.feed(event({"error": TOLD}) + b"\r\n") == b""
    assert stream.finish() == b""


def test_half_an_event_at_the_end_is_dropped() -> None:
    passed, stream = relay([ROLE, delta("Hel"), delta("lo")[:-20]])
    assert passed == ROLE + delta("Hel")
    assert not stream.finished


# ---- errors

TOLD = {"message": "CUDA out of memory", "type": "server_error", "code": 500}


@pytest.mark.parametrize("rest", [b"", DONE, delta("more"), b"data: {"])
def test_an_error_ends_the_stream_and_is_not_passed_on(rest: bytes) -> None:
    start = ROLE + delta("Hel")
    for reads in ([start, event({"error": TOLD}), rest], [start + event({"error": TOLD}) + rest]):
        passed, stream = relay(reads)
        assert passed == start
        assert stream.error == TOLD
        assert stream.over
        assert not stream.done


def test_llama_cpps_older_error_field_is_an_error() -> None:
    for reads in (
        [ROLE, b'error: {"error":{"message":"x"}}\n\n'],
        [ROLE + b'error: {"error":{"message":"x"}}\n\n'],
        [ROLE, b'id: 7\rerror: {"message":"x"}\r\r'],
    ):
        passed, stream = relay(reads)
        assert passed == ROLE
        assert stream.error == {"message": "x"}


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'data: {"message": "no", "code": 500}', {"message": "no", "code": 500}),
        (b'data: {"detail": "no"}', {"detail": "no"}),
        (b'data: {"error": {"message": "no"}}', {"message": "no"}),
        (b'data: "no"', "no"),
        (b"data: no memory\ndata: left", "no memory\n left"),
        (b"data:", "error"),
        (b"id: 7", "error"),
    ],
)
def test_an_event_that_is_named_error_is_one_whatever_it_says(
    data: bytes, told: object, line_end: bytes
) -> None:
    start, rest = ROLE + delta("Hel"), delta("more") + DONE
    for name in (b"event: error\n", b"event:error \n", b"id: 1\nevent: error\n"):
        failure = (name + data + b"\n\n").replace(b"\n", line_end)
        for reads in ([start, failure, rest], [start + failure + rest], [start, failure[:-1]]):
            passed, stream = relay(reads)
            assert passed == start
            assert stream.error == told


@pytest.mark.parametrize("told", [b"error: x\n\n", b"event: error\ndata: x\n\n"])
def test_blank_lines_too_many_before_an_error_hide_none(told: bytes) -> None:
    for blank in (b"\n", b"\n\n", b"\r\n\n"):
        _, stream = relay([ROLE + blank + told, DONE])
        assert stream.error is not None


@pytest.mark.parametrize("behind", [delta("more"), b"error: x\n\n", usage(), DONE])
def test_nothing_is_taken_that_comes_behind_done(behind: bytes) -> None:
    for reads in ([GREETING, DONE, behind], [GREETING, DONE + behind], [GREETING + DONE + behind]):
        passed, stream = relay(reads)
        assert passed == GREETING + DONE
        assert (stream.error, stream.usage) == (None, None)


def test_a_byte_order_mark_is_one_at_the_beginning_only() -> None:
    mark = b"\xef\xbb\xbf"
    for reads in ([mark + ROLE, mark + delta("a")], [mark + ROLE + mark + delta("a")]):
        assert relay(reads)[0] == ROLE + mark + delta("a")


def test_events_about_errors_by_another_name_are_none() -> None:
    parts = [
        b"event: errors\n" + delta("Hel"),
        b"event: message\n" + delta("event: error"),
        b": event: error\n\n",
    ]
    passed, stream = relay([*parts, DONE])
    assert passed == b"".join(parts) + DONE
    assert stream.error is None


def test_a_null_error_and_a_text_about_errors_are_none() -> None:
    parts = [
        event({"choices": [{"delta": {"content": "x"}}], "error": None}),
        delta('"error": {}'),
        delta("error: x"),
    ]
    passed, stream = relay([*parts, DONE])
    assert passed == b"".join(parts) + DONE
    assert stream.error is None


# ---- events without end


def test_an_event_beyond_the_bound_is_passed_on_as_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 1000)
    huge = delta("x" * 2500)
    stream = EventStream(hide_usage=True)
    pieces = [stream.feed(huge[i : i + 300]) for i in range(0, len(huge), 300)]
    assert max(map(len, pieces)) <= 1300
    assert b"".join(pieces) == huge
    assert not stream.torn
    assert stream.feed(STOP) == STOP


def test_half_an_event_that_was_passed_on_is_known_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 1000)
    stream = EventStream(hide_usage=True)
    huge = delta("x" * 2500)
    assert stream.feed(huge[:1500]) == huge[:1500]
    assert stream.torn
    assert stream.feed(huge[1500:1600]) == b""
    assert stream.finish() == huge[1500:1600]
    assert stream.torn


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_an_event_beyond_the_bound_is_whole_before_an_error_wherever_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, line_end: bytes
) -> None:
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 1000)
    huge = delta("x" * 2500).replace(b"\n", line_end)
    for at in range(1001, len(huge)):
        for middle in ([], bytewise(huge[at:])):
            rest = b"" if middle else huge[at:]
            stream = EventStream(hide_usage=True)
            reads = [huge[:at], *middle, rest + event({"error": TOLD}) + STOP]
            assert b"".join(map(stream.feed, reads)) == huge, at
            assert stream.error == TOLD, at
            assert not stream.torn, at


def test_half_an_event_whose_rest_tells_of_an_error_stays_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 1000)
    huge = b"data: %b\n" % (b"x" * 2500)
    stream = EventStream(hide_usage=True)
    assert stream.feed(huge) == huge
    assert stream.feed(b"event: error\n\n" + STOP) == b""
    assert stream.error == "error"
    assert stream.torn


def test_splitting_loses_nothing() -> None:
    for rest in ([], [b"data: rest"]):
        parts = [ROLE, b": x\n\n", b"\nid: 1\ndata: y\n\n", b"\n\n", *rest]
        assert split_events(b"".join(parts)) == parts
    block = ROLE + b": x\r\n\r\n" + b"data: y\r\r" + b"data: rest"
    assert split_events(block) == [ROLE, b": x\r\n\r\n", b"data: y\r\r", b"data: rest"]
