"""One request on every API surface: "the same" in each client's form, and how to read the answer.

@every                                            # address, streamed and not
async def test_case_…(router, stub, surface): ...
    await surface.backend(router, stub, "a")      # of an engine that has the form translated
    response = await surface.ask(router)
    assert surface.text(response) == "Hello, world"
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from accounts.models import User
from backends.models import Backend, BackendModel, BackendStatus
from scheduler.models import Decision
from tests.gateway.dialect_requests import LAST_WORDS, REQUESTS, TEXT_OF
from tests.gateway.forms import END, KIND, MODEL, SOUND
from tests.running import HELLO, RawClient, RunningRouter, said
from tests.stubs.openai_stub import Behaviour, OpenAIStub, ordinary
from tests.stubs.surfaces import SAID, draws, judges, reranks, scores, speaks, transcribes

Test = Callable[..., Awaitable[None]]
OPENAI, ANTHROPIC, OLLAMA = "openai", "anthropic", "ollama"
WORDS = "Hello, world"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """One address, streamed or not. ``answer``: how a stub answers it properly; ``words``: what a
    client then reads of it, empty where that is no text."""

    path: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    form: bytes = b""  # a body that is no JSON
    streamed: bool = False
    dialect: str = OPENAI
    answer: Behaviour = ordinary
    words: str = WORDS
    read: Callable[[httpx.Response], str] = lambda _: ""
    last_words: str = "[DONE]"

    @property
    def name(self) -> str:
        return self.path.strip("/").replace("/", ".") + ("-stream" if self.streamed else "")

    @property
    def is_translated(self) -> bool:
        """By ``backend``'s engine, which has OpenAI's own forms of text only."""
        return self.path in _DIALECTS

    def text(self, response: httpx.Response) -> str:
        return self.read(response)

    def body(self, **more: Any) -> bytes:
        return self.form or json.dumps({**self.fields, **more}, ensure_ascii=False).encode()

    @property
    def kind(self) -> str:
        return KIND if self.form else "application/json"

    async def backend(
        self, router: RunningRouter, stub: OpenAIStub | str, name: str = "a", **fields: Any
    ) -> int:
        """A backend that knows OpenAI's forms only, so that others are translated."""
        if isinstance(stub, OpenAIStub):
            stub.behaviour = self.answer
        return await router.backend(stub, name, engine="sglang", **fields)

    async def ask(
        self, router: RunningRouter, *, key: str = "", headers: Any = None, **more: Any
    ) -> httpx.Response:
        sent = {"Content-Type": self.kind, **(headers or {})}
        if key:
            sent["Authorization"] = f"Bearer {key}"
        response = await router.client.post(self.path, content=self.body(**more), headers=sent)
        await router.told()
        return response

    def post(self, client: RawClient, **more: Any) -> None:
        data = self.body(**more)
        head = {"Content-Length": str(len(data)), "Content-Type": self.kind}
        client.send(f"POST {self.path}", head, data)

    # ---- errors

    def refusal(self, response: httpx.Response, status: int, code: str = "") -> str:
        """The message of an error that came instead of an answer, in the client's own form."""
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-request-id"]
        return self._message(response.json(), code)

    def error_at_the_end(self, response: httpx.Response, code: str = "") -> str:
        """The message of the error that a stream ended with, and nothing after it."""
        assert self.last_words not in response.text, response.text
        *_, last = [line for line in response.text.split("\n") if line]
        return self._message(json.loads(last.removeprefix("data: ")), code)

    def _message(self, document: Any, code: str) -> str:
        error = document["error"]
        if self.dialect == OLLAMA:
            return str(error)
        if self.dialect == ANTHROPIC:
            assert document["type"] == "error"
            assert error.keys() == {"type", "message"}
            return str(error["message"])
        assert error.keys() >= {"message", "type", "param", "code"}
        assert not code or error["code"] == code
        return str(error["message"])


# ---- reading


def _of_chat(response: httpx.Response) -> str:
    return str(response.json()["choices"][0]["message"]["content"])


def _of_completion(response: httpx.Response) -> str:
    return str(response.json()["choices"][0]["text"])


def _of_completion_stream(response: httpx.Response) -> str:
    return "".join(c["text"] for event in _events(response) for c in event.get("choices", ()))


def _of_messages_stream(response: httpx.Response) -> str:
    deltas = [e["delta"] for e in _events(response) if e.get("type") == "content_block_delta"]
    return "".join(delta.get("text", "") for delta in deltas)


def _of_responses_stream(response: httpx.Response) -> str:
    kind = "response.output_text.delta"
    return "".join(e["delta"] for e in _events(response) if e.get("type") == kind)


