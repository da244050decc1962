"""Real requests straight to a backend, and hints to Ollama."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends import trial
from backends.engines.replies import Reply
from backends.hints import hint, takes_hints
from backends.models import Backend, BackendModel
from backends.services import probe_backends
from backends.trial import offered_models, read_answer, try_backend, try_first_models
from tests.factories import make_backend
from tests.stubs.engines import Answer, OllamaModel, ollama_stub, openai_stub, vllm_stub

pytestmark = pytest.mark.django_db(transaction=True)

CHAT = "POST /v1/chat/completions"
EMBEDDINGS = "POST /v1/embeddings"
HELLO = Answer({"choices": [{"message": {"role": "assistant", "content": " Hello. "}}]})


def test_a_backend_is_asked_for_a_small_chat_with_its_own_key() -> None:
    with vllm_stub("m") as stub:
        stub.answers[CHAT] = HELLO
        backend = make_backend("a", base_url=stub.url + "/v1", api_key="sk-own", models=("m",))
        found = try_backend(backend, "m", "Hi")
        (asked,) = stub.asked
    assert (found.succeeded, found.answer, found.status, found.error) == (True, "Hello.", 200, "")
    assert (found.backend, found.model_name, found.path) == ("a", "m", "/v1/chat/completions")
    assert 0 < found.seconds < 10
    assert asked.headers["authorization"] == "Bearer sk-own"
    assert json.loads(asked.body) == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 64,
    }


def test_a_model_for_embeddings_is_asked_for_one() -> None:
    with vllm_stub("e") as stub:
        stub.answers[EMBEDDINGS] = Answer({"data": [{"embedding": [0.5, -1, 0]}]})
        backend = make_backend(base_url=stub.url)
        BackendModel.objects.create(backend=backend, name="e", detected_embeddings=True)
        found = try_backend(backend, "e")
    assert (found.answer, found.path) == ("An embedding of 3 numbers.", "/v1/embeddings")


@pytest.mark.parametrize(
    ("purpose", "path", "answer", "told"),
    [
        (
            "rerank",
            "/v1/rerank",
            Answer({"results": [{"index": 0, "relevance_score": 0.5}]}),
            "A score of 0.5.",
        ),
        ("speech", "/v1/audio/speech", Answer(b"\xff\xfb" * 600), "1,200 bytes of audio."),
        ("images", "/v1/images/generations", Answer({"data": [{"url": "u"}]}), "An image."),
        (
            "moderation",
            "/v1/moderations",
            Answer({"results": [{"flagged": False}]}),
            "Not flagged.",
        ),
    ],
)
def test_a_model_is_tried_with_what_it_is_for(
    purpose: str, path: str, answer: Answer, told: str
) -> None:
    with openai_stub("m") as stub:
        stub.answers[f"POST {path}"] = answer
        backend = make_backend(base_url=stub.url)
        BackendModel.objects.create(backend=backend, name="m", **{purpose: True})
        found = try_backend(backend, "m", "Hi")
        (asked,) = stub.asked
    assert (found.answer, found.error, found.path) == (told, "", path)
    assert json.loads(asked.body)["model"] == "m"


def test_a_model_is_asked_for_by_the_name_that_its_backend_knows() -> None:
    with ollama_stub(OllamaModel("llama3.2:latest")) as stub:
        backend = make_backend(base_url=stub.url)
        probe_backends([backend.pk])
        assert offered_models(Backend.objects.get()) == {"llama3.2:latest": ""}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer({"error": {"message": "no such model"}}, 404), "no such model"),
        (Answer({"error": "model not found"}, 404), "model not found"),
        (Answer({"detail": "Not Found"}, 404), "Not Found"),
        (Answer(b"<html>", 502), "Status 502."),
        (Answer({"choices": []}), "The answer has nothing in it that was asked for."),
        (Answer(b"nonsense"), "The answer has nothing in it that was asked for."),
    ],
)
def test_what_is_no_answer_is_told_as_an_error(answer: Answer, error: str) -> None:
    with openai_stub("m") as stub:
        stub.answers[CHAT] = answer
        backend = make_backend(base_url=stub.url, models=("m",))
        found = try_backend(backend, "m")
    assert (found.succeeded, found.status, found.error) == (False, answer.status, error)


def test_a_server_that_hangs_or_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 0.2)
    with openai_stub("m") as stub:
        stub.fault = "hang"
        hung = try_backend(make_backend(base_url=stub.url, models=("m",)), "m")
    gone = try_backend(make_backend(base_url="http://127.0.0.1:9", models=("m",)), "m")
    assert (hung.status, hung.error) == (None, "No whole answer within 0.2 s.")
    assert gone.status is None
    assert "POST /v1/chat/completions" in gone.error


def test_several_backends_are_asked_for_their_first_model_each() -> None:
    with openai_stub("m") as stub:
        stub.answers[CHAT] = HELLO
        make_backend("a", base_url=stub.url, models=("z", "k"))
        make_backend("b", base_url=stub.url)
        first, second = try_first_models(Backend.objects.all())
    assert (first.backend, first.model_name, first.answer) == ("a", "k", "Hello.")
    assert (second.backend, second.error) == ("b", "It offers no model.")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_without_an_answer_yet_are_shown(name: str) -> None:
    document: Any = {"choices": [{"message": {"content": None, name: "Hm."}}]}
    assert read_answer(Reply(200, json.dumps(document).encode())) == {"answer": "Hm.", "error": ""}


# ---- hints


def test_ollama_is_told_to_load_and_to_unload() -> None:
    with ollama_stub(OllamaModel("m:latest"), OllamaModel("e", ("embedding",))) as stub:
        stub.answers |= {
            "POST /api/generate": Answer({"done": True}),
            "POST /api/embed": Answer({"embeddings": []}),
        }
        backend = make_backend(base_url=stub.url)
        probe_backends([backend.pk])
        rows = list(BackendModel.objects.select_related("backend__status").order_by("-name"))
        assert [takes_hints(row) for row in rows] == [True, True]
        stub.asked.clear()
        assert hint(rows, load=True) == ["", ""]
        assert hint(rows[1:], load=False) == [""]
        sent = [(asked.path, json.loads(asked.body)) for asked in stub.asked]
    assert sorted(sent[:2], key=str) == [
        ("/api/embed", {"model": "e", "input": [], "keep_alive": "30m"}),
        ("/api/generate", {"model": "m:latest", "stream": False, "keep_alive": "30m"}),
    ]
    assert sent[2] == ("/api/generate", {"model": "e", "stream": False, "keep_alive": 0})


def test_what_went_wrong_with_a_hint_is_told() -> None:
    with ollama_stub() as stub:
        stub.answers["POST /api/generate"] = Answer({"error": "out of memory"}, 500)
        backend = make_backend(base_url=stub.url, engine="ollama", models=("m",))
        gone = make_backend(base_url="http://127.0.0.1:9", engine="ollama", models=("m",))
        rows = [one.models.get() for one in (backend, gone)]
        first, second = hint(rows, load=True)
    assert first == "out of memory"
    assert second.startswith("POST /api/generate: ")


def test_other_engines_take_no_hints() -> None:
    backend = make_backend(engine="vllm", models=("m",))
    assert not takes_hints(backend.models.get())
