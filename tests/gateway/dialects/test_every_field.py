"""What becomes of every field of the public references: none is lost without a word.

The references are the clients' own packages, which list every field that they can send. Each is
*carried* over into the request that a backend gets, *repeated* in the answer, *named* as left out
because it changes nothing of what is said, or *refused* by its name. A field that a new version of
a package adds makes the last test of its dialect fail.
"""

from __future__ import annotations

import copy
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

import anthropic.types as anthropic
import msgspec
import ollama._types as ollama
import openai.types.responses as openai
import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as AnthropicBeta
from anthropic.types.message_create_params import MessageCreateParamsBase as AnthropicMessage
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from mindrouter.gateway.dialects.anthropic import request as messages
from mindrouter.gateway.dialects.ollama import request as native
from mindrouter.gateway.dialects.responses import request as responses
from mindrouter.gateway.dialects.translation import Translated
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.requests import read_fields

Translate = Callable[[Mapping[str, msgspec.Raw]], Translated]
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
CACHE = {"type": "ephemeral"}
PNG = "iVBORw0KGgo="


def fate(translate: Translate, base: dict[str, Any], path: str, value: Any) -> str:
    """What becomes of the field at a path, beside the same request without it."""
    after = translated(translate, changed(base, path, value))
    if isinstance(after, GatewayError):
        assert after.param is not None
        assert after.param.startswith(path) or path.startswith(after.param), after.param
        return "refused"
    before = translated(translate, without(base, path))
    if isinstance(before, GatewayError):
        return "carried"  # it is required
    if (after.path, after.body_for("m")) != (before.path, before.body_for("m")):
        return "carried"
    if after.without != before.without:
        (named,) = set(after.without) - set(before.without)
        assert named in (path, path.rpartition(".")[2])
        return "named"
    return "repeated" if after.settings != before.settings else "lost"


def translated(translate: Translate, request: dict[str, Any]) -> Translated | GatewayError:
    try:
        return translate(read_fields(json.dumps(request).encode()))
    except GatewayError as error:
        return error


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    request = copy.deepcopy(base)
    holder, last = _holder(request, path)
    holder[last] = value
    return request


def without(base: dict[str, Any], path: str) -> dict[str, Any]:
    request = copy.deepcopy(base)
    holder, last = _holder(request, path)
    holder.pop(last, None)
    return request


def _holder(request: Any, path: str) -> tuple[Any, str]:
    *steps, last = re.findall(r"\w+", path)
    for step in steps:
        request = request[int(step)] if step.isdigit() else request[step]
    return request, last


def missing(fates: Mapping[str, Any], kinds: Mapping[str, Any]) -> list[str]:
    """The fields of the reference's types, by where they stand, that no fate is told of."""
    wanted = [
        f"{where}.{name}".lstrip(".")
        for where, kind in kinds.items()
        for name in getattr(kind, "model_fields", None) or typing.get_type_hints(kind)
        if name != "type"
    ]
    return sorted(set(wanted) - set(fates))


# ---- Anthropic

