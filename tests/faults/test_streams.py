"""Streams as engines, and what stands before them, write them: what can be read is read, on every
surface that streams, and an error within one is an error in whatever form it comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.faults.surfaces import Surface, every_form_of_stream
from tests.running import RunningRouter
from tests.stubs.openai_stub import Behaviour, Call, OpenAIStub, sse

Rewrite = Callable[[list[bytes]], bytes]
DONE = b"data: [DONE]\n\n"


def sent(rewrite: Rewrite, *, bytewise: bool = False) -> Behaviour:
    """An ordinary stream's events, written in another way."""

    async def behave(call: Call) -> None:
        data = rewrite(call.events())
        pieces = [data[at : at + 1] for at in range(len(data))] if bytewise else [data]
        await call.start_stream()
        for piece in pieces:
            await call.connection.chunk(piece)
        await call.connection.end_chunked()

    return behave


def whole(events: list[bytes]) -> bytes:
    return b"".join(events)


def with_ends(end: bytes) -> Rewrite:
    return lambda events: whole(events).replace(b"\n", end)


def between(text: bytes) -> Rewrite:
    return lambda events: text + text.join(events)


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Rewrite:
    """Each event's document changed."""

    def rewrite(events: list[bytes]) -> bytes:
        documents = [json.loads(event[6:]) for event in events if event != DONE]
        for document in documents:
            change(document)
        return whole([sse(document) for document in documents]) + DONE

    return rewrite


def fields_of_nothing(document: dict[str, Any]) -> None:
    document |= {"error": None, "system_fingerprint": None, "service_tier": None}
    document.setdefault("usage", None)
    for choice in document["choices"]:
        choice |= {"stop_reason": None, "logprobs": None}
        if "delta" in choice:
            empty = {"role": None, "content": None, "tool_calls": None, "reasoning_content": None}
            choice["delta"] = empty | choice["delta"]


def no_choices(document: dict[str, Any]) -> None:
    if not document["choices"]:
        document["choices"] = None


def no_reason(document: dict[str, Any]) -> None:
    for choice in document["choices"]:
        choice.pop("finish_reason", None)


def over_two_lines(events: list[bytes]) -> bytes:
    """A document over two lines of data, which a reader joins by a line end."""
    return whole([event.replace(b", ", b",\ndata: ", 1) for event in events])


def usage_in_each(events: list[bytes]) -> bytes:
    """As vLLM's ``continuous_usage_stats``: the last one counts."""
    documents = [json.loads(event[6:]) for event in events if event != DONE]
    for number, document in enumerate(documents[:-1]):
        tokens = min(max(0, number), 3)
        counts = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
        document["usage"] = counts
    return whole([sse(document) for document in documents]) + DONE


def told_first(events: list[bytes]) -> bytes:
    """Azure begins with what its filter says of the prompt, without choices."""
    return sse({"id": "", "choices": [], "prompt_filter_results": []}) + whole(events)


FORMS: dict[str, Rewrite] = {
    "CRLF": with_ends(b"\r\n"),
    "CR": with_ends(b"\r"),
    "no space after the colon": lambda events: whole(events).replace(b"data: ", b"data:"),
    "comments": between(b": ping\n\n:\n\n"),
    "other fields": between(b"retry: 3000\nid: 1\n\n"),
    "named events": lambda events: whole([b"event: message\nid: 7\n" + e for e in events]),
    "events without data": between(b"event: ping\n\n"),
    "empty data": between(b"data:\n\ndata: \n\n"),
    "blank lines": between(b"\n\n\n"),
    "a byte order mark": lambda events: b"\xef\xbb\xbf" + whole(events),
    "done twice": lambda events: whole(events) + DONE,
    "more after done": lambda events: whole(events) + b"data: {\n\n: x\n\ngarbage",
    "no blank line at the end": lambda events: whole(events)[:-2],
    "no done": lambda events: whole(events[:-1]),
    "no reason to finish": rewritten(no_reason),
    "null fields": rewritten(fields_of_nothing),
    "usage with null choices": rewritten(no_choices),
    "usage in each": usage_in_each,
    "something before": told_first,
    "two lines of data": over_two_lines,
}


def as_read(response: httpx.Response, surface: Surface) -> httpx.Response:
    """What an SSE client makes of it, in the plainest form; what the router wrote is in it."""
    if surface.is_translated:
        return response
    text = response.text.replace("\r\n", "\n").replace("\r", "\n")
    events = [
        [line[5:].strip(" ") for line in event.split("\n") if line.startswith("data:")]
        for event in text.split("\n\n")
    ]
    plain = "".join(f"data: {' '.join(lines)}\n\n" for lines in events if any(lines))
    return httpx.Response(response.status_code, text=plain)


