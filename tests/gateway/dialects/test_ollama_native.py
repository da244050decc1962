"""Requests and answers in Ollama's form that pass through untranslated."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrouter.gateway.dialects.ollama.native import ChatLines, usage_in_answer
from mindrouter.gateway.dialects.ollama.reading import (
    asks_to_load,
    read_chat,
    read_embed,
    read_embeddings,
    read_generate,
)
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.requests import MOST_TOKENS, Asked
from scheduler.core.jobs import Needs, Usage
from tests.gateway.dialects.wire import cut

HI = {"role": "user", "content": "hi"}
Read = Callable[[bytes, str | None], Asked]


def chat(**request: Any) -> Asked:
    return read_chat(json.dumps({"model": "m", "messages": [HI], **request}).encode(), None)


def generate(**request: Any) -> Asked:
    return read_generate(json.dumps({"model": "m", "prompt": "hi", **request}).encode(), None)


# ---- reading


def test_streams_are_the_default() -> None:
    assert chat().stream
    assert generate().stream
    assert not chat(stream=False).stream
    assert not generate(stream=False).stream


def test_only_the_models_name_changes_for_an_ollama_backend() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"options":{"x":1.50}}'
    assert read_chat(body, None).body_for("m:latest") == body.replace(b'"m"', b'"m:latest"')


@pytest.mark.parametrize(
    ("request_part", "needs"),
    [
        ({}, Needs()),
        ({"tools": [], "format": "", "messages": [{**HI, "images": []}]}, Needs()),
        ({"messages": [{**HI, "images": ["AAAA"]}]}, Needs(vision=True)),
        ({"tools": [{"type": "function"}]}, Needs(tools=True)),
        ({"format": "json"}, Needs(json=True)),
        ({"format": {"type": "object"}}, Needs(json=True)),
    ],
)
def test_needs_are_read_from_the_body(request_part: dict[str, Any], needs: Needs) -> None:
    assert chat(**request_part).needs == needs


def test_needs_of_a_prompt() -> None:
    assert generate(images=["AAAA"], format="json").needs == Needs(vision=True, json=True)


def test_tokens_are_estimated_from_all_that_is_said() -> None:
    # content and quotes 400 bytes, one message, one image
    asked = chat(messages=[{"role": "user", "content": "x" * 398, "images": ["A" * 9999]}])
    assert asked.prompt_tokens == 100 + 4 + 765
    assert generate(prompt="x" * 198, system="y" * 198).prompt_tokens == 100


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (None, None),
        ({}, None),
        ({"num_predict": 7}, 7),
        ({"num_predict": -1}, None),
        ({"num_predict": 10**400}, MOST_TOKENS),
        ({"num_predict": 1e300}, MOST_TOKENS),
    ],
)
def test_the_clients_limit_is_an_option(options: Any, limit: int | None) -> None:
    assert chat(options=options).max_tokens == limit


@pytest.mark.parametrize(
    ("prompt", "loads"),
    [("", True), ([], True), (None, True), (" ", False), ("\n", False), ([""], False)],
)
def test_only_where_nothing_at_all_is_said_a_model_is_to_be_loaded(
    prompt: Any, loads: bool
) -> None:
    asked = generate(prompt=prompt)
    assert (asks_to_load(asked, "prompt") == "load") == loads


def test_the_cache_key_is_how_the_conversation_begins() -> None:
    long = {"role": "system", "content": "x" * 5000}
    key = chat(messages=[long, HI]).cache_key
    assert key is not None
    assert chat(messages=[long, HI, {"role": "assistant", "content": "a"}]).cache_key == key
    assert chat(messages=[long, {**HI, "content": "?"}]).cache_key != key
    assert chat().cache_key is None


def test_embeddings_need_a_backend_that_embeds() -> None:
    for asked in (
        read_embed(b'{"model":"m","input":["abcd","efgh"]}', "key"),
        read_embeddings(b'{"model":"m","prompt":"abcdefgh"}', "key"),
    ):
        assert asked.needs == Needs(embeddings=True)
        assert (asked.stream, asked.max_tokens, asked.prompt_tokens) == (False, 0, 2)
        assert asked.cache_key == "key"


@pytest.mark.parametrize(
    ("read", "body", "param"),
    [
        (read_chat, b'{"messages":[]}', "model"),
        (read_chat, b'{"model":"m","messages":"hi"}', "messages"),
        (read_chat, b'{"model":"m","messages":[],"options":5}', "options"),
        (read_chat, b'{"model":"m","messages":[],"stream":1}', "stream"),
        (read_generate, b'{"model":"m","images":"a"}', "images"),
        (read_embed, b'{"model":"m"}', "input"),
        (read_embed, b'{"model":"m","input":[]}', "input"),
        (read_embeddings, b'{"model":"m"}', "prompt"),
        (read_embeddings, b'{"model":"m","prompt":5}', "prompt"),
    ],
)
def test_a_malformed_field_is_refused_by_name(read: Read, body: bytes, param: str) -> None:
    with pytest.raises(GatewayError) as caught:
        read(body, None)
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)


@pytest.mark.parametrize(
    ("asked", "prompt_field", "wanted"),
    [
        (chat(messages=[]), "messages", "load"),
        (chat(messages=None), "messages", "load"),
        (chat(messages=[], keep_alive=0), "messages", "unload"),
        (chat(messages=[], keep_alive="0s"), "messages", "unload"),
        (chat(messages=[], keep_alive="5m"), "messages", "load"),
        (chat(keep_alive=0), "messages", None),
        (generate(prompt=""), "prompt", "load"),
        (generate(prompt="", images=["AAAA"]), "prompt", None),
        (generate(prompt="", keep_alive=0), "prompt", "unload"),
        (generate(), "prompt", None),
    ],
)
def test_a_request_without_a_prompt_asks_to_load(
    asked: Asked, prompt_field: str, wanted: str | None
) -> None:
    assert asks_to_load(asked, prompt_field) == wanted


# ---- usage

STREAM = (
    b'{"model":"m","created_at":"2026-01-01T00:00:00Z","message":{"role":"assistant",'
    b'"content":"Hel"},"done":false}\n'
    b'{"model":"m","created_at":"2026-01-01T00:00:00Z","message":{"role":"assistant",'
    b'"content":"lo \\"done\\":true \\"error\\""},"done":false}\n'
    b'{"model":"m","created_at":"2026-01-01T00:00:01Z","message":{"role":"assistant",'
    b'"content":""},"done":true,"done_reason":"stop","total_duration":182242375,'
    b'"load_duration":41295167,"prompt_eval_count":26,"prompt_eval_duration":1,'
    b'"eval_count":282,"eval_duration":1}\n'
)


def test_a_stream_passes_unchanged_and_tells_its_usage() -> None:
    stream = ChatLines(prompt_tokens=9)
    assert stream.feed(STREAM) + stream.finish() == STREAM
    assert stream.usage == Usage(prompt_tokens=26, completion_tokens=282)
    assert stream.finished
    assert stream.over
    assert stream.first_token_seen
    assert stream.estimated_tokens == 2


def test_a_prompt_count_that_is_left_out_is_estimated() -> None:
    body = b'{"done":true,"eval_count":5}'
    expected = Usage(prompt_tokens=9, completion_tokens=5, estimated=True)
    assert usage_in_answer(body, prompt_tokens=9) == expected


def test_usage_of_embeddings_is_the_prompts() -> None:
    body = b'{"model":"m","embeddings":[[0.1]],"prompt_eval_count":6}'
    assert usage_in_answer(body, prompt_tokens=9) == Usage(prompt_tokens=6, completion_tokens=0)
    assert usage_in_answer(b'{"embedding":[0.1]}', prompt_tokens=9) is None
    assert usage_in_answer(b'{"prompt_eval_count":-1}', prompt_tokens=9) is None
    with pytest.raises(GatewayError):
        usage_in_answer(b"<html>", prompt_tokens=9)


def test_a_stream_that_is_cut_short_is_not_finished() -> None:
    stream = ChatLines(prompt_tokens=9)
    stream.feed(STREAM[: STREAM.rindex(b'{"model"')])
    assert not stream.finished
    assert stream.usage is None


def test_a_last_line_without_its_newline_counts() -> None:
    stream = ChatLines(prompt_tokens=9)
    assert stream.feed(STREAM[:-1]) + stream.finish() == STREAM
    assert stream.finished


def test_half_a_last_line_does_not_end_the_stream() -> None:
    stream = ChatLines(prompt_tokens=9)
    stream.feed(STREAM[:-10])
    stream.finish()
    assert not stream.finished


def test_an_error_line_is_kept_from_the_client_and_ends_the_stream() -> None:
    first = STREAM[: STREAM.index(b"\n") + 1]
    stream = ChatLines(prompt_tokens=9)
    assert stream.feed(first + b'{"error":"out of memory"}\n' + first) == first
    assert stream.error == "out of memory"
    assert stream.over
    assert not stream.finished


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_cut_of_the_bytes_gives_the_same_whole_lines(data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(STREAM)), max_size=6))
    stream = ChatLines(prompt_tokens=9)
    told = [stream.feed(piece) for piece in cut(STREAM, places)]
    assert b"".join(told) == STREAM
    assert all(part == b"" or part.endswith(b"\n") for part in told)
    assert stream.usage == Usage(prompt_tokens=26, completion_tokens=282)
