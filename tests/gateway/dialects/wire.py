"""OpenAI's wire form for tests: what backends answer, written out, and what clients see, read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st

from mindrouter.gateway.dialects.translation import Reply
from mindrouter.gateway.requests import read_fields

SAMPLES = Path(__file__).parent / "samples"
REPLY = Reply(reply_id="r1", model="m", created=1_795_953_048.0, prompt_tokens=11)
USAGE = {
    "prompt_tokens": 36,
    "completion_tokens": 4,
    "total_tokens": 40,
    "prompt_tokens_details": {"cached_tokens": 24},
}


def sample(name: str) -> bytes:
    """What a real backend answered, without its head."""
    return (SAMPLES / name).read_bytes()


def fields(request: dict[str, Any]) -> dict[str, msgspec.Raw]:
    return read_fields(json.dumps(request).encode())


def completion(
    finish: str | None = "stop", usage: dict[str, Any] | None = USAGE, **message: Any
) -> bytes:
    """A whole chat completion. ``stop_reason`` belongs to the choice, as vLLM has it."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    for name in ("stop_reason", "logprobs"):
        if name in message:
            choice[name] = message.pop(name)
    choice["message"] = {"role": "assistant", "content": None, **message}
    body: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice]}
    if usage is not None:
        body["usage"] = usage
    return json.dumps(body).encode()


def call(
    call_id: str | None, name: str, arguments: str, index: int | None = None
) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call_id is not None:
        made["id"] = call_id
    if index is not None:
        made["index"] = index
    return made


def more(index: int, arguments: str) -> dict[str, Any]:
    """A stream's further part of a tool call."""
    return {"index": index, "function": {"arguments": arguments}}


def chunk(finish: str | None = None, **delta: Any) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    for name in ("stop_reason", "logprobs"):
        if name in delta:
            choice[name] = delta.pop(name)
    return data({"object": "chat.completion.chunk", "choices": [{**choice, "delta": delta}]})


def usage_chunk(usage: dict[str, Any] = USAGE) -> bytes:
    return data({"object": "chat.completion.chunk", "choices": [], "usage": usage})


def data(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def sse(stream: bytes) -> list[tuple[str, Any]]:
    """A client's events, each as its name and its data; comments are left out."""
    assert stream == b"" or stream.endswith(b"\n\n")
    events = []
    for event in stream.decode().split("\n\n")[:-1]:
        if event.startswith(":"):
            continue
        name, written = event.split("\n")
        assert name.startswith("event: ")
        assert written.startswith("data: ")
        events.append((name[7:], json.loads(written[6:])))
    return events


def lines(stream: bytes) -> list[Any]:
    assert stream == b"" or stream.endswith(b"\n")
    return [json.loads(line) for line in stream.splitlines()]


def cut(whole: bytes, places: list[int]) -> list[bytes]:
    """The bytes in the pieces that cutting at these places gives."""
    ends = sorted({min(place, len(whole)) for place in places})
    starts = [0, *ends]
    return [whole[start:end] for start, end in zip(starts, [*ends, len(whole)], strict=True)]


#: JSON objects such as tools' arguments and schemas are.
json_objects = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
        ),
        max_leaves=3,
    ),
    max_size=3,
)
#: Text with something in it; surrogates cannot be sent as UTF-8.
texts = st.text(min_size=1, max_size=12)
names = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8)