@pytest.mark.parametrize("bytewise", [False, True], ids=["at once", "bytewise"])
@every_form_of_stream
async def test_case_b01_b07_a_stream_is_read_in_whatever_way_it_is_written(
    router: RunningRouter, stub: OpenAIStub, surface: Surface, bytewise: bool
) -> None:
    await surface.backend(router, stub)
    for name, rewrite in FORMS.items():
        stub.then(sent(rewrite, bytewise=bytewise))
        response = as_read(await surface.ask(router), surface)
        assert response.status_code == 200, (name, response.text)
        assert surface.text(response) == surface.words, (name, response.text)
        ends = name != "no done" or surface.is_translated
        assert response.text.count(surface.last_words) == ends, (name, response.text)
        record = (await router.records())[-1]
        found = record.outcome, record.prompt_tokens, record.completion_tokens
        assert found == ("completed", 7, 3), name
        assert record.usage_estimated is False, name


def unasked(events: list[bytes]) -> list[bytes]:
    """As from a server that never tells its usage."""
    return [event for event in events if b'"usage"' not in event]


@pytest.mark.parametrize("bytewise", [False, True], ids=["at once", "bytewise"])
@every_form_of_stream
async def test_case_b35_tokens_are_estimated_alike_whatever_lines_end_with(
    router: RunningRouter, stub: OpenAIStub, surface: Surface, bytewise: bool
) -> None:
    await surface.backend(router, stub)
    stub.words = [f"word{n} " for n in range(37)]
    for end in (b"\n", b"\r\n", b"\r"):
        ends = with_ends(end)
        stub.then(sent(lambda events, ends=ends: ends(unasked(events)), bytewise=bytewise))
        assert surface.text(as_read(await surface.ask(router), surface)) == "".join(stub.words)
        record = (await router.records())[-1]
        found = record.outcome, record.completion_tokens, record.usage_estimated
        assert found == ("completed", 37, True), end


LONG_WORD = "ä" * 700_000  # more than a megabyte


@every_form_of_stream
async def test_case_b01_a_single_event_of_more_than_a_megabyte_arrives_whole(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub)
    stub.words = ["a", LONG_WORD, "b"]
    response = await surface.ask(router)
    assert surface.text(response) == f"a{LONG_WORD}b"
    record = await router.record()
    assert (record.outcome, record.completion_tokens) == ("completed", 3)


TOLD = {"message": "CUDA out of memory", "type": "server_error", "param": None, "code": 500}
BROKEN: dict[str, bytes] = {
    "an object": sse({"error": TOLD}),
    "an object and done": sse({"error": TOLD}) + DONE,
    "a text": sse({"error": TOLD["message"]}),
    "a named event": b"event: error\n" + sse({"error": TOLD}),
    "a named event alone": b"event: error\n" + sse(TOLD),
    "a named event by the carriage": b"event: error\r" + sse(TOLD).replace(b"\n", b"\r"),
    "a named event in FastAPI's words": b"event: error\n" + sse({"detail": TOLD["message"]}),
    "a named event of plain words": b"event: error\ndata: %b\n\n" % TOLD["message"].encode(),
    "beside a choice": sse(
        {"error": TOLD, "choices": [{"index": 0, "delta": {}, "finish_reason": "error"}]}
    ),
    "as vLLM's older": sse({"object": "error", **TOLD}),
    "a field of its own": b"error: " + json.dumps(TOLD).encode() + b"\n\n",
}


def breaks(told: bytes) -> Behaviour:
    async def behave(call: Call) -> None:
        await call.start_stream()
        await call.role()
        await call.say("Hello")
        await call.connection.chunk(told)
        await call.connection.end_chunked()

    return behave


@every_form_of_stream
async def test_case_b06_an_error_within_a_stream_is_one_in_whatever_form_it_comes(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub)

    for name, told in BROKEN.items():
        stub.then(breaks(told))
        response = await surface.ask(router)
        assert surface.text(response) == "Hello", (name, response.text)
        assert surface.error_at_the_end(response, "upstream_error") == TOLD["message"], name
        record = (await router.records())[-1]
        found = record.outcome, record.reason, record.completion_tokens
        assert found == ("failed", "upstream_error", 1), name


@every_form_of_stream
async def test_case_b06_an_error_that_is_no_text_reaches_the_client_as_json(
    router: RunningRouter, stub: OpenAIStub, surface: Surface
) -> None:
    await surface.backend(router, stub)
    wrong = [{"loc": ["body", "n"], "msg": "none", "input": None}]
    for told in ({"detail": wrong}, {"message": wrong}, wrong):
        stub.then(breaks(b"event: error\n" + sse(told)))
        response = await surface.ask(router)
        assert surface.error_at_the_end(response, "upstream_error") == json.dumps(wrong), told
