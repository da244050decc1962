"""Strict reading of a request in a client's own form: what is not known is refused by its name.

Passing a body on to a backend that speaks the form needs none of this; translating it does, since
a field that is not understood would otherwise be lost without a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from mindrouter.gateway.errors import GatewayError

_T = TypeVar("_T")
_WHERE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_VALUE = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)
_encode = msgspec.json.Encoder().encode
_decode_text = msgspec.json.Decoder(str).decode


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object that may hold only what is declared."""


def read_strictly(
    fields: Mapping[str, msgspec.Raw], decoder: msgspec.json.Decoder[_T], within: str = ""
) -> _T:
    """A request, or with ``within`` the part of it at that path, as the decoder's type.

    Raises: GatewayError, which names the field.
    """
    return decode_strictly(msgspec.Raw(_encode(fields)), decoder, within)


def decode_strictly(raw: msgspec.Raw, decoder: msgspec.json.Decoder[_T], within: str = "") -> _T:
    """One value of a request, found at the path ``within``. Raises: GatewayError."""
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _refusal(str(error), within) from None


def cannot_translate(path: str, why: str = "") -> GatewayError:
    """The refusal of a field that has no counterpart in the form that the backends speak."""
    reason = f": {why}" if why else ""
    return GatewayError(
        "invalid_request",
        f"'{path}' cannot be translated for the backends that have this model{reason}.",
        param=path,
    )


def malformed(path: str, why: str) -> GatewayError:
    """The refusal of a field that is not as the client's own form wants it."""
    return GatewayError("invalid_request", f"'{path}': {why}.", param=path)


def given(raw: msgspec.Raw) -> bool:
    """Whether a value is there; null is as good as absent."""
    return bytes(memoryview(raw)[:4]) != b"null"


def is_object(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:1]) == b"{"


def is_text(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:1]) == b'"'


def text_of(raw: msgspec.Raw) -> str:
    """The text of a JSON string."""
    return _decode_text(raw)


def object_text(raw: msgspec.Raw, path: str) -> str:
    """A JSON object as the text it came as. Raises: GatewayError."""
    if not is_object(raw):
        raise malformed(path, "an object is expected")
    return bytes(raw).decode()


def _refusal(message: str, within: str) -> GatewayError:
    match = _WHERE.fullmatch(message)
    assert match is not None  # noqa: S101  the expression matches any text
    what, path = match["what"], _joined(within, match["path"] or "")
    if unknown := _UNKNOWN.fullmatch(what):
        return cannot_translate(_joined(path, unknown[1]))
    if missing := _MISSING.fullmatch(what):
        return malformed(_joined(path, missing[1]), "this field is required")
    if value := _VALUE.fullmatch(what):
        return cannot_translate(path, f"{value[1]} is not known here")
    return malformed(path or "body", what)


def _joined(path: str, rest: str) -> str:
    if not path or not rest or rest.startswith("["):
        return path + rest
    return f"{path}.{rest}"
