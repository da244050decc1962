"""A fake LLM server with vLLM's manners: it answers as a real one would, or as a test tells it.

    async with await OpenAIStub.start() as stub:      # serves the model "m"
        stub.then(refuse(400, "too long"), ordinary)  # the next calls, one by one
        ...
        stub.calls[0].body["seed"]                    # what the router sent

A *behaviour* is a coroutine function that takes a `Call` and answers it in any way, or not at all.
Calls without one of their own get `stub.behaviour`, which is `ordinary` unless a test says
otherwise. What vLLM does was captured from vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import base64
import email.message
import email.policy
import json
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from time import monotonic
from typing import Any, Self, cast

from tests.stubs.scripted import ClientGone, Headers, ScriptedStub, StubConnection, StubRequest

Behaviour = Callable[["Call"], Awaitable[None]]
EVENT_STREAM = [("Content-Type", "text/event-stream; charset=utf-8")]
JSON = ("Content-Type", "application/json")
CREATED = 1795953049


class Call:
    """One request for a completion or embeddings, and the means to answer it."""

    def __init__(self, stub: OpenAIStub, request: StubRequest) -> None:
        self.stub = stub
        self.request = request
        self.connection: StubConnection = request.connection
        self.path = request.path
        self.headers = dict(request.headers)
        is_form = self.headers.get("content-type", "").startswith("multipart/")
        self.body: dict[str, Any] = {} if is_form else json.loads(request.body)
        self.at = monotonic()
        self.ended = asyncio.Event()

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def wants_usage(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    @property
    def form(self) -> dict[str, bytes]:
        """The parts of a form by name, as another parser than the router's reads them."""
        head = f"Content-Type: {self.headers['content-type']}\r\n\r\n".encode("latin-1")
        message = email.message_from_bytes(head + self.request.body, policy=email.policy.HTTP)
        parts = cast("list[email.message.EmailMessage]", message.get_payload())
        named = [(part.get_param("name", header="content-disposition"), part) for part in parts]
        return {str(name): cast("bytes", part.get_payload(decode=True)) for name, part in named}

    # ---- answering at once

    async def json(self, document: Any, status: int = 200, headers: Headers = ()) -> None:
        body = json.dumps(document, ensure_ascii=False).encode()
        await self.connection.respond(status, body, [JSON, *headers])

    async def error(self, status: int, message: str, headers: Headers = (), **more: Any) -> None:
        """As vLLM writes it: with an integer code."""
        error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
        await self.json({"error": error | more}, status, headers)

    # ---- answering bit by bit

    async def start_stream(self) -> None:
        await self.connection.start_chunked(200, EVENT_STREAM)

    async def event(self, document: Any) -> None:
        await self.connection.chunk(sse(document))

    async def role(self) -> None:
        if self.path.endswith("/chat/completions"):
            await self.event(self.chunk({"role": "assistant", "content": ""}))

    async def say(self, content: str) -> None:
        await self.event(self.chunk({"content": content}))

    async def finish(self, reason: str = "stop") -> None:
        await self.event(self.chunk({}, reason))

    async def usage(self, prompt: int | None = None, output: int | None = None) -> None:
        await self.event({**self._base(), "choices": [], "usage": self.counts(prompt, output)})

    async def end(self) -> None:
        """[DONE], and the end of the body."""
        await self.connection.chunk(b"data: [DONE]\n\n")
        await self.connection.end_chunked()

    # ---- what a whole answer is made of

    def events(self) -> list[bytes]:
        """An ordinary stream's events."""
        chat = self.path.endswith("/chat/completions")
        found = [sse(self.chunk({"role": "assistant", "content": ""}))] if chat else []
        found += [sse(self.chunk({"content": word})) for word in self.stub.words]
        found.append(sse(self.chunk({}, "stop")))
        if self.wants_usage and self.stub.tells_usage:
            found.append(sse({**self._base(), "choices": [], "usage": self.counts()}))
        return [*found, b"data: [DONE]\n\n"]

    def chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        if self.path.endswith("/chat/completions"):
            choice: dict[str, Any] = {"index": 0, "delta": delta}
        else:
            choice = {"index": 0, "text": delta.get("content", "")}
        choice |= {"logprobs": None, "finish_reason": finish}
        return {**self._base(), "choices": [choice]}

    def document(self) -> dict[str, Any]:
        """An ordinary answer that is no stream."""
        if self.path.endswith("/embeddings"):
            return self._embeddings()
        text = "".join(self.stub.words)
        if self.path.endswith("/chat/completions"):
            choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        else:
            choice = {"text": text}
        choice |= {"index": 0, "logprobs": None, "finish_reason": "stop"}
        document = {**self._base(), "choices": [choice]}
        document["object"] = document["object"].removesuffix(".chunk")
        return document | ({"usage": self.counts()} if self.stub.tells_usage else {})

    def counts(self, prompt: int | None = None, output: int | None = None) -> dict[str, Any]:
        prompt = self.stub.prompt_tokens if prompt is None else prompt
        output = len(self.stub.words) if output is None else output
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }

    def _base(self) -> dict[str, Any]:
        chat = self.path.endswith("/chat/completions")
        return {
            "id": "chatcmpl-1" if chat else "cmpl-1",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": CREATED,
            "model": self.body.get("model"),
        }

    def _embeddings(self) -> dict[str, Any]:
        given = self.body["input"]
        vectors = [[0.25, -0.5, 1.0]] * (len(given) if isinstance(given, list) else 1)
        in_base64 = self.body.get("encoding_format") == "base64"
        data = [
            {"object": "embedding", "index": i, "embedding": _packed(v) if in_base64 else v}
            for i, v in enumerate(vectors)
        ]
        prompt = self.stub.prompt_tokens
        counts = {"prompt_tokens": prompt, "total_tokens": prompt}
        return {"object": "list", "model": self.body.get("model"), "data": data, "usage": counts}


