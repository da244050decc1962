"""The end user that a request comes from, behind a key that is trusted to name it, and whether
anybody waits for the answer (R15)."""

from __future__ import annotations

from urllib.parse import unquote

import msgspec
from django.conf import settings

from mindrouter.gateway.client import Client
from mindrouter.gateway.requests import Asked, typed_field

#: As long as the record has room for.
MAX_NAME = 200
MAX_TASK = 40
#: OpenAI's fields, the newer one first.
_FIELDS = ("safety_identifier", "user")


class _Metadata(msgspec.Struct):
    user_id: str | None = None


def end_user(client: Client, asked: Asked, dialect: str) -> str:
    """A header's value, else what the body says in the dialect's own way; empty: nobody.

    Open WebUI percent-encodes what a header cannot carry. Raises: GatewayError, for a field of
    another type.
    """
    for name in settings.END_USER_HEADERS:
        if value := client.header(name.lower().encode("latin-1", "replace")):
            return unquote(value)[:MAX_NAME]
    if dialect == "anthropic":
        metadata = typed_field(asked.fields, "metadata", _Metadata, "an object")
        return ((metadata and metadata.user_id) or "")[:MAX_NAME]
    values = (typed_field(asked.fields, field, str, "a text") for field in _FIELDS)
    return (next(filter(None, values), None) or "")[:MAX_NAME]


def background_task(client: Client) -> str:
    """What a background call is for, "title_generation" say; empty: somebody waits for the answer.

    Open WebUI says so where its connection has a header made of ``{{TASK}}``, which is empty in
    chats.
    """
    name = settings.BACKGROUND_HEADER.lower().encode("latin-1", "replace")
    return (client.header(name) or "").strip()[:MAX_TASK]
