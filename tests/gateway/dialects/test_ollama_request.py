"""A request in Ollama's form as the OpenAI request that open engines understand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from mindrouter.gateway.dialects.ollama.request import (
    chat_to_chat,
    embed_to_embeddings,
    embeddings_to_embeddings,
    generate_to_chat,
)
from mindrouter.gateway.dialects.translation import Translated
from mindrouter.gateway.errors import GatewayError
from tests.gateway.dialects.ollama_requests import (
    JPEG,
    PNG,
    back_to_chat,
    back_to_generate,
    chats,
    generates,
    with_stream_said,
)
from tests.gateway.dialects.wire import fields

HI = {"role": "user", "content": "hi"}
To = Callable[[Mapping[str, msgspec.Raw]], Translated]


def body_of(to: To, **request: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(to(fields(request)).body_for("served"))
    return body


def chat_of(**request: Any) -> dict[str, Any]:
    return body_of(chat_to_chat, **{"model": "m", "messages": [HI], "stream": False, **request})


def generate_of(**request: Any) -> dict[str, Any]:
    return body_of(generate_to_chat, **{"model": "m", "prompt": "hi", "stream": False, **request})


def test_the_plainest_chat() -> None:
    # ollama-python always sends "tools": []
    assert chat_of(tools=[]) == {"model": "served", "messages": [HI]}


def test_streams_are_the_default() -> None:
    streamed = {
        "model": "served",
        "messages": [HI],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert body_of(chat_to_chat, model="m", messages=[HI]) == streamed
    assert body_of(generate_to_chat, model="m", prompt="hi") == streamed


def test_a_conversation_that_ends_with_the_model_is_gone_on_with() -> None:
    begun = {"role": "assistant", "content": "The answer is"}
    translated = chat_to_chat(fields({"model": "m", "messages": [HI, begun]}))
    assert translated.begun == "The answer is"
    assert translated.body["continue_final_message"] is True
    assert translated.body["add_generation_prompt"] is False


def test_images_become_data_urls_of_their_kind() -> None:
    message = {"role": "user", "content": "what?", "images": [PNG, JPEG]}
    parts = chat_of(messages=[message])["messages"][0]["content"]
    assert parts == [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{JPEG}"}},
    ]


def test_an_empty_list_of_images_is_none() -> None:
    assert chat_of(messages=[{**HI, "images": []}])["messages"] == [HI]


@pytest.mark.parametrize("image", ["", "%%%", "data:image/png;base64," + PNG, "AAAAAAAA"])
def test_what_is_no_image_is_refused(image: str) -> None:
    with pytest.raises(GatewayError) as caught:
        chat_of(messages=[{**HI, "images": [PNG, image]}])
    assert caught.value.param == "messages[0].images[1]"


def call(name: str, arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}, **more}


def test_results_are_tied_to_the_calls_of_their_tool_in_order() -> None:
    messages = chat_of(
        messages=[
            HI,
            {
                "role": "assistant",
                "content": "",
                "thinking": "Hm.",
                "tool_calls": [call("f", {"x": 1}), call("g", {}), call("f", {"x": 2})],
            },
            {"role": "tool", "tool_name": "g", "content": "of g"},
            {"role": "tool", "tool_name": "f", "content": "of the first f"},
            {"role": "tool", "tool_name": "f", "content": "of the second f"},
        ]
    )["messages"]
    assert messages[1] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "reasoning": "Hm.",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "f", "arguments": '{"x": 1}'},
            },
            {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            {
                "id": "call_2",
                "type": "function",
                "function": {"name": "f", "arguments": '{"x": 2}'},
            },
        ],
    }
    assert [m["tool_call_id"] for m in messages[2:]] == ["call_1", "call_0", "call_2"]


def test_a_result_without_any_name_answers_the_earliest_open_call() -> None:
    messages = chat_of(
        messages=[
            HI,
            {"role": "assistant", "tool_calls": [call("f", {}, id="a"), call("g", {}, id="b")]},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2", "tool_call_id": "b"},
        ]
    )["messages"]
    assert [m["tool_call_id"] for m in messages[2:]] == ["a", "b"]


def test_tools_go_on_as_they_are() -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
    }
    assert chat_of(tools=[tool])["tools"] == [tool]


def test_options_become_sampling_fields() -> None:
    body = chat_of(
        options={
            "temperature": 0,
            "seed": 7,
            "top_k": 40,
            "top_p": 0.9,
            "min_p": 0.05,
            "num_predict": 5,
            "stop": ["END"],
            "repeat_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "mirostat": 0,
            "num_ctx": 2048,
        }
    )
    del body["model"], body["messages"]
    assert body == {
        "temperature": 0,
        "seed": 7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "max_tokens": 5,
        "stop": ["END"],
        "repetition_penalty": 1.1,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }


@pytest.mark.parametrize("unlimited", [-1, -2])
def test_no_limit_is_no_field(unlimited: int) -> None:
    assert "max_tokens" not in chat_of(options={"num_predict": unlimited})


def test_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert chat_of(format="json")["response_format"] == {"type": "json_object"}
    assert chat_of(format=schema)["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }
    assert "response_format" not in chat_of(format="")
    assert "response_format" not in chat_of(format=None)


def test_thinking() -> None:
    on = {"enable_thinking": True, "thinking": True}
    assert chat_of(think=True)["chat_template_kwargs"] == on
    assert chat_of(think=False)["chat_template_kwargs"] == {
        "enable_thinking": False,
        "thinking": False,
    }
    body = chat_of(think="high")
    assert (body["chat_template_kwargs"], body["reasoning_effort"]) == (on, "high")


def test_what_only_says_how_to_run_a_model_is_left_out_and_named() -> None:
    request = {
        "model": "m",
        "messages": [HI],
        "keep_alive": "10m",
        "options": {"num_ctx": 2048, "num_gpu": 1, "mirostat_tau": 5.0},
    }
    assert chat_to_chat(fields(request)).without == (
        "keep_alive",
        "options.mirostat_tau",
        "options.num_ctx",
        "options.num_gpu",
    )


# ---- generate


def test_a_prompt_becomes_a_chat_of_one_message() -> None:
    assert generate_of(system="Be brief.", images=[PNG]) == {
        "model": "served",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "hi"},
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
                ],
            },
        ],
    }


@pytest.mark.parametrize("bare", [{"raw": True}, {"suffix": "end"}])
def test_a_prompt_to_be_taken_as_it_stands_becomes_a_completion(bare: dict[str, Any]) -> None:
    request = {"model": "m", "prompt": "a", "stream": False, **bare}
    translated = generate_to_chat(fields(request))
    assert translated.path == b"/v1/completions"
    expected = {"model": "m", "prompt": "a"}
    if "suffix" in bare:
        expected["suffix"] = "end"
    assert json.loads(translated.body_for("m")) == expected


# ---- embeddings


def test_embeddings() -> None:
    assert body_of(embed_to_embeddings, model="m", input=["a", "b"], dimensions=64) == {
        "model": "served",
        "input": ["a", "b"],
        "truncate_prompt_tokens": -1,
        "dimensions": 64,
        "encoding_format": "float",
    }
    assert "truncate_prompt_tokens" not in body_of(
        embed_to_embeddings, model="m", input="a", truncate=False
    )
    assert body_of(embeddings_to_embeddings, model="m", prompt="a") == {
        "model": "served",
        "input": "a",
        "encoding_format": "float",
    }


# ---- refusals


@pytest.mark.parametrize(
    ("to", "request_part", "param"),
    [
        (chat_to_chat, {"messages": [HI], "adapter": "x"}, "adapter"),
        (chat_to_chat, {"messages": [HI], "options": {"new": 1}}, "options.new"),
        (chat_to_chat, {"messages": [HI], "options": {"mirostat": 2}}, "options.mirostat"),
        (chat_to_chat, {"messages": [HI], "options": {"typical_p": 0.5}}, "options.typical_p"),
        (
            chat_to_chat,
            {"messages": [HI], "options": {"repeat_last_n": 64}},
            "options.repeat_last_n",
        ),
        (chat_to_chat, {"messages": [HI], "format": "xml"}, "format"),
        (chat_to_chat, {"messages": [HI], "think": "enormous"}, "think"),
        (chat_to_chat, {"messages": [HI], "truncate": False}, "truncate"),
        (chat_to_chat, {"messages": []}, "messages"),
        (chat_to_chat, {"messages": [{"role": "boss", "content": ""}]}, "messages[0].role"),
        (chat_to_chat, {"messages": [{**HI, "new": 1}]}, "messages[0].new"),
        (chat_to_chat, {"messages": [{**HI, "thinking": "t"}]}, "messages[0].thinking"),
        (chat_to_chat, {"messages": [{**HI, "tool_name": "t"}]}, "messages[0].tool_name"),
        (chat_to_chat, {"messages": [{"role": "tool", "content": ""}]}, "messages[0]"),
        (
            chat_to_chat,
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [call("f", {})]},
                    {"role": "tool", "tool_name": "g", "content": ""},
                ]
            },
            "messages[1]",
        ),
        (
            chat_to_chat,
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        (chat_to_chat, {"messages": [HI], "tools": [{"type": "web"}]}, "tools[0].type"),
        (generate_to_chat, {"prompt": "a", "template": "t"}, "template"),
        (generate_to_chat, {"prompt": "a", "context": [1]}, "context"),
        (generate_to_chat, {"prompt": "a", "raw": True, "system": "s"}, "system"),
        (generate_to_chat, {"prompt": "a", "raw": True, "logprobs": True}, "logprobs"),
        (generate_to_chat, {"prompt": "a", "width": 64}, "width"),
        (generate_to_chat, {"prompt": ""}, "prompt"),
        (embed_to_embeddings, {"input": "a", "new": 1}, "new"),
        (embed_to_embeddings, {"input": 5}, "input"),
        (embeddings_to_embeddings, {"input": "a"}, "input"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(
    to: To, request_part: dict[str, Any], param: str
) -> None:
    with pytest.raises(GatewayError) as caught:
        to(fields({"model": "m", **request_part}))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


# ---- there and back


@settings(max_examples=100, deadline=None)
@given(chats)
def test_no_part_of_a_chat_is_lost_on_the_way(request: dict[str, Any]) -> None:
    body = json.loads(chat_to_chat(fields(request)).body_for(request["model"]))
    assert back_to_chat(body) == with_stream_said(request)


@settings(max_examples=60, deadline=None)
@given(generates)
def test_no_part_of_a_prompt_is_lost_on_the_way(request: dict[str, Any]) -> None:
    body = json.loads(generate_to_chat(fields(request)).body_for(request["model"]))
    assert back_to_generate(body) == with_stream_said(request)
