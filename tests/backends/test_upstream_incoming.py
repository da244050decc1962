"""Properties of reading a response, whatever the cuts between its bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.incoming import Incoming
from backends.response import Response
from tests.stubs.scripted import chunk, head

LOOP = asyncio.new_event_loop()


@pytest.fixture(scope="module", autouse=True)
def _close_loop() -> Iterator[None]:
    yield
    LOOP.close()


class NoConnection:
    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        pass


def incoming() -> tuple[Incoming, Response]:
    response = Response(LOOP, NoConnection())
    reader = Incoming()
    reader.begin(response, expects_body=True)
    return reader, response


def body_of(response: Response) -> bytes:
    return b"".join(response.chunks)


bodies = st.lists(st.binary(min_size=1, max_size=40), max_size=8)
names = st.sampled_from(["X-A", "content-type", "Server", "Keep-Alive"])
values = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)
interims = st.sampled_from(
    [b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"]
)


@st.composite
def responses(draw: st.DrawFn) -> tuple[bytes, bytes, list[tuple[bytes, bytes]]]:
    """A well-formed response with an announced end, its body and its headers."""
    pieces = draw(bodies)
    headers = draw(st.lists(st.tuples(names, values), max_size=5))
    body = b"".join(pieces)
    if draw(st.booleans()):
        headers.append(("Transfer-Encoding", "chunked"))
        extension = draw(st.sampled_from([b"", b";a", b";a=b"]))
        trailer = draw(st.sampled_from([b"", b"X-T: 1\r\n"]))
        coded = b"".join(chunk(piece).replace(b"\r\n", extension + b"\r\n", 1) for piece in pieces)
        payload = coded + b"0\r\n" + trailer + b"\r\n"
    else:
        headers.append(("Content-Length", str(len(body))))
        payload = body
    expected = [(name.lower().encode(), value.encode()) for name, value in headers]
    return draw(interims) + head(draw(st.integers(200, 203)), headers) + payload, body, expected


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


cuts = st.lists(st.integers(0, 10_000), max_size=12)


@settings(deadline=None, max_examples=200)
@given(responses(), cuts)
def test_the_cuts_between_reads_make_no_difference(
    case: tuple[bytes, bytes, list[tuple[bytes, bytes]]], places: list[int]
) -> None:
    data, body, headers = case
    reader, response = incoming()
    *early, last = cut(data, places)
    for part in early:
        assert reader.feed(part) == ""
        assert not reader.complete
    assert reader.feed(last) == ""
    assert reader.complete
    assert reader.keep_alive
    assert not reader.ends_with_connection()
    assert response.headers == headers
    assert body_of(response) == body


@settings(deadline=None, max_examples=200)
@given(responses(), cuts, st.binary(min_size=1, max_size=30).filter(lambda s: s.strip(b"\r\n")))
def test_surplus_never_changes_the_response_and_ends_the_connection(
    case: tuple[bytes, bytes, list[tuple[bytes, bytes]]], places: list[int], surplus: bytes
) -> None:
    data, body, headers = case
    reader, response = incoming()
    for part in cut(data[:-1], places):
        assert reader.feed(part) == ""
    assert reader.feed(data[-1:] + surplus) == ""
    assert reader.complete
    assert not reader.keep_alive
    assert response.headers == headers
    assert body_of(response) == body


@settings(deadline=None, max_examples=300)
@given(responses(), cuts, st.integers(0, 10_000), st.binary(max_size=3))
def test_a_damaged_response_is_never_more_than_reported(
    case: tuple[bytes, bytes, list[tuple[bytes, bytes]]], places: list[int], at: int, new: bytes
) -> None:
    """Whatever comes in, reading it neither raises nor goes on after the end."""
    data, _, _ = case
    at %= len(data)
    damaged = data[:at] + new + data[at + 1 :]
    reader, response = incoming()
    for part in cut(damaged, places):
        problem = reader.feed(part)
        if problem or reader.complete:
            break
    assert not (reader.complete and not response.status)
    assert response.status == 0 or 200 <= response.status <= 599
    assert len(body_of(response)) <= len(damaged)


@settings(deadline=None, max_examples=200)
@given(st.binary(min_size=1, max_size=200))
def test_noise_is_never_a_response(noise: bytes) -> None:
    reader, response = incoming()
    reader.feed(noise)
    assert not reader.complete
    assert response.status == 0


def test_a_body_that_looks_like_a_head_is_not_taken_for_the_next_one() -> None:
    start = b"HTTP/1.1 200 OK\r\nX-A: b\r\nContent-Length: 60\r\n\r\n"
    answer = b"content-length: 2\r\n\r\nhi"
    lookalike = b"x" * (len(start) - len(answer) - 2) + b"\r\n" + answer
    start = start.replace(b"60", b"%d" % len(lookalike))
    assert len(start) == len(lookalike)
    reader, response = incoming()
    assert reader.feed(start) == reader.feed(lookalike) == ""
    assert (reader.complete, reader.keep_alive, body_of(response)) == (True, True, lookalike)
    reader.begin(Response(LOOP, NoConnection()), expects_body=True)
    assert reader.feed(lookalike) != ""