def _events(response: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _of_lines(part: Callable[[Any], str]) -> Callable[[httpx.Response], str]:
    def read(response: httpx.Response) -> str:
        lines = [json.loads(line) for line in response.text.split("\n") if line]
        return "".join(part(line) for line in lines if "error" not in line)

    return read


def _of_document(path: str) -> Callable[[httpx.Response], str]:
    return lambda response: TEXT_OF[path](response.json())


_STREAMS: dict[str, Callable[[httpx.Response], str]] = {
    "/v1/messages": _of_messages_stream,
    "/v1/responses": _of_responses_stream,
    "/api/chat": _of_lines(lambda line: line["message"].get("content", "")),
    "/api/generate": _of_lines(lambda line: line.get("response", "")),
}
_DIALECTS = {
    "/v1/messages": ANTHROPIC,
    "/v1/responses": OPENAI,
    "/api/chat": OLLAMA,
    "/api/generate": OLLAMA,
}

# ---- all of them

PROMPT = {"model": "m", "prompt": "Hello"}
_CHAT = [
    Surface(path="/v1/chat/completions", fields={"model": "m", "messages": HELLO}, read=_of_chat),
    Surface(
        path="/v1/chat/completions",
        fields={"model": "m", "messages": HELLO, "stream": True},
        streamed=True,
        read=lambda response: said(response.text),
    ),
    Surface(path="/v1/completions", fields=PROMPT, read=_of_completion),
    Surface(
        path="/v1/completions",
        fields={**PROMPT, "stream": True},
        streamed=True,
        read=_of_completion_stream,
    ),
]
_TRANSLATED = [
    Surface(
        path=path,
        fields=REQUESTS[path] | {"stream": streamed},
        streamed=streamed,
        dialect=_DIALECTS[path],
        read=_STREAMS[path] if streamed else _of_document(path),
        last_words=LAST_WORDS[path],
    )
    for path in _DIALECTS
    for streamed in (False, True)
]
_VECTORS = [
    Surface(path="/v1/embeddings", fields={"model": "m", "input": "x"}, words=""),
    Surface(path="/api/embed", fields=REQUESTS["/api/embed"], dialect=OLLAMA, words=""),
]
_OTHERS = [
    Surface(
        path="/v1/rerank",
        fields={"model": "m", "query": "q", "documents": ["x", "y"]},
        answer=reranks({"prompt_tokens": 7, "total_tokens": 7}),
        words="",
    ),
    Surface(
        path="/v1/score",
        fields={"model": "m", "text_1": "q", "text_2": ["x"]},
        answer=scores,
        words="",
    ),
    Surface(path="/v1/moderations", fields={"model": "m", "input": "x"}, answer=judges, words=""),
    Surface(
        path="/v1/audio/transcriptions",
        form=MODEL + SOUND + END,
        answer=transcribes(),
        words=SAID,
        read=lambda response: str(response.json()["text"]),
    ),
    Surface(
        path="/v1/audio/speech",
        fields={"model": "m", "voice": "alloy", "input": "Hello"},
        answer=speaks,
        words="",
    ),
    Surface(path="/v1/images/generations", fields=PROMPT, answer=draws(), words=""),
]
SURFACES = [*_CHAT, *_TRANSLATED, *_VECTORS, *_OTHERS]
#: One of each kind for the scheduler elsewhere, to which dialects are alike.
_IN_CLUSTER = [_CHAT[0], _CHAT[1], _TRANSLATED[1], _TRANSLATED[4], _VECTORS[0], _OTHERS[3]]


def _each(
    surfaces: list[Surface], modes: tuple[str, ...] = ("embedded", "cluster")
) -> Callable[[Test], Test]:
    """Run a test for one surface after the other, each on an empty router with a stub of its own:
    a router for each would take most of the time. Once with the scheduler in the gateway's process
    and once at the other end of the bus.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        async def on_each(router: RunningRouter, subtests: pytest.Subtests, **others: Any) -> None:
            for surface in surfaces:
                if router.in_cluster and surface not in _IN_CLUSTER:
                    continue
                with subtests.test(surface.name):
                    async with await OpenAIStub.start() as stub:
                        await test(router=router, stub=stub, surface=surface, **others)
                        await router.idle(60)
                        assert (router.in_flight, router.waiting) == (0, 0)
                        assert router.left_over() == []
                await router.records()
                await router.ask(_empty)  # in force with the next one's backend

        asked = inspect.signature(test).parameters.values()
        given = [one for one in asked if one.name not in ("surface", "stub")]
        given.append(inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY))
        on_each.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
        both: Test = pytest.mark.parametrize("mode", modes)(on_each)
        return both

    return decorate


def _empty() -> None:
    for model in (Decision, BackendModel, BackendStatus, Backend):
        model.objects.all()._raw_delete("default")  # Django would look for what hangs on each
    others = User.objects.exclude(username="ada")
    if others.exists():
        others.delete()


every = _each(SURFACES)
#: Of each dialect and of what is no text, where each would have to wait for a second.
every_kind = _each([_CHAT[0], *_TRANSLATED[1::2], _VECTORS[0], _OTHERS[0]])
#: Streamed and not, a translated one and what is no text; what a connection or a stream is like
#: concerns the gateway alone, wherever its scheduler is.
every_form = _each(_IN_CLUSTER[:-1], ("embedded",))
every_form_of_stream = _each([one for one in [*_CHAT, *_TRANSLATED] if one.streamed], ("embedded",))
every_text = _each([*_CHAT, *_TRANSLATED])
every_stream = _each([one for one in SURFACES if one.streamed])
every_whole = _each([one for one in SURFACES if not one.streamed])
every_json = _each([one for one in SURFACES if not one.form])
