"""What the router reads of a request's body, and what a backend gets of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.requests import (
    MEDIA_TOKENS,
    MOST_TOKENS,
    Asked,
    read_chat,
    read_completion,
    read_embeddings,
)
from tests.gateway.bad_bodies import HELLO, MALFORMED, WRONG_TYPED

Read = Callable[[bytes, str | None], Asked]
ALL: list[Read] = [read_chat, read_completion, read_embeddings]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def chat(**fields: Any) -> Asked:
    body = {"model": "m", "messages": HELLO} | fields
    return read_chat(json.dumps(body).encode(), None)


def refusal(read: Read, body: bytes) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        read(body, None)
    assert caught.value.status == 400
    assert caught.value.code == "invalid_request"
    return caught.value


# ---- bodies that are none


@pytest.mark.parametrize("read", ALL)
@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_body_that_is_no_json_object_is_refused(read: Read, body: bytes) -> None:
    refusal(read, body)


@settings(deadline=None, max_examples=200)
@given(body=st.binary(max_size=200), read=st.sampled_from(ALL))
def test_any_bytes_are_either_read_or_refused(body: bytes, read: Read) -> None:
    with contextlib.suppress(GatewayError):
        read(body, None)


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
_KNOWN = [
    "model", "messages", "prompt", "input", "stream", "stream_options", "max_tokens", "n",
    "max_completion_tokens", "tools", "tool_choice", "response_format", "prompt_cache_key",
]  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    fields=st.dictionaries(st.sampled_from(_KNOWN), _json_values),
    read=st.sampled_from(ALL),
)
def test_fields_of_any_type_are_either_read_or_refused(fields: dict[str, Any], read: Read) -> None:
    body = {"model": "m", "messages": HELLO, "prompt": "p", "input": "i"} | fields
    try:
        asked = read(json.dumps(body).encode(), None)
    except GatewayError:
        return
    assert isinstance(asked.model, str)
    assert asked.prompt_tokens >= 1
    sent = json.loads(asked.body_for("m"))
    body["model"] = "m"  # the router's edits: this, and in a stream its options
    if asked.stream:
        body.pop("stream_options", None)
        sent.pop("stream_options")
    assert sent == body


@pytest.mark.parametrize(("fields", "param"), WRONG_TYPED.values(), ids=WRONG_TYPED.keys())
def test_a_wrong_typed_field_is_refused_and_named(fields: dict[str, Any], param: str) -> None:
    body = {"model": "m", "messages": HELLO} | fields
    error = refusal(read_chat, json.dumps(body).encode())
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    ("read", "param"),
    [(read_chat, "messages"), (read_completion, "prompt"), (read_embeddings, "input")],
)
def test_a_missing_input_is_refused_and_named(read: Read, param: str) -> None:
    assert refusal(read, b'{"model": "m"}').param == param
    assert refusal(read, b'{"model": "m", "%s": null}' % param.encode()).param == param


@pytest.mark.parametrize("value", [5, True, {}, [], [{}], ["a", 1], [[1], "a"], [None], [1, "a"]])
@pytest.mark.parametrize(
    ("read", "name"), [(read_completion, "prompt"), (read_embeddings, "input")]
)
def test_an_input_of_another_type_is_refused(read: Read, name: str, value: Any) -> None:
    assert refusal(read, json.dumps({"model": "m", name: value}).encode()).param == name


# ---- what a backend gets

UNKNOWN_FIELDS = (
    b'{"model":"m","messages":[{"role":"user","content":"Gr\xc3\xb6\xc3\x9fe \\u6f22","extra":1}],'
    b'"seed":9007199254740993,"temperature":1.0,"min_p":5e-2,"cache_salt":"\xf0\x9f\x98\x80",'
    b'"chat_template_kwargs":{"enable_thinking":false},"top_p":0.30000000000000004,'
    b'"guided_json":{"type":"object","properties":{"a":{"type":"array","items":[1,2.50]}}}}'
)


def test_a_body_that_needs_no_edit_reaches_the_backend_bit_by_bit() -> None:
    assert read_chat(UNKNOWN_FIELDS, None).body_for("m") == UNKNOWN_FIELDS


def test_only_the_model_name_is_exchanged() -> None:
    sent = read_chat(UNKNOWN_FIELDS, None).body_for("llama3.2:latest")
    assert sent == UNKNOWN_FIELDS.replace(b'"model":"m"', b'"model":"llama3.2:latest"')


def test_of_a_field_given_twice_the_last_one_counts_and_is_all_that_is_sent() -> None:
    body = b'{"model":"a","messages":[{"role":"user","content":"x"}],"model":"b"}'
    asked = read_chat(body, None)
    assert asked.model == "b"
    assert json.loads(asked.body_for("b"), object_pairs_hook=list).count(["model", "b"]) == 0
    assert asked.body_for("b").count(b'"model"') == 1


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (None, {"include_usage": True}),
        ({}, {"include_usage": True}),
        ({"include_usage": False}, {"include_usage": True}),
        ({"include_usage": None}, {"include_usage": True}),
        (
            {"continuous_usage_stats": True, "x": [1.0, 9007199254740993]},
            {"continuous_usage_stats": True, "x": [1.0, 9007199254740993], "include_usage": True},
        ),
    ],
)
def test_a_stream_is_asked_for_its_usage_and_keeps_its_other_options(
    given: dict[str, Any] | None, sent: dict[str, Any]
) -> None:
    fields = {} if given is None else {"stream_options": given}
    asked = chat(stream=True, **fields)
    assert not asked.wants_usage
    assert json.loads(asked.body_for("m"))["stream_options"] == sent


def test_a_null_in_place_of_the_stream_options_is_none() -> None:
    sent = json.loads(chat(stream=True, stream_options=None).body_for("m"))
    assert sent["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    "value", ["1.50", "0.10000000000000000000001", "9" * 5000, "1e999", '{"a":1.0,"a":2.0}']
)
def test_other_stream_options_are_passed_on_as_they_came_whatever_they_are(value: str) -> None:
    body = '{"model":"m","messages":[{"role":"user"}],"stream":true,"stream_options":{"x":%s%s}}'
    sent = read_chat((body % (value, "")).encode(), None).body_for("m")
    assert sent == (body % (value, ',"include_usage":true')).encode()


def test_stream_options_stay_as_they_are_where_usage_is_asked_for() -> None:
    options = b'{"include_usage" : true, "x": 1.0}'
    body = b'{"model":"m","messages":[{"role":"user"}],"stream":true,"stream_options":%s}' % options
    asked = read_chat(body, None)
    assert asked.wants_usage
    assert asked.body_for("m") == body


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"stream": None}])
def test_without_a_stream_no_stream_options_are_added(fields: dict[str, Any]) -> None:
    asked = chat(**fields)
    assert not asked.stream
    assert "stream_options" not in json.loads(asked.body_for("m"))


def test_embeddings_never_stream() -> None:
    asked = read_embeddings(b'{"model":"m","input":"x","stream":true}', None)
    assert not asked.stream
    assert json.loads(asked.body_for("m")) == {"model": "m", "input": "x", "stream": True}


# ---- needs


def test_plain_text_needs_nothing() -> None:
    needs = chat().needs
    assert (needs.vision, needs.tools, needs.json, needs.embeddings) == (False,) * 4


def test_an_image_in_any_message_needs_vision() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]},
        {"role": "user", "content": "Well?"},
    ]
    assert chat(messages=messages).needs.vision


def test_text_parts_and_texts_about_images_need_no_vision() -> None:
    parts = [{"type": "text", "text": '{"type":"image_url"}'}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "image_url"}]
    assert not chat(messages=messages).needs.vision


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, True),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, True),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, False),
        ({"tools": []}, False),
        ({"tools": None}, False),
    ],
)
def test_tools_are_needed_where_they_may_be_called(fields: dict[str, Any], needed: bool) -> None:
    assert chat(**fields).needs.tools is needed


@pytest.mark.parametrize(
    ("wanted", "needed"),
    [
        ({"type": "json_object"}, True),
        ({"type": "json_schema", "json_schema": {"name": "p", "schema": {}}}, True),
        ({"type": "text"}, False),
        (None, False),
    ],
)
def test_structured_output_is_a_need(wanted: Any, needed: bool) -> None:
    assert chat(response_format=wanted).needs.json is needed


@pytest.mark.parametrize(
    ("inputs", "together", "longest"),
    [
        (b'"aaaaaaaa"', 2, 2),
        (b'["aaaa","bbbbbbbb","cccc"]', 4, 2),
        (b"[1,2,3]", 3, 3),
        (b"[[1,2,3],[4]]", 4, 3),
    ],
)
def test_of_many_inputs_only_the_longest_has_to_fit_a_context(
    inputs: bytes, together: int, longest: int
) -> None:
    asked = read_embeddings(b'{"model":"m","input":' + inputs + b"}", None)
    assert (asked.prompt_tokens, asked.context_tokens) == (together, longest)


def test_embeddings_are_a_need_and_have_no_output() -> None:
    asked = read_embeddings(b'{"model":"m","input":["a","b"]}', None)
    assert asked.needs.embeddings
    assert asked.max_tokens == 0


# ---- estimates


def test_four_bytes_of_text_are_a_token_and_each_message_costs_four_more() -> None:
    # '"' + 400 letters + '"' = 402 bytes -> 101 tokens, + 4 for the message
    assert chat(messages=[{"role": "user", "content": "a" * 400}]).prompt_tokens == 105


def test_an_image_counts_as_one_however_large_it_is() -> None:
    url = "data:image/png;base64," + "A" * 1_000_000
    part = {"type": "image_url", "image_url": {"url": url}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]
    assert chat(messages=messages).prompt_tokens == 2 + 4 + MEDIA_TOKENS


def test_tools_are_part_of_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "f" * 400}}]
    assert chat(tools=tools).prompt_tokens > chat().prompt_tokens + 100


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        ("a" * 400, 100),
        (["a" * 400, "b" * 400], 200),
        ([1, 2, 3], 3),
        ([[1, 2, 3], [4, 5]], 5),
        ("", 1),
    ],
)
def test_texts_and_token_numbers_are_weighed(value: Any, tokens: int) -> None:
    for read, name in ((read_completion, "prompt"), (read_embeddings, "input")):
        asked = read(json.dumps({"model": "m", name: value}).encode(), None)
        assert asked.prompt_tokens == tokens


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 16}, 16),
        ({"max_tokens": 16.0}, 16),
        ({"max_tokens": 0}, 0),
        ({"max_completion_tokens": 8, "max_tokens": 16}, 8),
        ({"max_tokens": 16, "n": 3}, 48),
        ({"n": 3}, None),
        ({"max_tokens": 10**40}, MOST_TOKENS),
        ({"max_tokens": 10**9, "n": 10**9}, MOST_TOKENS),
    ],
)
def test_the_limit_on_the_answer_covers_all_answers(
    fields: dict[str, Any], limit: int | None
) -> None:
    assert chat(**fields).max_tokens == limit


# ---- cache keys

LONG = [
    {"role": "system", "content": "Be brief. " * 500},
    {"role": "user", "content": "Hello"},
]


def test_the_header_wins_over_the_body_and_the_body_over_a_digest() -> None:
    body = json.dumps({"model": "m", "messages": LONG, "prompt_cache_key": "in-body"}).encode()
    assert read_chat(body, "in-header").cache_key == "in-header"
    assert read_chat(body, None).cache_key == "in-body"
    assert read_chat(body, "").cache_key == "in-body"


def test_short_prompts_have_no_cache_key() -> None:
    assert chat().cache_key is None


def test_a_prompt_of_1024_tokens_has_a_digest_and_one_of_1023_none() -> None:
    def of(tokens: int) -> str | None:
        content = "a" * (4 * (tokens - 4) - 2)  # the quotes count, and four for the message
        asked = chat(messages=[{"role": "user", "content": content}])
        assert asked.prompt_tokens == tokens
        return asked.cache_key

    assert of(1023) is None
    assert of(1024) is not None


def test_a_conversation_keeps_its_key_as_it_goes_on() -> None:
    longer = [*LONG, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Bye"}]
    assert chat(messages=LONG).cache_key == chat(messages=longer).cache_key


def test_other_openings_have_other_keys() -> None:
    other = [LONG[0], {"role": "user", "content": "Good morning"}]
    assert chat(messages=LONG).cache_key != chat(messages=other).cache_key


def test_of_a_long_text_both_ends_and_the_length_make_the_key() -> None:
    def of(content: str) -> str | None:
        return chat(messages=[{"role": "user", "content": content}]).cache_key

    long = "a" * 100_000
    assert of(long) == of(long[:50_000] + "b" + long[50_001:])  # not read for it
    assert len({of(long), of("b" + long[1:]), of(long[1:] + "b"), of(long + "a")}) == 4


def test_completions_with_one_beginning_share_a_key() -> None:
    def of(prompt: str) -> str | None:
        return read_completion(
            json.dumps({"model": "m", "prompt": prompt}).encode(), None
        ).cache_key

    assert of("a" * 8000 + "x") == of("a" * 8000 + "y") is not None
    assert of("b" + "a" * 8000) != of("a" * 8000)


def test_embeddings_have_no_digest() -> None:
    body = json.dumps({"model": "m", "input": "a" * 8000}).encode()
    assert read_embeddings(body, None).cache_key is None
