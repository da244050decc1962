"""A request's body → the few fields that scheduling needs; the rest is passed on untouched.

The body is decoded one level deep: each top-level value stays the bytes it came as, so whatever
the client sent reaches the backend as it was, down to the digits of its numbers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import msgspec

from mindrouter.gateway.errors import GatewayError
from scheduler.core.jobs import Needs

#: Below this many estimated tokens a warm cache saves next to nothing (P3).
AFFINITY_MIN_TOKENS = 1024
#: How much of each end of a text goes into a digest: to read all of 400 KB took a third of what
#: their request cost.
OPENING_BYTES = 4096
#: What an image or another medium is taken to cost, since its bytes say nothing about it.
MEDIA_TOKENS = 765
#: Role, separators and the like that a chat template adds to each message.
TOKENS_PER_MESSAGE = 4
MAX_MODEL_NAME = 300
#: Limits beyond this say no more than this.
MOST_TOKENS = 1_000_000_000

_IMAGE_TYPES = frozenset({"image_url", "input_image", "image"})
_BRACKET, _QUOTE = b'["'
_TEXT_OR_NULL = b'"n'
_T = TypeVar("_T")
#: The texts that a prompt begins with.
Opening = Iterable[msgspec.Raw | memoryview]
_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])
_options = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


class _Message(msgspec.Struct):
    role: str
    content: msgspec.Raw = msgspec.Raw(b"null")


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _ResponseFormat(msgspec.Struct):
    type: str


class _Request(msgspec.Struct):
    """The fields of OpenAI's forms that the router looks at. Null is as good as absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    prompt_cache_key: str | None = None
    max_completion_tokens: int | float | None = None
    max_tokens: int | float | None = None
    n: int | float | None = None
    response_format: _ResponseFormat | None = None


class _Chat(_Request):
    messages: list[_Message] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: msgspec.Raw = msgspec.Raw(b"null")


_EXPECTED = {
    "model": "a text",
    "stream": "true or false",
    "stream_options": "an object",
    "prompt_cache_key": "a text",
    "max_completion_tokens": "a whole number",
    "max_tokens": "a whole number",
    "n": "a whole number",
    "response_format": "an object with a 'type'",
    "messages": "a list of messages",
    "tools": "a list of tools",
}
_FIELD_OF_ERROR = re.compile(r"at `\$\.(\w+)")
_NO_TOOLS = msgspec.Raw(b'"none"')
_PLAIN = Needs()
_request = msgspec.json.Decoder(_Request).decode
_chat = msgspec.json.Decoder(_Chat).decode
_number: Callable[[Any], int | float | None] = msgspec.json.Decoder(int | float | None).decode
_parts = msgspec.json.Decoder(list[_Part])


@dataclass(slots=True)
class Asked:
    """What the router reads of a request. Token counts are estimates."""

    model: str
    stream: bool
    wants_usage: bool
    needs: Needs
    prompt_tokens: int
    max_tokens: int | None
    cache_key: str | None
    fields: dict[str, msgspec.Raw] = field(repr=False)
    context_tokens: int | None = None  # as in ``Job``

    def body_for(self, model_name: str) -> bytes:
        """The client's body for a backend that calls the model ``model_name``.

        Only ``model`` and, in a stream, ``stream_options.include_usage`` differ from what came.
        """
        fields = self.fields
        if model_name != self.model:
            fields = {**fields, "model": msgspec.Raw(msgspec.json.encode(model_name))}
        if self.stream and not self.wants_usage:
            options = fields.get("stream_options")
            kept = _options.decode(options) if options is not None else None
            asked = {**(kept or {}), "include_usage": True}
            fields = {**fields, "stream_options": msgspec.Raw(msgspec.json.encode(asked))}
        return msgspec.json.encode(fields)


def estimate_tokens(text_bytes: int) -> int:
    """Tokens in so many bytes of text: four bytes to a token, the usual rule of thumb for
    English prose; the backend's own count replaces it as soon as it is known."""
    return (text_bytes + 3) // 4


def read_chat(body: bytes, header_cache_key: str | None) -> Asked:
    """``/v1/chat/completions``. Raises: GatewayError."""
    fields = read_fields(body)
    chat = _typed(_chat, body)
    messages = chat.messages
    if not messages:
        lacks = "missing" if messages is None else "empty"
        raise GatewayError("invalid_request", f"'messages' is {lacks}.", param="messages")
    tokens, vision = _weigh_messages(messages)
    tools = bool(chat.tools) and chat.tool_choice != _NO_TOOLS
    if tools:
        tokens += estimate_tokens(len(memoryview(fields["tools"])))
    needs = _PLAIN
    if vision or tools or chat.response_format is not None:
        needs = Needs(vision=vision, tools=tools, json=_wants_json(chat))
    return _asked(chat, fields, needs, tokens, header_cache_key, lambda: _opening(messages))


