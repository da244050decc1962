"""A real llama.cpp server takes what the translations write, and they read what it answers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mindrouter.gateway.dialects.addresses import FORMS
from mindrouter.gateway.dialects.form import Form
from mindrouter.gateway.dialects.translation import Reply, Timings
from tests.gateway.dialects.ollama_requests import PNG
from tests.gateway.dialects.wire import lines, sse

pytestmark = pytest.mark.llama

ROOT = Path(__file__).resolve().parents[3]
MODEL = Path(os.environ.get("MINDROUTER_DEMO_MODEL") or Path(sys.prefix) / "share" / "smollm2.gguf")
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llama() -> Iterator[httpx.Client]:
    """A client of a server with a small model."""
    fetch = [sys.executable, str(ROOT / "deploy" / "fetch_model.py"), str(MODEL)]
    subprocess.run(fetch, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(ROOT / "deploy" / "llama_server.py")
    command = [sys.executable, script, "--model", str(MODEL), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    assert any(line.startswith("READY") for line in server.stdout)
    headers = {"connection": "close"}  # it drops idle connections when it likes
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
        yield client
    server.send_signal(signal.SIGTERM)
    assert server.wait(20) == 0
    server.stdout.close()


def ask(llama: httpx.Client, path: str, request: dict[str, Any]) -> tuple[Form, bytes, Reply]:
    """What the server answers to the translated request."""
    form = FORMS[path]
    asked = form.read(json.dumps({"model": "m", **request}).encode(), None)
    chat = form.translate(asked.fields)
    answer = llama.post(chat.path.decode(), content=chat.body_for("smollm2"))
    assert answer.status_code == 200, answer.text
    reply = Reply(
        reply_id="r1",
        model="m",
        created=0.0,
        prompt_tokens=asked.prompt_tokens,
        settings=chat.settings,
        begun=chat.begun,
    )
    return form, answer.content, reply


def whole(llama: httpx.Client, path: str, request: dict[str, Any]) -> Any:
    form, answer, reply = ask(llama, path, request)
    return json.loads(form.whole(answer, reply, Timings()))


def streamed(llama: httpx.Client, path: str, request: dict[str, Any]) -> bytes:
    form, answer, reply = ask(llama, path, {**request, "stream": True})
    assert form.stream is not None
    stream = form.stream(reply)
    return stream.feed(answer) + stream.finish(Timings())


TALK = [
    {"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "hi."}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Hi."}]},
    {"role": "user", "content": "Again."},
]


def test_anthropics_options_are_taken_and_its_answer_made(llama: httpx.Client) -> None:
    request = {
        "max_tokens": 4,
        "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        "messages": TALK,
        "temperature": 0,
        "top_k": 1,
        "stop_sequences": ["XYZ"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
    }
    message = whole(llama, "/v1/messages", request)
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["output_tokens"] == 4
    events = sse(streamed(llama, "/v1/messages", request))
    text = "".join(e["delta"]["text"] for n, e in events if n == "content_block_delta")
    assert text == message["content"][0]["text"]
    assert events[-2][1]["usage"]["output_tokens"] == 4
    told = events[-2][1]["usage"]
    read = told["input_tokens"] + told["cache_read_input_tokens"]
    assert read == sum(message["usage"][k] for k in ("input_tokens", "cache_read_input_tokens"))


def test_a_begun_answer_is_gone_on_with(llama: httpx.Client) -> None:
    """llama.cpp repeats the beginning in a whole answer, but not in a stream."""
    begun = [
        {"role": "user", "content": "Count from one to ten in digits, with commas."},
        {"role": "assistant", "content": "1, 2, 3, 4,"},
    ]
    request = {"max_tokens": 6, "messages": begun, "temperature": 0}
    message = whole(llama, "/v1/messages", request)
    assert message["content"] == [{"type": "text", "text": " 5, 6,"}]
    events = sse(streamed(llama, "/v1/messages", request))
    deltas = [e["delta"]["text"] for name, e in events if name == "content_block_delta"]
    assert "".join(deltas) == " 5, 6,"


def test_a_conversation_with_tools_is_taken(llama: httpx.Client) -> None:
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": "12 degrees"}],
        },
    ]
    request = {"max_tokens": 2, "messages": messages, "tools": [tool], "temperature": 0}
    assert whole(llama, "/v1/messages", request)["usage"]["output_tokens"] == 2


def test_a_schema_is_obeyed_in_every_form(llama: httpx.Client) -> None:
    ask_age = [{"role": "user", "content": "How old is Ada? Answer in JSON."}]
    of_anthropic = whole(
        llama,
        "/v1/messages",
        {
            "max_tokens": 40,
            "messages": ask_age,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    )["content"][0]["text"]
    of_ollama = whole(
        llama,
        "/api/chat",
        {"messages": ask_age, "format": SCHEMA, "stream": False, "options": {"num_predict": 40}},
    )["message"]["content"]
    of_responses = whole(
        llama,
        "/v1/responses",
        {
            "max_output_tokens": 40,
            "input": ask_age,
            "text": {"format": {"type": "json_schema", "name": "age", "schema": SCHEMA}},
        },
    )["output"][0]["content"][0]["text"]
    for text in (of_anthropic, of_ollama, of_responses):
        assert isinstance(json.loads(text)["age"], int)


def test_ollamas_options_are_taken_and_its_durations_are_the_engines(llama: httpx.Client) -> None:
    request = {
        "messages": [{"role": "user", "content": "hi"}],
        "think": False,
        "keep_alive": "5m",
        "options": {
            "temperature": 0,
            "num_predict": 4,
            "seed": 1,
            "repeat_penalty": 1.1,
            "stop": ["XYZ"],
            "num_ctx": 2048,
        },
    }
    told = lines(streamed(llama, "/api/chat", request))
    assert told[-1]["done_reason"] == "length"
    assert told[-1]["eval_count"] == 4
    assert told[-1]["eval_duration"] > 0
    made = whole(llama, "/api/chat", {**request, "stream": False})
    assert made["message"]["content"] == "".join(part["message"]["content"] for part in told)


def test_a_prompt_as_it_stands(llama: httpx.Client) -> None:
    request = {"prompt": "1, 2, 3,", "raw": True, "options": {"num_predict": 3, "temperature": 0}}
    told = lines(streamed(llama, "/api/generate", request))
    assert "".join(part["response"] for part in told).strip().startswith("4")


def test_log_probabilities_come_through(llama: httpx.Client) -> None:
    request = {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": False,
        "logprobs": True,
        "top_logprobs": 2,
        "options": {"num_predict": 2},
    }
    told = whole(llama, "/api/chat", request)["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in told] == [2, 2]


def test_responses_options_are_taken_and_its_answer_made(llama: httpx.Client) -> None:
    request = {
        "input": "hi",
        "instructions": "Be brief.",
        "max_output_tokens": 4,
        "temperature": 0,
        "reasoning": {"effort": "none"},
        "text": {"verbosity": "low"},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    }
    events = sse(streamed(llama, "/v1/responses", request))
    response = events[-1][1]["response"]
    assert events[-1][0] == "response.incomplete"
    assert response["usage"]["output_tokens"] == 4
    text = whole(llama, "/v1/responses", request)["output"][0]["content"][0]["text"]
    assert response["output"][0]["content"][0]["text"] == text


def test_an_image_to_a_model_that_cannot_see_is_the_backends_to_refuse(
    llama: httpx.Client,
) -> None:
    form = FORMS["/api/chat"]
    message = {"role": "user", "content": "what?", "images": [PNG]}
    asked = form.read(json.dumps({"model": "m", "messages": [message]}).encode(), None)
    chat = form.translate(asked.fields)
    answer = llama.post(chat.path.decode(), content=chat.body_for("smollm2"))
    assert answer.status_code == 500
    assert "image input is not supported" in answer.text
