"""The backends and the clients of the benchmarks: cheap, so that the router is what is busy.

A backend of one process, at two ports, and a load of another share a core, and must not be what is
slow: a message that is the one before it again is not parsed, streams that are due at a moment are
written in one turn, and what a client has had is checked at its end.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import uvloop

EVENTS, PACE = 200, 0.05
SMALL, LARGE = 480, 400_000  # bytes of prompt
#: Streams begin one after the other over this time, as people do; together, they would stay so.
RAMP_SECONDS = 1.0
SLOTS = 50  # parts of the pace; streams within one are written together
LATE_SECONDS = 20.0  # what is open so much after its time is counted as unfinished
LOAD_CORE = 1
END = b"\r\n\r\n"

ANSWER = (
    b'{"id":"chatcmpl-0000000000000001","object":"chat.completion","created":1790000000,"model":'
    b'"bench-model","choices":[{"index":0,"message":{"role":"assistant","content":"%b"},'
    b'"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":120,"completion_tokens":'
    b'128,"total_tokens":248},"system_fingerprint":"stub"}'
) % (b"the quick brown fox jumps over a lazy dog " * 13)[:518]
EVENT = (
    b'data: {"id":"chatcmpl-0000000000000001","object":"chat.completion.chunk","created":'
    b'1790000000,"model":"bench-model","choices":[{"index":0,"delta":{"content":"%019d"},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
#: When the stub wrote an event, in nanoseconds of the machine's clock.
STAMP = re.compile(rb'"content":"(\d{19})"')
LAST = (
    b'data: {"id":"c1","choices":[{"index":0,"finish_reason":"stop","delta":{}}]}\n\n'
    b'data: {"id":"c1","choices":[],"usage":{"prompt_tokens":120,"completion_tokens":200}}\n\n'
    b"data: [DONE]\n\n"
)
_PLAIN = (
    b"HTTP/1.1 200 OK\r\nserver: stub\r\ncontent-type: application/json\r\ncontent-length: %d" + END
) % len(ANSWER) + ANSWER
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: stub\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked" + END
)
_OVER = b"0" + END
_ROUTERS_ASK = {
    b"/v1/models": b'{"object":"list","data":[{"id":"bench-model","object":"model",'
    b'"owned_by":"vllm","root":"bench-model","max_model_len":1000000}]}',
    b"/version": b'{"version":"0.13.0"}',
    b"/get_model_info": b'{"model_path":"bench-model","is_generation":true}',
    b"/get_server_info": b'{"model_path":"bench-model","served_model_name":"bench-model",'
    b'"tp_size":1,"dp_size":1}',
}


# ---- the backend


class Stub(asyncio.Protocol):
    """Answers each request, with a stream if it asks for one. From ``/hold`` to ``/release`` it
    keeps those for ``queued-model`` waiting."""

    held: list[Stub] | None = None
    wheel: Wheel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.parts: list[bytes] = []
        self.missing = 0  # bytes of the message whose beginning is in ``parts``
        self.known = b""  # a whole message that asked for a plain answer
        self.left = 0  # events of its stream

    def data_received(self, data: bytes) -> None:
        if data == self.known and Stub.held is None:
            self.transport.write(_PLAIN)
            return
        self.parts.append(data)
        self.missing -= len(data)
        if self.missing > 0:
            return
        message = b"".join(self.parts)
        head, found, body = message.partition(END)
        at = head.lower().find(b"content-length:")
        size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if not found or len(body) < size:
            self.missing = size - len(body) if found else 1
            self.parts = [message]
            return
        self.parts, self.missing = [], 0
        self._answer(message, head, body)

    def _answer(self, message: bytes, head: bytes, body: bytes) -> None:
        if head.startswith(b"POST"):
            if Stub.held is not None and b'"queued-model"' in body:
                Stub.held.append(self)
            elif b'"stream":true' in body:
                self.transport.write(_STREAM_HEAD)
                self.left = EVENTS + 1
                self.wheel.add(self)
            else:
                self.known = message if len(message) < 4096 else b""
                self.transport.write(_PLAIN)
            return
        path = head.split(b" ", 2)[1]
        if path == b"/hold":
            Stub.held = []
        elif path == b"/release":
            held, Stub.held = Stub.held or [], None
            for one in held:
                one.transport.write(_PLAIN)
        told = _ROUTERS_ASK.get(path, ANSWER if path in (b"/hold", b"/release") else b"{}")
        kind = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d" + END
        self.transport.write(kind % len(told) + told)


class Wheel:
    """Writes an event to every stream that is due: one timer for all of them."""

    def __init__(self) -> None:
        self.slots: list[list[Stub]] = [[] for _ in range(SLOTS)]
        self.began = self.next = 0

    def add(self, stub: Stub) -> None:
        self.slots[self.next % SLOTS].append(stub)

    async def turn(self) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        while True:
            self.next += 1
            delay = start + self.next * PACE / SLOTS - loop.time()
            if delay > 0:
                await asyncio.sleep(delay)
            elif self.next % SLOTS == 0:
                await asyncio.sleep(0)  # late: still read what has come
            now = self.next % SLOTS
            if self.slots[now]:
                self.slots[now] = self._write_all(self.slots[now])

    def _write_all(self, stubs: list[Stub]) -> list[Stub]:
        kept = []
        last = b"%x\r\n%b\r\n%b" % (len(LAST), LAST, _OVER)
        for stub in stubs:
            if stub.transport.is_closing():
                continue
            stub.left -= 1
            if stub.left:
                event = EVENT % time.monotonic_ns()
                stub.transport.write(b"%x\r\n%b\r\n" % (len(event), event))
                kept.append(stub)
            else:
                stub.transport.write(last)
        return kept


def serve_stub(ports: list[int]) -> None:
    """The backends, until the process is ended."""
    os.sched_setaffinity(0, {LOAD_CORE})

    async def serve() -> None:
        Stub.wheel = Wheel()
        loop = asyncio.get_running_loop()
        for port in ports:
            await loop.create_server(Stub, "127.0.0.1", port, backlog=4096)
        await Stub.wheel.turn()

    uvloop.run(serve())


# ---- the load


@dataclass(slots=True)
class Seen:
    """What a load has seen: answers, or events; the seconds each took, in order of length; and
    what did not come as it should."""

    count: int = 0
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        """In milliseconds."""
        return self.seconds[int((len(self.seconds) - 1) * share)] * 1e3 if self.seconds else 0.0


class Asking(asyncio.Protocol):
    """One connection of the load: requests one after the other until a time, or one stream."""

    def __init__(self, request: bytes, until: float, *, stream: bool) -> None:
        self.request = request
        self.until = until
        self.count = 0
        self.asked_at = 0.0
        self.seconds: list[float] = []
        self.wrong = ""
        self.parts: list[bytes] = []
        self.times: list[int] = []  # of the parts of a stream
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if stream:
            self.data_received = self.stream_received  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.asked_at = time.monotonic()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if self.parts or not data.endswith(ANSWER):
            self.parts.append(data)
            data = b"".join(self.parts)
            if not data.endswith(ANSWER):
                if len(data) > 2 * len(ANSWER) or not data.startswith(b"HTTP/1.1 200"):
                    self.end(f"not the answer: {data[:300]!r}")
                return
            self.parts = []
        if not data.startswith(b"HTTP/1.1 200"):
            self.end(f"not the answer: {data[:300]!r}")
            return
        now = time.monotonic()
        self.seconds.append(now - self.asked_at)
        self.count += 1
        if now < self.until:
            self.asked_at = now
            self.transport.write(self.request)
        else:
            self.end()

    def stream_received(self, data: bytes) -> None:
        self.parts.append(data)
        self.times.append(time.monotonic_ns())
        if data.endswith(_OVER):
            self.end(self._check())

    def _check(self) -> str:
        """What is wrong with the stream: every event has to be there, once and in order."""
        for part, at in zip(self.parts, self.times, strict=True):
            self.seconds += [(at - int(stamp)) / 1e9 for stamp in STAMP.findall(part)]
        whole = b"".join(self.parts)
        stamps = STAMP.findall(whole)
        self.count = len(stamps)
        is_right = len(stamps) == EVENTS and stamps == sorted(stamps)
        is_right = is_right and b'"finish_reason":"stop"' in whole and b"data: [DONE]" in whole
        return "" if is_right else f"not the stream, {len(stamps)} events: {whole[:300]!r}"

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(f"the connection was lost: {b''.join(self.parts)[:300]!r} {exc}")

    def end(self, wrong: str = "") -> None:
        """The first that is told counts."""
        if not self.over.done():
            self.wrong = wrong
            self.over.set_result(None)
        self.transport.close()


def request(
    key: str, model: str = "bench-model", *, stream: bool = False, prompt_bytes: int = SMALL
) -> bytes:
    text = b"Explain how a fair queue shares a busy server among many users. "
    prompt = (text * (prompt_bytes // len(text) + 1))[:prompt_bytes]
    more = b',"stream":true,"stream_options":{"include_usage":true}' if stream else b""
    body = (
        b'{"model":"%b","messages":[{"role":"system","content":"You are a helpful assistant."},'
        b'{"role":"user","content":"%b"}],"max_tokens":256,"temperature":0.7%b}'
    ) % (model.encode(), prompt, more)
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer %b\r\n"
        b"user-agent: bench/1\r\naccept: */*\r\ncontent-type: application/json\r\n"
        b"content-length: %d%b%b"
    ) % (key.encode(), len(body), END, body)


async def load(port: int, message: bytes, connections: int, seconds: float) -> Seen:
    """So many connections, each with one request after the other for ``seconds``; or with one
    stream, if that is what ``message`` asks for."""
    stream = b'"stream":true' in message
    until = time.monotonic() + seconds
    loop = asyncio.get_running_loop()
    begun = loop.time()
    asking: list[Asking] = []
    for n in range(connections):
        if stream:
            delay = begun + RAMP_SECONDS * n / connections - loop.time()
            await asyncio.sleep(max(0.0, delay))
        make: Callable[[], Asking] = lambda: Asking(message, until, stream=stream)  # noqa: E731
        asking.append((await loop.create_connection(make, "127.0.0.1", port))[1])
    patience = LATE_SECONDS + (EVENTS * PACE if stream else seconds)
    await asyncio.wait([one.over for one in asking], timeout=patience)
    for one in asking:
        one.end("unfinished")
    return Seen(
        sum(one.count for one in asking),
        sorted(second for one in asking for second in one.seconds),
        [one.wrong for one in asking if one.wrong],
    )


async def ask_once(port: int, message: bytes) -> None:
    """One request on a connection of its own. Raises: RuntimeError."""
    loop = asyncio.get_running_loop()
    make: Callable[[], Asking] = lambda: Asking(message, 0.0, stream=False)  # noqa: E731
    _, asking = await loop.create_connection(make, "127.0.0.1", port)
    await asking.over
    if asking.wrong:
        raise RuntimeError(asking.wrong)