ANTHROPIC: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "messages": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "r"},
                {"type": "image", "source": {"type": "url", "url": "u"}},
                {"type": "image", "source": {"type": "base64", "media_type": "m", "data": "d"}},
            ],
        },
    ],
    "system": [{"type": "text", "text": "s"}],
    "tools": [{"name": "f", "input_schema": {}}],
    "tool_choice": {"type": "auto"},
    "metadata": {},
    "output_config": {},
    "thinking": {"type": "enabled"},
    "context_management": {},
}
_SAID, _ASKED = "messages[1].content", "messages[2].content"
ANTHROPIC_FATES: dict[str, tuple[Any, str]] = {
    "model": ("n", "carried"),
    "max_tokens": (6, "carried"),
    "messages": ([{"role": "user", "content": "b"}], "carried"),
    "system": ("b", "carried"),
    "stop_sequences": (["x"], "carried"),
    "temperature": (0.5, "carried"),
    "top_p": (0.5, "carried"),
    "top_k": (5, "carried"),
    "stream": (True, "carried"),
    "tools": ([{"name": "g", "input_schema": {}}], "carried"),
    "tool_choice": ({"type": "any"}, "carried"),
    "thinking": ({"type": "disabled"}, "carried"),
    "metadata": ({"user_id": "u"}, "carried"),
    "output_config": ({"effort": "low"}, "carried"),
    "output_format": ({"type": "json_schema", "schema": SCHEMA}, "carried"),
    "cache_control": (CACHE, "named"),
    "service_tier": ("auto", "named"),
    "context_management": ({"edits": [{"type": "clear_tool_uses_20250919"}]}, "refused"),
    **{
        name: (value, "refused")
        for name, value in {
            "access_programs": ["x"],
            "betas": ["x"],
            "billing_policy": "x",
            "compaction": {"x": 1},
            "container": "x",
            "diagnostics": {"x": 1},
            "fallback_credit_token": "x",
            "fallbacks": ["x"],
            "inference_geo": "us",
            "mcp_servers": [{"type": "url", "url": "u", "name": "n"}],
            "speed": "fast",
            "thread": {"x": 1},
            "user_profile_id": "x",
            "workspace_id": "x",
        }.items()
    },
    "tools[0].name": ("g", "carried"),
    "tools[0].input_schema": (SCHEMA, "carried"),
    "tools[0].description": ("d", "carried"),
    "tools[0].strict": (True, "carried"),
    "tools[0].cache_control": (CACHE, "named"),
    "tools[0].eager_input_streaming": (True, "named"),
    "tools[0].allowed_callers": (["direct"], "refused"),
    "tools[0].defer_loading": (True, "refused"),
    "tools[0].input_examples": ([{}], "refused"),
    "tool_choice.name": ("f", "refused"),
    "tool_choice.disable_parallel_tool_use": (True, "carried"),
    "metadata.user_id": ("u", "carried"),
    "output_config.effort": ("low", "carried"),
    "output_config.format": ({"type": "json_schema", "schema": SCHEMA}, "carried"),
    "output_config.task_budget": ({"type": "tokens", "total": 20000}, "refused"),
    "thinking.budget_tokens": (1024, "carried"),
    "thinking.display": ("omitted", "named"),
    f"{_SAID}[0].thinking": ("u", "carried"),
    f"{_SAID}[0].signature": ("s", "named"),
    f"{_SAID}[1].text": ("b", "carried"),
    f"{_SAID}[1].cache_control": (CACHE, "named"),
    f"{_SAID}[1].citations": ([{"type": "char_location"}], "refused"),
    f"{_SAID}[2].id": ("d", "carried"),
    f"{_SAID}[2].name": ("g", "carried"),
    f"{_SAID}[2].input": ({"x": 1}, "carried"),
    f"{_SAID}[2].cache_control": (CACHE, "named"),
    f"{_SAID}[2].caller": ({"type": "code_execution_20250825", "tool_id": "x"}, "refused"),
    f"{_SAID}[2].toolset_name": ("x", "refused"),
    f"{_ASKED}[0].tool_use_id": ("d", "carried"),
    f"{_ASKED}[0].content": ("s", "carried"),
    f"{_ASKED}[0].is_error": (True, "carried"),
    f"{_ASKED}[0].cache_control": (CACHE, "named"),
    f"{_ASKED}[0].toolset_name": ("x", "refused"),
    f"{_ASKED}[1].source": ({"type": "url", "url": "v"}, "carried"),
    f"{_ASKED}[1].cache_control": (CACHE, "named"),
    f"{_ASKED}[1].transformations": ([{}], "refused"),
    f"{_ASKED}[1].source.url": ("v", "carried"),
    f"{_ASKED}[2].source.media_type": ("image/png", "carried"),
    f"{_ASKED}[2].source.data": ("e", "carried"),
}
ANTHROPIC_KINDS = {
    "": AnthropicMessage,
    "tools[0]": anthropic.ToolParam,
    "tool_choice": anthropic.ToolChoiceToolParam,
    "metadata": anthropic.MetadataParam,
    "output_config": anthropic.OutputConfigParam,
    "thinking": anthropic.ThinkingConfigEnabledParam,
    f"{_SAID}[0]": anthropic.ThinkingBlockParam,
    f"{_SAID}[1]": anthropic.TextBlockParam,
    f"{_SAID}[2]": anthropic.ToolUseBlockParam,
    f"{_ASKED}[0]": anthropic.ToolResultBlockParam,
    f"{_ASKED}[1]": anthropic.ImageBlockParam,
    f"{_ASKED}[1].source": anthropic.URLImageSourceParam,
    f"{_ASKED}[2].source": anthropic.Base64ImageSourceParam,
}


@pytest.mark.parametrize("path", ANTHROPIC_FATES)
def test_each_field_of_anthropics_has_its_fate(path: str) -> None:
    value, expected = ANTHROPIC_FATES[path]
    assert fate(messages.to_chat, ANTHROPIC, path, value) == expected


def test_no_field_that_anthropics_package_knows_is_without_a_fate() -> None:
    assert missing(ANTHROPIC_FATES, ANTHROPIC_KINDS) == []
    assert missing(ANTHROPIC_FATES, {"": AnthropicBeta}) == []


# ---- Responses