def sse(document: Any) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


class OpenAIStub:
    """The server. `calls` are requests for completions and embeddings, in order of arrival;
    `running` of them are being answered now, `most_running` were at one time."""

    def __init__(self, models: Iterable[str]) -> None:
        self.models = tuple(models)
        self.words: list[str] = ["Hello", ",", " world"]
        self.prompt_tokens = 7
        self.tells_usage = True
        self.behaviour: Behaviour = ordinary
        self.calls: list[Call] = []
        self.running = 0
        self.most_running = 0
        self._next: deque[Behaviour] = deque()
        self._server: ScriptedStub

    @classmethod
    async def start(cls, *models: str, port: int = 0) -> Self:
        stub = cls(models or ("m",))
        stub._server = await ScriptedStub.start(stub._serve, port=port)
        return stub

    @classmethod
    def slow(cls, *, backlog: int) -> Self:
        """One with the model "m" that accepts nobody before ``server.accept()``."""
        stub = cls(("m",))
        stub._server = ScriptedStub.slow(stub._serve, backlog)
        return stub

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def server(self) -> ScriptedStub:
        """The connections below."""
        return self._server

    def then(self, *behaviours: Behaviour) -> None:
        """How the next calls are answered, one each."""
        self._next.extend(behaviours)

    async def until_calls(self, count: int, within: float = 20.0) -> Call:
        """Wait until `count` calls have come in all, and return the latest of them."""
        async with asyncio.timeout(within):
            while len(self.calls) < count:
                self._server._change.clear()
                await self._server._change.wait()
        return self.calls[count - 1]

    async def close(self) -> None:
        await self._server.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _serve(self, connection: StubConnection) -> None:
        async for request in connection:
            if request.method == "POST":
                await self._complete(Call(self, request))
            else:
                await self._tell(request)

    async def _complete(self, call: Call) -> None:
        self.calls.append(call)
        self._server._change.set()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await (self._next.popleft() if self._next else self.behaviour)(call)
        finally:
            self.running -= 1
            call.ended.set()

    async def _tell(self, request: StubRequest) -> None:
        connection = request.connection
        if request.path == "/v1/models":
            listed = [
                {"id": name, "object": "model", "created": CREATED, "owned_by": "vllm"}
                for name in self.models
            ]
            body = json.dumps({"object": "list", "data": listed}).encode()
            await connection.respond(200, body, [JSON])
        elif request.path == "/version":
            await connection.respond(200, b'{"version":"0.32.0"}', [JSON])
        elif request.path == "/health":
            await connection.respond(200)
        elif request.path == "/metrics":
            await connection.respond(200, self._metrics(), [("Content-Type", "text/plain")])
        else:
            await connection.respond(404, b'{"detail":"Not Found"}', [JSON])

    def _metrics(self) -> bytes:
        label = f'{{engine="0",model_name="{self.models[0]}"}}'
        return (
            f"vllm:num_requests_running{label} {float(self.running)}\n"
            f"vllm:num_requests_waiting{label} 0.0\n"
            f"vllm:kv_cache_usage_perc{label} 0.0\n"
        ).encode()


# ---- behaviours


async def ordinary(call: Call) -> None:
    """A whole, proper answer."""
    if call.is_stream and not call.path.endswith("/embeddings"):
        await call.connection.stream(call.events(), EVENT_STREAM)
    else:
        await call.json(call.document())


def held(until: asyncio.Event) -> Behaviour:
    """Nothing at all until the event, then an ordinary answer. A client that leaves ends it."""

    async def behave(call: Call) -> None:
        await either(until, call.connection.gone)
        if call.connection.gone.is_set():
            raise ClientGone
        await ordinary(call)

    return behave


def refuse(status: int, message: str = "no", headers: Headers = (), **more: Any) -> Behaviour:
    async def behave(call: Call) -> None:
        await call.error(status, message, headers, **more)

    return behave


def respond(status: int, body: bytes, *headers: tuple[str, str]) -> Behaviour:
    """Any response with a length."""

    async def behave(call: Call) -> None:
        await call.connection.respond(status, body, headers)

    return behave


def stream(*pieces: bytes, end: bool = True, delay: float = 0.0) -> Behaviour:
    """These writes as an event stream's chunks. Without `end` the connection then closes."""

    async def behave(call: Call) -> None:
        await call.start_stream()
        for piece in pieces:
            await call.connection.chunk(piece)
            await asyncio.sleep(delay)
        if end:
            await call.connection.end_chunked()
        else:
            call.connection.close()

    return behave


async def reset(call: Call) -> None:
    """RST before anything is said."""
    call.connection.reset()


async def silent(call: Call) -> None:
    """Nothing, until the client goes."""
    await call.connection.stall()


def drip(seconds: float, count: int) -> Behaviour:
    """A stream that says a word every `seconds`."""

    async def behave(call: Call) -> None:
        await call.start_stream()
        await call.role()
        for n in range(count):
            await call.say(f"w{n} ")
            await either(call.connection.gone, within=seconds)
            if call.connection.gone.is_set():
                raise ClientGone
        await call.finish()
        if call.wants_usage:
            await call.usage(output=count)
        await call.end()

    return behave


async def either(*events: asyncio.Event, within: float | None = None) -> None:
    """Wait until one of the events is set, at most `within` seconds."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=within, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
