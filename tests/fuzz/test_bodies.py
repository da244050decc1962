"""Bodies of JSON put together at random, which bytes at random seldom become."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.requests import read_fields
from tests.fuzz.bodies import ADDRESSES, SURFACE_READERS, check

NUMBERS = [
    *("0", "1", "-1", "-0", "16", "1.0", "1.50", "1.5", "-0.0", "1e2", "1E+2", "1e999", "-1e999"),
    *("1e308", "9007199254740993", "18446744073709551616", "9" * 40, "0.1000000000000000000001"),
    *("01", "1.", ".5", "+1", "NaN", "Infinity", "-Infinity", "0x1"),
]
TEXTS = [
    *('"m"', '""', '"  "', '"x"', '"user"', '"json"', '"text"', '"\\u006d"', '"\\ud83d\\ude00"'),
    *('"\\ud800"', '"\\u0000"', '"\x01"', '"größer"', '"json_object"', '"sse"', '"tool_result"'),
    *('"none"', '"image"', '"5m"', '"0"', '"1024x1536"', '"function"', '"assistant"'),
]
MESSAGES = [
    '[{"role":"user","content":"x"}]',
    '[{"role":"user","content":[{"type":"text","text":"x"},{"type":"image_url"}]}]',
    '[{"role":"assistant","content":"x","tool_calls":[{"function":{"name":"f"}}]}]',
    '[{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":[]}]}]',
]
NAMES = [
    *("model", "stream", "stream_options", "prompt_cache_key", "max_completion_tokens"),
    *("max_tokens", "n", "response_format", "messages", "tools", "tool_choice", "prompt", "input"),
    *("system", "options", "format", "think", "images", "suffix", "raw", "keep_alive", "text"),
    *("metadata", "instructions", "max_output_tokens", "reasoning", "thinking", "query"),
    *("documents", "texts", "text_1", "text_2", "size", "stream_format", "seed", "user", "top_k"),
    *("include_usage", "num_predict", "temperature", "type", "content", "role", "x", "stop"),
    *("mod\\u0065l", "strea\\u006d", "\\u0000", "\\ud800", "größe"),
]


def list_of(items: list[str]) -> str:
    return "[" + ",".join(items) + "]"


def object_of(pairs: list[tuple[str, str]], blank: str = "") -> str:
    return "{" + ("," + blank).join(f'"{name}"{blank}:{value}' for name, value in pairs) + "}"


blanks = st.sampled_from(["", "", "", " ", "\n", "\t \r", "\x0b"])
plain = st.sampled_from([*NUMBERS, *TEXTS, "null", "true", "false", "nul", "[ ]", *MESSAGES])


def objects(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(st.tuples(st.sampled_from(NAMES), inner), max_size=3).map(object_of)


values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3).map(list_of) | objects(inner),
    max_leaves=5,
)
fields = st.one_of(
    st.tuples(st.sampled_from(NAMES), plain),
    st.tuples(st.sampled_from(NAMES), values),
    st.tuples(st.sampled_from(["stream_options", "options", "reasoning"]), objects(plain)),
)


#: What most addresses want, so that what is drawn besides is looked at.
WHOLE = {
    "model": '"m"',
    "messages": MESSAGES[0],
    "max_tokens": "16",
    "prompt": '"x"',
    "input": '"x"',
    "query": '"x"',
    "documents": '["x"]',
    "stream": "true",
}


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(WHOLE)), unique=True),
    st.lists(fields, max_size=4),
    blanks,
    st.randoms(use_true_random=False),
)
def test_whatever_is_in_a_body_a_backend_gets_it_or_it_is_refused(
    left: list[str], drawn: list[tuple[str, str]], blank: str, chance: random.Random
) -> None:
    pairs = [(name, value) for name, value in WHOLE.items() if name not in left] + drawn
    chance.shuffle(pairs)
    check(object_of(pairs, blank).encode())


def deepest(opening: str, closing: str) -> int:
    """How many times over the decoder takes it."""
    times = 1
    with contextlib.suppress(GatewayError):
        while True:
            read_fields(object_of([("x", opening * times + "1" + closing * times)]).encode())
            times += 1
    return times


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("[", "]"), ('{"content":', "}"), ('[{"type":"tool_result","role":"user","content":', "}]")],
)
def test_values_nested_as_deeply_as_the_decoder_goes_are_read_or_refused(
    opening: str, closing: str
) -> None:
    most = deepest(opening, closing)
    readers = [*(address.read for address in ADDRESSES), *SURFACE_READERS.values()]
    for name in [*WHOLE, "system", "options", "tools", "text_1", "images", "stream_options"]:
        for times in range(most - 20, most + 1):
            nested = {name: opening * times + "1" + closing * times}
            pairs = {**WHOLE, "text_2": '"x"', **nested}
            for read in readers:
                with contextlib.suppress(GatewayError):
                    read(object_of([*pairs.items()]).encode(), None).body_for("other")