RESPONSES: dict[str, Any] = {
    "model": "m",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "u", "detail": "auto"}]},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": False}],
    "reasoning": {},
    "text": {},
}
RESPONSES_FATES: dict[str, tuple[Any, str]] = {
    "model": ("n", "carried"),
    "input": ("a", "carried"),
    "instructions": ("i", "carried"),
    "stream": (True, "carried"),
    "max_output_tokens": (5, "carried"),
    "temperature": (0.5, "carried"),
    "top_p": (0.5, "carried"),
    "top_logprobs": (2, "carried"),
    "include": (["message.output_text.logprobs"], "carried"),
    "tools": ([{"type": "function", "name": "g"}], "carried"),
    "tool_choice": ("required", "carried"),
    "parallel_tool_calls": (False, "carried"),
    "reasoning": ({"effort": "low"}, "carried"),
    "text": ({"verbosity": "low"}, "carried"),
    "user": ("u", "carried"),
    "safety_identifier": ("u", "carried"),
    "prompt_cache_key": ("k", "carried"),
    "metadata": ({"a": "b"}, "repeated"),
    "prompt_cache_options": ({"x": 1}, "named"),
    "prompt_cache_retention": ("24h", "named"),
    "service_tier": ("flex", "named"),
    "max_tool_calls": (3, "named"),
    "stream_options": ({"include_obfuscation": True}, "named"),
    **{
        name: (value, "refused")
        for name, value in {
            "access_programs": ["x"],
            "background": True,
            "background_options": {"x": 1},
            "context_management": [{"type": "compaction"}],
            "conversation": "c",
            "image": {"x": 1},
            "moderation": {"x": 1},
            "previous_response_id": "r",
            "prompt": {"id": "p"},
            "store": True,
            "truncation": "auto",
        }.items()
    },
    "tools[0].name": ("g", "carried"),
    "tools[0].parameters": (SCHEMA, "carried"),
    "tools[0].strict": (True, "carried"),
    "tools[0].description": ("d", "carried"),
    "tools[0].allowed_callers": (["direct"], "refused"),
    "tools[0].async": (True, "refused"),
    "tools[0].defer_loading": (True, "refused"),
    "tools[0].output_schema": (SCHEMA, "refused"),
    "reasoning.effort": ("low", "carried"),
    "reasoning.summary": ("auto", "named"),
    "reasoning.generate_summary": ("auto", "named"),
    "reasoning.context": ("all_turns", "refused"),
    "reasoning.mode": ("x", "refused"),
    "text.verbosity": ("low", "carried"),
    "text.format": ({"type": "json_object"}, "carried"),
}
RESPONSES_KINDS = {
    "": ResponseCreateParamsBase,
    "tools[0]": openai.FunctionToolParam,
    "text": openai.ResponseTextConfigParam,
}


@pytest.mark.parametrize("path", RESPONSES_FATES)
def test_each_field_of_responses_has_its_fate(path: str) -> None:
    value, expected = RESPONSES_FATES[path]
    assert fate(responses.to_chat, RESPONSES, path, value) == expected


def test_no_field_that_openais_package_knows_is_without_a_fate() -> None:
    from openai.types.shared_params import Reasoning

    assert missing(RESPONSES_FATES, RESPONSES_KINDS | {"reasoning": Reasoning}) == []


# ---- Ollama

