"""A Messages request as the chat completion request that open engines understand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from mindrouter.gateway.dialects.anthropic.request import to_chat
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.requests import read_fields
from tests.gateway.dialects.anthropic_requests import back_to_messages, requests
from tests.gateway.dialects.wire import fields

HI = {"role": "user", "content": "hi"}


def chat_of(**request: Any) -> dict[str, Any]:
    wanted = {"model": "m", "max_tokens": 5, "messages": [HI], **request}
    body: dict[str, Any] = json.loads(to_chat(fields(wanted)).body_for("served"))
    return body


def messages_of(*messages: Any) -> Any:
    return chat_of(messages=list(messages))["messages"]


def refused(**request: Any) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        chat_of(**request)
    assert caught.value.status == 400
    return caught.value


def test_the_plainest_request_becomes_the_plainest_chat() -> None:
    assert chat_of() == {"model": "served", "messages": [HI], "max_tokens": 5}


def test_a_stream_asks_for_its_usage() -> None:
    body = chat_of(stream=True)
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}


def test_the_system_prompt_becomes_the_first_message() -> None:
    assert chat_of(system="Be brief.")["messages"] == [
        {"role": "system", "content": "Be brief."},
        HI,
    ]


def test_a_system_prompt_in_blocks_keeps_its_blocks() -> None:
    blocks = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    assert chat_of(system=blocks)["messages"][0] == {"role": "system", "content": blocks}


def test_a_system_message_within_the_conversation_stays_where_it_is() -> None:
    assert messages_of(HI, {"role": "system", "content": [{"type": "text", "text": "now"}]}) == [
        HI,
        {"role": "system", "content": "now"},
    ]


def test_images_become_urls() -> None:
    content = [
        {"type": "text", "text": "what?"},
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
        },
        {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
    ]
    assert messages_of({"role": "user", "content": content}) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what?"},
                {
                    "type": "image_url",
                    "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="},
                },
                {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
            ],
        }
    ]


def test_parallel_tool_calls_and_their_results_become_messages_of_their_own() -> None:
    assert messages_of(
        HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Two cities.", "signature": "x"},
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Paris"}},
                {"type": "tool_use", "id": "b", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "12°"},
                {
                    "type": "tool_result",
                    "tool_use_id": "b",
                    "content": [{"type": "text", "text": "no city"}],
                    "is_error": True,
                },
                {"type": "text", "text": "And?"},
            ],
        },
    )[1:] == [
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "Two cities.",
            "reasoning": "Two cities.",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
                },
                {
                    "id": "b",
                    "type": "function",
                    "function": {"name": "weather", "arguments": "{}"},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "12°"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no city"},
        {"role": "user", "content": "And?"},
    ]


def test_a_tool_call_without_text_has_no_content() -> None:
    content = [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]
    assert messages_of(HI, {"role": "assistant", "content": content})[1]["content"] is None


def test_a_result_may_be_an_image() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "u"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image], "is_error": True}
    assert messages_of({"role": "user", "content": [result]}) == [
        {
            "role": "tool",
            "tool_call_id": "a",
            "content": [
                {"type": "text", "text": "Error: "},
                {"type": "image_url", "image_url": {"url": "u"}},
            ],
        }
    ]


def test_a_conversation_that_ends_with_the_assistant_is_gone_on_with() -> None:
    body = chat_of(messages=[HI, {"role": "assistant", "content": "The answer is"}])
    assert body["continue_final_message"] is True
    assert body["add_generation_prompt"] is False
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    called = chat_of(messages=[HI, {"role": "assistant", "content": [call]}])
    assert "continue_final_message" not in called


def test_tools_keep_their_schemas_to_the_digit() -> None:
    schema = '{"type":"object","properties":{"x":{"minimum":0.10}}}'
    written = (
        '{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"hi"}],'
        '"tools":[{"name":"f","description":"d","input_schema":' + schema + "}]}"
    )
    body = to_chat(read_fields(written.encode())).body_for("m")
    assert (
        b'"tools":[{"type":"function","function":{"name":"f","parameters":'
        + schema.encode()
        + b',"description":"d"}}]'
    ) in body


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "f"},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
    ],
)
def test_tool_choices(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    body = chat_of(tools=[{"name": "f", "input_schema": {"type": "object"}}], tool_choice=choice)
    assert {name: body[name] for name in expected} == expected


def test_sampling_options_and_the_end_user() -> None:
    body = chat_of(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_sequences=["END", "STOP"],
        metadata={"user_id": "u-1"},
    )
    assert body["temperature"] == 0.5
    assert body["top_p"] == 0.9
    assert body["top_k"] == 40
    assert body["stop"] == ["END", "STOP"]
    assert body["user"] == "u-1"


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (
            {"type": "enabled", "budget_tokens": 2048},
            {"enable_thinking": True, "thinking": True, "thinking_budget": 2048},
        ),
        ({"type": "adaptive"}, {"enable_thinking": True, "thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}),
    ],
)
def test_thinking_is_switched_in_the_chat_template(
    thinking: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert chat_of(thinking=thinking)["chat_template_kwargs"] == expected


def test_efforts_beyond_what_open_models_know_are_the_highest_they_do() -> None:
    assert chat_of(output_config={"effort": "low"})["reasoning_effort"] == "low"
    assert chat_of(output_config={"effort": "max"})["reasoning_effort"] == "high"


def test_a_json_schema_for_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "schema": schema}
    expected = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }
    assert chat_of(output_config={"format": wanted})["response_format"] == expected
    assert chat_of(output_format=wanted)["response_format"] == expected


def test_hints_that_change_no_answer_are_left_out_and_named() -> None:
    cached = {"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}
    translated = to_chat(
        fields(
            {
                "model": "m",
                "max_tokens": 1,
                "messages": [{"role": "user", "content": [cached]}],
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "service_tier": "auto",
                "output_config": {"effort": "xhigh"},
            }
        )
    )
    assert translated.without == (
        "cache_control",
        "output_config.effort",
        "service_tier",
        "thinking.budget_tokens",
    )
    assert b"cache_control" not in translated.body_for("m")


def test_keeping_all_thinking_asks_for_nothing() -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    assert "context_management" not in chat_of(context_management={"edits": edits})


@pytest.mark.parametrize(
    ("request_part", "param"),
    [
        ({"container": "c1"}, "container"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"metadata": {"user_id": "u", "team": "t"}}, "metadata.team"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "w", "max_uses": 1}]},
            "tools[0].type",
        ),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
        (
            {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]},
            "tools[0].defer_loading",
        ),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        (
            {
                "context_management": {
                    "edits": [{"type": "clear_tool_uses_20250919", "keep": "all"}]
                }
            },
            "context_management.edits[0].type",
        ),
        (
            {"system": [{"type": "image", "source": {"type": "url", "url": "u"}}]},
            "system[0].type",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(
    request_part: dict[str, Any], param: str
) -> None:
    error = refused(**request_part)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "document", "source": {}}]}, "[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "new": 1}]}, "[0].new"),
        (
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}],
            },
            "[0].source.type",
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "first"},
                    {"type": "tool_result", "tool_use_id": "a"},
                ],
            },
            "[1]",
        ),
        (
            {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
            "[0].type",
        ),
        (
            {"role": "user", "content": [{"type": "thinking", "thinking": "t"}]},
            "[0].type",
        ),
        (
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "x"}],
            },
            "[0].input",
        ),
        (
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
            "[0].type",
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a", "citations": [{"type": "x"}]}],
            },
            "[0].citations",
        ),
    ],
)
def test_a_block_that_cannot_be_expressed_is_refused_by_its_path(
    message: dict[str, Any], param: str
) -> None:
    assert refused(messages=[message]).param == "messages[0].content" + param


def test_a_system_message_of_anything_but_text_is_refused() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "u"}}
    message = {"role": "system", "content": [image]}
    assert refused(messages=[HI, message]).param == "messages[1].content[0].type"


@settings(max_examples=120, deadline=None)
@given(requests)
def test_no_part_of_a_request_is_lost_on_the_way(request: dict[str, Any]) -> None:
    body = json.loads(to_chat(fields(request)).body_for(request["model"]))
    assert back_to_messages(body) == request