def read_completion(body: bytes, header_cache_key: str | None) -> Asked:
    """``/v1/completions``. Raises: GatewayError."""
    fields = read_fields(body)
    request = _typed(_request, body)
    tokens = weigh_input(fields, "prompt")
    needs = Needs(json=_wants_json(request))
    return _asked(
        request, fields, needs, tokens, header_cache_key, lambda: beginnings([fields["prompt"]])
    )


def read_embeddings(body: bytes, header_cache_key: str | None) -> Asked:
    """``/v1/embeddings``. Never streams. Raises: GatewayError."""
    fields = read_fields(body)
    request = _typed(_request, body)
    tokens, longest = weigh_inputs(fields, "input")
    needs = Needs(embeddings=True)
    asked = _asked(request, fields, needs, tokens, header_cache_key, None)
    asked.stream = False
    asked.max_tokens = 0
    asked.context_tokens = longest
    return asked


def _typed(decode: Callable[[bytes], _T], body: bytes) -> _T:
    """All the fields at once. Raises: GatewayError, which names the one that is wrong."""
    try:
        return decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        found = _FIELD_OF_ERROR.search(str(error))
        param = found[1] if found else None
        expected = _EXPECTED.get(param or "", "what the API says")
        raise GatewayError(
            "invalid_request", f"'{param}' must be {expected}: {error}.", param=param
        ) from None


# ---- one field each


def read_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The body's top-level values, each as it came. Raises: GatewayError."""
    try:
        if not body.isascii():
            str(body, "utf-8")
        return _top_level.decode(body)
    except msgspec.ValidationError as error:
        message = f"The body must be a JSON object: {error}."
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"The body is not valid JSON: {error}."
    except RecursionError:
        message = "The body is nested too deeply."
    raise GatewayError("invalid_request", message)


def decode_field(decode: Callable[[Any], _T], raw: msgspec.Raw, param: str, expected: str) -> _T:
    """One value, decoded. Raises: GatewayError, which names ``param``."""
    try:
        return decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise GatewayError(
            "invalid_request", f"'{param}' must be {expected}: {error}.", param=param
        ) from None


def typed_field(fields: dict[str, msgspec.Raw], name: str, kind: Any, expected: str) -> Any:
    """The value of ``name``, or None where it is absent or null."""
    if name not in fields:
        return None
    raw = fields[name]
    return decode_field(_decoder(kind), raw, name, expected)


@cache
def _decoder(kind: Any) -> Callable[[Any], Any]:
    """Made once for each kind: that costs more than to decode a field."""
    return msgspec.json.Decoder(kind | None).decode


def _asked(
    request: _Request,
    fields: dict[str, msgspec.Raw],
    needs: Needs,
    prompt_tokens: int,
    header_cache_key: str | None,
    opening: Callable[[], Opening] | None,
) -> Asked:
    options = request.stream_options
    cache_key = header_cache_key or request.prompt_cache_key
    return Asked(
        model=_checked_model(request.model),
        stream=bool(request.stream),
        wants_usage=options is not None and bool(options.include_usage),
        needs=needs,
        prompt_tokens=max(1, prompt_tokens),
        max_tokens=_max_tokens(request),
        cache_key=cache_key or cache_key_of(opening, prompt_tokens),
        fields=fields,
    )


def cache_key_of(opening: Callable[[], Opening] | None, prompt_tokens: int) -> str | None:
    """A digest of how the prompt begins, for prompts that are worth it (P3).

    Of a long text it takes both ends and the length: prompts that differ only in between share a
    home, as they share the cache of all that comes before."""
    if opening is None or prompt_tokens < AFFINITY_MIN_TOKENS:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for text in opening():
        view = memoryview(text)
        digest.update(b"%d\0" % len(view))
        digest.update(view[:OPENING_BYTES])
        digest.update(view[OPENING_BYTES:][-OPENING_BYTES:])
    return digest.hexdigest()


def beginnings(texts: Iterable[msgspec.Raw]) -> Opening:
    """For prompts that grow at their end, as a conversation within one text does."""
    return [memoryview(text)[:OPENING_BYTES] for text in texts]


def read_model(fields: dict[str, msgspec.Raw]) -> str:
    """The model's name as the client wrote it. Raises: GatewayError."""
    return _checked_model(typed_field(fields, "model", str, "a text"))