OLLAMA_CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [{"function": {"name": n}} for n in ("f", "g")]},
        {"role": "tool", "content": "o"},
        {"role": "user", "content": "a"},
    ],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "options": {},
}
_OPTIONS: dict[str, tuple[Any, str]] = {
    **{
        name: (value, "carried")
        for name, value in {
            "num_predict": 5,
            "seed": 1,
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.5,
            "min_p": 0.5,
            "stop": ["x"],
            "repeat_penalty": 1.5,
            "presence_penalty": 1.5,
            "frequency_penalty": 1.5,
        }.items()
    },
    **{
        name: (value, "named")
        for name, value in {
            "num_ctx": 4096,
            "num_batch": 5,
            "num_gpu": 1,
            "main_gpu": 1,
            "num_thread": 2,
            "num_keep": 5,
            "mirostat_tau": 0.5,
            "mirostat_eta": 0.5,
        }.items()
    },
    **dict.fromkeys(
        (
            *("numa", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock"),
            "embedding_only",
        ),
        (True, "named"),
    ),
    **{
        name: (value, "refused")
        for name, value in {
            "tfs_z": 0.5,
            "typical_p": 0.5,
            "repeat_last_n": 5,
            "mirostat": 1,
            "penalize_newline": True,
        }.items()
    },
}
_EITHER: dict[str, tuple[Any, str]] = {
    "model": ("n", "carried"),
    "stream": (False, "carried"),
    "format": ("json", "carried"),
    "think": (True, "carried"),
    "logprobs": (True, "carried"),
    "top_logprobs": (2, "carried"),
    "keep_alive": ("5m", "named"),
    "truncate": (True, "refused"),
    "shift": (True, "refused"),
    "options": ({"seed": 1}, "carried"),
    **{f"options.{name}": told for name, told in _OPTIONS.items()},
}
OLLAMA_CHAT_FATES: dict[str, tuple[Any, str]] = {
    **_EITHER,
    "messages": ([{"role": "user", "content": "b"}], "carried"),
    "tools": ([{"type": "function", "function": {"name": "g"}}], "carried"),
    "tools[0].function": ({"name": "g", "parameters": SCHEMA}, "carried"),
    "messages[0].role": ("system", "carried"),
    "messages[0].content": ("b", "carried"),
    "messages[0].images": ([PNG], "carried"),
    "messages[1].thinking": ("t", "carried"),
    "messages[1].tool_calls": ([{"function": {"name": "g"}}], "carried"),
    "messages[2].tool_name": ("g", "carried"),
}
OLLAMA_GENERATE: dict[str, Any] = {"model": "m", "prompt": "a", "options": {}}
OLLAMA_GENERATE_FATES: dict[str, tuple[Any, str]] = {
    **_EITHER,
    "prompt": ("b", "carried"),
    "suffix": ("s", "carried"),
    "system": ("s", "carried"),
    "images": ([PNG], "carried"),
    "raw": (True, "carried"),
    "template": ("t", "refused"),
    "context": ([1], "refused"),
    "width": (64, "refused"),
    "height": (64, "refused"),
    "steps": (4, "refused"),
}
OLLAMA_EMBED: dict[str, Any] = {"model": "m", "input": "a"}
OLLAMA_EMBED_FATES: dict[str, tuple[Any, str]] = {
    "model": ("n", "carried"),
    "input": (["b"], "carried"),
    "truncate": (False, "carried"),
    "dimensions": (64, "carried"),
    "options": ({"num_ctx": 512}, "named"),
    "keep_alive": (0, "named"),
}
OLLAMA_EMBEDDINGS: dict[str, Any] = {"model": "m", "prompt": "a"}
OLLAMA_EMBEDDINGS_FATES: dict[str, tuple[Any, str]] = {
    "model": ("n", "carried"),
    "prompt": ("b", "carried"),
    "options": ({"num_ctx": 512}, "named"),
    "keep_alive": (0, "named"),
}
OLLAMA: dict[str, tuple[Translate, dict[str, Any], dict[str, tuple[Any, str]]]] = {
    "chat": (native.chat_to_chat, OLLAMA_CHAT, OLLAMA_CHAT_FATES),
    "generate": (native.generate_to_chat, OLLAMA_GENERATE, OLLAMA_GENERATE_FATES),
    "embed": (native.embed_to_embeddings, OLLAMA_EMBED, OLLAMA_EMBED_FATES),
    "embeddings": (
        native.embeddings_to_embeddings,
        OLLAMA_EMBEDDINGS,
        OLLAMA_EMBEDDINGS_FATES,
    ),
}


@pytest.mark.parametrize(
    ("address", "path"), [(address, path) for address in OLLAMA for path in OLLAMA[address][2]]
)
def test_each_field_of_ollamas_has_its_fate(address: str, path: str) -> None:
    translate, base, fates = OLLAMA[address]
    value, expected = fates[path]
    assert fate(translate, base, path, value) == expected


def test_no_field_that_ollamas_package_knows_is_without_a_fate() -> None:
    chat = {"": ollama.ChatRequest, "options": ollama.Options, "tools[0]": ollama.Tool}
    assert missing(OLLAMA_CHAT_FATES, chat) == []
    generate = {"": ollama.GenerateRequest, "options": ollama.Options}
    assert missing(OLLAMA_GENERATE_FATES, generate) == []
    assert missing(OLLAMA_EMBED_FATES, {"": ollama.EmbedRequest}) == []
    assert missing(OLLAMA_EMBEDDINGS_FATES, {"": ollama.EmbeddingsRequest}) == []
    told = {path.rpartition(".")[2] for path in OLLAMA_CHAT_FATES if path.startswith("messages[")}
    assert set(ollama.Message.model_fields) <= told


@pytest.mark.parametrize("translate", [messages.to_chat, responses.to_chat, native.chat_to_chat])
def test_a_field_that_nobody_knows_is_refused_by_its_name(translate: Translate) -> None:
    base = {messages.to_chat: ANTHROPIC, responses.to_chat: RESPONSES}.get(translate, OLLAMA_CHAT)
    assert fate(translate, base, "brand_new", 1) == "refused"
