"""A Responses request as the chat completion request that open engines understand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from mindrouter.gateway.dialects.responses.request import to_chat
from mindrouter.gateway.errors import GatewayError
from tests.gateway.dialects.responses_requests import back_to_responses, requests
from tests.gateway.dialects.wire import fields


def chat_of(**request: Any) -> dict[str, Any]:
    translated = to_chat(fields({"model": "m", "input": "hi", **request}))
    body: dict[str, Any] = json.loads(translated.body_for("served"))
    return body


def messages_of(*items: Any, **request: Any) -> Any:
    return chat_of(input=list(items), **request)["messages"]


def test_the_plainest_request() -> None:
    assert chat_of() == {"model": "served", "messages": [{"role": "user", "content": "hi"}]}


def test_a_stream_asks_for_its_usage() -> None:
    assert chat_of(stream=True)["stream_options"] == {"include_usage": True}


def test_instructions_and_a_developers_message_open_the_conversation_together() -> None:
    user = {"role": "user", "content": "hi"}
    assert messages_of({"role": "developer", "content": "Two."}, user, instructions="One.") == [
        {
            "role": "system",
            "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
        },
        user,
    ]
    assert messages_of(user, {"role": "system", "content": "Now."}) == [
        user,
        {"role": "system", "content": "Now."},
    ]


def test_images_keep_their_detail() -> None:
    content = [
        {"type": "input_text", "text": "what?"},
        {"type": "input_image", "image_url": "data:image/png;base64,iVBO", "detail": "low"},
    ]
    assert messages_of({"role": "user", "content": content}) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what?"},
                {
                    "type": "image_url",
                    "image_url": {"url": "data:image/png;base64,iVBO", "detail": "low"},
                },
            ],
        }
    ]


def test_reasoning_text_and_calls_in_a_row_are_one_message() -> None:
    assert messages_of(
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "Looking.", "annotations": [], "logprobs": []}
            ],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "id": "fc_2", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "2"}],
        },
    ) == [
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "Hm.",
            "reasoning": "Hm.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
    ]


def test_a_new_answer_begins_with_its_text_or_its_reasoning() -> None:
    said = {"role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    roles = [
        (m["role"], m["content"], "tool_calls" in m, m.get("reasoning"))
        for m in messages_of(said, call, said, thought, call)
    ]
    assert roles == [
        ("assistant", "a", True, None),
        ("assistant", "a", False, None),
        ("assistant", None, True, "Hm."),
    ]


def test_a_refusal_in_the_history_is_what_was_said() -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert messages_of(refusal) == [{"role": "assistant", "content": "No."}]


def test_tools_and_choices() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    body = chat_of(tools=[tool], tool_choice={"type": "function", "name": "f"})
    assert body["tools"] == [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object"}, "strict": True},
        }
    ]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert chat_of(tool_choice="required")["tool_choice"] == "required"
    assert chat_of(parallel_tool_calls=False)["parallel_tool_calls"] is False


def test_options() -> None:
    body = chat_of(
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_logprobs=3,
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
    )
    del body["model"], body["messages"]
    assert body == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "logprobs": True,
        "top_logprobs": 3,
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    assert chat_of(include=["message.output_text.logprobs"])["logprobs"] is True


def test_reasoning_effort() -> None:
    assert chat_of(reasoning={"effort": "low"})["reasoning_effort"] == "low"
    assert chat_of(reasoning={"effort": "none"})["chat_template_kwargs"] == {
        "enable_thinking": False,
        "thinking": False,
    }


def test_text_formats() -> None:
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "name": "p", "schema": schema, "strict": True}
    body = chat_of(text={"format": wanted, "verbosity": "low"})
    assert body["verbosity"] == "low"
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "p", "schema": schema, "strict": True},
    }
    plain = chat_of(text={"format": {"type": "text"}})
    assert "response_format" not in plain
    as_object = chat_of(text={"format": {"type": "json_object"}})
    assert as_object["response_format"] == {"type": "json_object"}


def test_hints_that_change_no_answer_are_left_out_and_named() -> None:
    request = {
        "model": "m",
        "input": "hi",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "service_tier": "auto",
    }
    assert to_chat(fields(request)).without == (
        "include: reasoning.encrypted_content",
        "reasoning.summary",
        "service_tier",
    )


def test_the_settings_are_kept_for_the_answer() -> None:
    request = {"model": "m", "input": "hi", "metadata": {"a": "b"}, "temperature": 0.5}
    settings_kept = to_chat(fields(request)).settings
    assert settings_kept["metadata"] == {"a": "b"}
    assert settings_kept["temperature"] == 0.5
    assert settings_kept["parallel_tool_calls"] is True
    assert settings_kept["tool_choice"] == "auto"
    assert settings_kept["store"] is False


@pytest.mark.parametrize(
    ("request_part", "param"),
    [
        ({"new": 1}, "new"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f", "new": 1}]}, "tools[0].new"),
        ({"tool_choice": "never"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
        (
            {
                "input": [
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "output_text", "text": "a", "annotations": [{"type": "x"}]}
                        ],
                    }
                ]
            },
            "input[0].content[0].annotations",
        ),
        ({"input": [{"role": "user", "content": "a", "new": 1}]}, "input[0].new"),
        ({"input": 5}, "input"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(
    request_part: dict[str, Any], param: str
) -> None:
    with pytest.raises(GatewayError) as caught:
        chat_of(**request_part)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


@settings(max_examples=120, deadline=None)
@given(requests)
def test_no_part_of_a_request_is_lost_on_the_way(request: dict[str, Any]) -> None:
    body = json.loads(to_chat(fields(request)).body_for(request["model"]))
    assert back_to_responses(body) == request
