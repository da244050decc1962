"""Any bytes as the JSON body of a request: it is read or refused, a backend gets what an
independent reader of JSON finds in it, and the router goes by what that one finds there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from mindrouter.gateway.dialects.anthropic.forms import FORMS as ANTHROPIC
from mindrouter.gateway.dialects.form import Form
from mindrouter.gateway.dialects.ollama.forms import FORMS as OLLAMA
from mindrouter.gateway.dialects.openai import error_body
from mindrouter.gateway.dialects.responses.forms import FORMS as RESPONSES
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.requests import (
    MOST_TOKENS,
    Asked,
    read_chat,
    read_completion,
    read_embeddings,
)
from mindrouter.gateway.surfaces.reading import choose_model
from mindrouter.gateway.surfaces.table import SURFACES

OTHER = 'another "größer" one'


class Number(NamedTuple):
    """As it is written: 1.0 is not 1."""

    digits: str

    @property
    def value(self) -> float:
        return int(self.digits) if self.digits.lstrip("-").isdigit() else float(self.digits)


class Object(NamedTuple):
    """With whatever is in it twice."""

    pairs: tuple[tuple[str, Any], ...]

    def last(self) -> dict[str, Any]:
        """Of a field given twice the last one counts, and a backend gets that one alone."""
        return dict(self.pairs)


Fields = dict[str, Any]


class Says(NamedTuple):
    stream: bool
    max_tokens: int | None


class Address(NamedTuple):
    name: str
    read: Callable[[bytes, str | None], Asked]
    says: Callable[[Fields], Says]  # what the router is to go by, of what the backend gets
    form: Form | None = None


def nobody(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def independent(body: bytes) -> Object | None:
    """As Python's own reader has it, in strict UTF-8; None where this is no JSON object."""
    try:
        value = json.loads(
            body.decode(),
            object_pairs_hook=lambda pairs: Object(tuple(pairs)),
            parse_float=Number,
            parse_int=Number,
            parse_constant=nobody,
        )
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, Object) else None


# ---- what each address has the router go by


def number(value: Any) -> int | None:
    return min(int(value.value), MOST_TOKENS) if isinstance(value, Number) else None


def of_chat(fields: Fields) -> Says:
    limit = number(fields.get("max_completion_tokens"))
    if limit is None:
        limit = number(fields.get("max_tokens"))
    answers = number(fields.get("n"))
    if limit is not None and answers is not None:
        limit = min(limit * answers, MOST_TOKENS)
    return Says(fields.get("stream") is True, limit)


def of_messages(fields: Fields) -> Says:
    return Says(fields.get("stream") is True, number(fields["max_tokens"]))


def of_responses(fields: Fields) -> Says:
    return Says(fields.get("stream") is True, number(fields.get("max_output_tokens")))


def of_ollama(fields: Fields) -> Says:
    options = fields.get("options")
    limit = number(options.last().get("num_predict")) if options is not None else None
    unlimited = limit is None or options.last()["num_predict"].value < 0
    return Says(fields.get("stream") is not False, None if unlimited else limit)


def of_embeddings(fields: Fields) -> Says:
    return Says(False, 0)


ADDRESSES = [
    Address("/v1/chat/completions", read_chat, of_chat),
    Address("/v1/completions", read_completion, of_chat),
    Address("/v1/embeddings", read_embeddings, of_embeddings),
    *(
        Address(path, form.read, says, form)
        for path, says in {
            "/v1/messages": of_messages,
            "/v1/messages/count_tokens": of_embeddings,
            "/v1/responses": of_responses,
            "/api/chat": of_ollama,
            "/api/generate": of_ollama,
            "/api/embed": of_embeddings,
            "/api/embeddings": of_embeddings,
        }.items()
        for form in [{**ANTHROPIC, **RESPONSES, **OLLAMA}[path]]
    ),
]
#: Where there is no prompt, Ollama is asked to load a model, which the router answers itself.
PROMPTS_THAT_LOAD = {"/api/chat": "messages", "/api/generate": "prompt"}
NO_PROMPT = (None, "", [])
#: Those that make something else than text are looked at only for what they pass on.
SURFACE_READERS = {surface.path: surface.read for surface in SURFACES.values() if surface.read}


# ---- what must hold


def check(data: bytes) -> None:
    came = independent(data)
    for address in ADDRESSES:
        asked = read(address.read, data)
        if asked is not None:
            assert came is not None, f"{address.name}: no JSON, but read as {asked}"
            check_passed_on(address, asked, came.last())
            if address.form is not None:
                check_translated(address.name, address.form, asked, came.last())
    for name, reader in SURFACE_READERS.items():
        asked = read(reader, data)
        if asked is not None:
            assert came is not None, f"{name}: no JSON, but read as {asked}"
            if not asked.model:
                choose_model(asked, ["the only one"])
            for model in (asked.model, OTHER):
                assert sent(asked.body_for(model)) == {**came.last(), "model": model}, name


def read(reader: Callable[[bytes, str | None], Asked], data: bytes) -> Asked | None:
    try:
        return reader(data, None)
    except GatewayError as error:
        check_refusal(error)
        return None


def check_refusal(error: GatewayError) -> None:
    assert (error.status, error.code) == (400, "invalid_request"), error
    error_body(error)  # can be told


def sent(body: bytes) -> Fields:
    """What a backend reads, which is JSON and has no field twice."""
    read_by_it = independent(body)
    assert read_by_it is not None, body
    fields = read_by_it.last()
    assert len(fields) == len(read_by_it.pairs), body
    return fields


def check_passed_on(address: Address, asked: Asked, came: Fields) -> None:
    for model in (asked.model, OTHER):
        fields = sent(asked.body_for(model))
        assert Says(asked.stream, asked.max_tokens) == address.says(fields), (
            f"{asked} from {address.name}: {fields}"
        )
        expected = {**came, "model": model}
        if address.form is None:
            options = (came.get("stream_options") or Object(())).last()
            assert asked.wants_usage == (options.get("include_usage") is True), came
            if asked.stream and not asked.wants_usage:
                expected["stream_options"] = {**options, "include_usage": True}
                fields["stream_options"] = fields["stream_options"].last()
        assert fields == expected, f"{address.name}: {fields} is not {expected}"


def check_translated(name: str, form: Form, asked: Asked, came: Fields) -> None:
    """In OpenAI's form it is asked for the same."""
    needs_no_backend = form.own_answer(asked) is not None
    if (prompt := PROMPTS_THAT_LOAD.get(name)) is not None:
        loads = came.get(prompt) in NO_PROMPT
        if name == "/api/generate":
            loads = loads and came.get("images") is None
        assert needs_no_backend == loads, came
    if needs_no_backend:
        return
    try:
        translated = form.translate(asked.fields)
    except GatewayError as error:
        check_refusal(error)
        return
    msgspec.json.encode(translated.settings)
    fields = sent(translated.body_for(OTHER))
    assert fields["model"] == OTHER
    if "messages" in fields or "prompt" in fields:
        assert of_chat(fields) == Says(asked.stream, asked.max_tokens), f"{asked}: {fields}"
