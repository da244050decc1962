"""Bytes that nobody would send: the parsers refuse or wait, and what is served goes on.

The corpus is what ``test_hygiene`` refuses, whole requests, and streams captured from engines; it
is changed at random. Seeds are fixed, and a failure names its bytes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrouter.gateway.events import EventStream
from tests.gateway.test_hygiene import AMBIGUOUS, CHUNKS, SMUGGLED, post
from tests.gateway.test_protocol import CHAT, chunked
from tests.running import RunningRouter

SAMPLES = sorted((Path(__file__).parent / "dialects" / "samples").glob("*.sse"))
WHOLE = [
    SMUGGLED,
    post(f"Content-Length: {len(CHAT)}", data=CHAT),
    post("Transfer-Encoding: chunked", data=chunked(CHAT[:20], CHAT[20:])),
    post("Connection: Upgrade", "Upgrade: h2c", f"Content-Length: {len(CHAT)}", data=CHAT),
    post("Expect: 100-continue", f"Content-Length: {len(CHAT)}", data=CHAT),
]
BROKEN = [
    *AMBIGUOUS.values(),
    *(post("Transfer-Encoding: chunked", data=d) for d in CHUNKS.values()),
]
BITS = [
    b"\r\n",
    b"\n",
    b"\r",
    b" ",
    b"\t",
    b":",
    b"\x00",
    b"\xff",
    b"0\r\n\r\n",
    b"HTTP/1.1",
    SMUGGLED,
]
TRIALS = 300


def changed(chance: random.Random) -> bytes:
    """One of the corpus, cut, doubled or with something put into it."""
    data = chance.choice(WHOLE + BROKEN)
    for _ in range(chance.randint(1, 4)):
        at, to = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        data = chance.choice(
            [
                data[:at] + data[to:],
                data[:to] + data[at:],
                data[:at] + chance.choice(BITS) + data[at:],
                data[:at] + chance.randbytes(chance.randint(1, 9)) + data[at:],
            ]
        )
    return data


@pytest.mark.usefixtures("backend")
async def test_whatever_bytes_come_are_answered_or_waited_for_and_nothing_breaks(
    router: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    answered = 0

    async def send(seed: int) -> None:
        nonlocal answered
        data = changed(random.Random(seed))
        async with await router.raw() as client:
            client.writer.write(data)
            await asyncio.sleep(0.05)  # what is not whole by then is not waited for
            client.writer.write_eof()
            answer = await client.to_end(60)
        statuses = re.findall(rb"(?:^|\n)HTTP/1\.1 (\d\d\d) ", answer)
        assert answer == b"" or statuses, data
        assert b"500" not in statuses, data
        answered += bool(statuses)

    with caplog.at_level(logging.ERROR):
        for first in range(0, TRIALS, 20):
            await asyncio.gather(*(send(seed) for seed in range(first, first + 20)))
        assert (await router.chat()).status_code == 200
    assert answered > TRIALS / 2
    assert [record.getMessage() for record in caplog.records] == []


@given(st.data())
def test_whatever_a_stream_brings_is_passed_on_in_whole_events_or_not_at_all(
    data: st.DataObject,
) -> None:
    sample = data.draw(st.sampled_from(SAMPLES)).read_bytes()
    at = data.draw(st.integers(0, len(sample)))
    put = data.draw(st.binary(max_size=12) | st.sampled_from([b"\n\n", b"\r", b"data:", b"\x00"]))
    to = data.draw(st.integers(0, len(sample)))
    spoilt = sample[:at] + put + sample[to:]
    size = data.draw(st.integers(1, 400))
    stream = EventStream(hide_usage=data.draw(st.booleans()))
    for start in range(0, len(spoilt), size):
        block = stream.feed(spoilt[start : start + size])
        assert block == b"" or block.endswith((b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n"))
    stream.finish()
    assert stream.estimated_tokens >= 0