def _checked_model(model: str | None) -> str:
    if not model:
        raise GatewayError("invalid_request", "'model' is missing.", param="model")
    if len(model) > MAX_MODEL_NAME:
        raise GatewayError("invalid_request", "'model' is too long.", param="model")
    return model


def _max_tokens(request: _Request) -> int | None:
    """The client's limit on all answers together: ``n`` of them may be asked for."""
    name, limit = "max_completion_tokens", request.max_completion_tokens
    if request.max_tokens is not None:
        other = _whole("max_tokens", request.max_tokens, 0)
        if limit is None:
            name, limit = "max_tokens", other
    answers = 1 if request.n is None else _whole("n", request.n, 1)
    return None if limit is None else min(_whole(name, limit, 0) * answers, MOST_TOKENS)


def read_count(fields: dict[str, msgspec.Raw], name: str, least: int) -> int | None:
    """A whole number, which some clients write as 16.0."""
    raw = fields.get(name)
    if raw is None:
        return None
    value = decode_field(_number, raw, name, "a whole number")
    return None if value is None else _whole(name, value, least)


def _whole(name: str, value: float, least: int) -> int:
    if value != int(value):
        raise GatewayError("invalid_request", f"'{name}' must be a whole number.", param=name)
    if value < least:
        raise GatewayError("invalid_request", f"'{name}' must be at least {least}.", param=name)
    return min(int(value), MOST_TOKENS)


def _wants_json(request: _Request) -> bool:
    wanted = request.response_format
    return wanted is not None and wanted.type in ("json_object", "json_schema")


# ---- weighing


def _weigh_messages(messages: list[_Message]) -> tuple[int, bool]:
    """(estimated prompt tokens, whether there are images in it)."""
    text_bytes = media = 0
    vision = False
    for message in messages:
        content = memoryview(message.content)
        if content[0] in _TEXT_OR_NULL:
            text_bytes += len(content)
            continue
        if content[0] != _BRACKET:
            raise GatewayError(
                "invalid_request",
                "The 'content' in 'messages' must be a text or a list of parts.",
                param="messages",
            )
        parts = decode_field(
            _parts.decode, message.content, "messages", "well-formed content parts"
        )
        for part in parts:
            if part.text is not None:
                text_bytes += len(part.text.encode())
            else:
                media += 1
            vision = vision or part.type in _IMAGE_TYPES
    tokens = estimate_tokens(text_bytes) + TOKENS_PER_MESSAGE * len(messages)
    return tokens + MEDIA_TOKENS * media, vision


_TOKEN_LIST = re.compile(rb"\[\s*(?:\[\s*)?-?\d")


def weigh_input(fields: dict[str, msgspec.Raw], name: str) -> int:
    """Estimated tokens of a prompt or of embedding inputs: a text, texts, or token numbers."""
    return weigh_inputs(fields, name)[0]


def weigh_inputs(fields: dict[str, msgspec.Raw], name: str) -> tuple[int, int]:
    """The same, of all together and of the longest."""
    raw = fields.get(name)
    if raw is None or bytes(memoryview(raw)[:4]) == b"null":
        raise GatewayError("invalid_request", f"'{name}' is missing.", param=name)
    view = memoryview(raw)
    if view[0] == _QUOTE:
        tokens = estimate_tokens(len(view) - 2)
        return tokens, tokens
    if _TOKEN_LIST.match(view):
        rows = decode_field(_number_rows, raw, name, "a text, a list of texts or of token numbers")
        return sum(rows), max(rows)
    texts = decode_field(
        lambda r: msgspec.json.decode(r, type=list[str]), raw, name, "a text or a list of texts"
    )
    if not texts:
        raise GatewayError("invalid_request", f"'{name}' is empty.", param=name)
    sizes = [len(text.encode()) for text in texts]
    return estimate_tokens(sum(sizes)), estimate_tokens(max(sizes))


def _number_rows(raw: msgspec.Raw) -> list[int]:
    """How many token numbers each row has; one row where there is just one list."""
    if memoryview(raw)[1:].tobytes().lstrip()[:1] == b"[":
        return [len(row) for row in msgspec.json.decode(raw, type=list[list[int]])]
    return [len(msgspec.json.decode(raw, type=list[int]))]


def _opening(messages: list[_Message]) -> Opening:
    """System prompt and first user message: what a conversation's cached prefix begins with."""
    kept = []
    for message in messages:
        if message.role in ("system", "developer"):
            kept.append(message.content)
        elif message.role == "user":
            kept.append(message.content)
            break
    return kept
