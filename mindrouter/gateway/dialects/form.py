"""What the gateway must know of an address in another dialect than OpenAI's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from mindrouter.gateway.dialects.native import NativeStream
from mindrouter.gateway.dialects.translation import (
    Reply,
    StreamTranslation,
    Timings,
    Translated,
)
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.requests import Asked
from scheduler.core.jobs import Usage

#: Makes an answer that needs no backend.
OwnAnswer = Callable[[Reply], bytes]
EVENT_STREAM = b"text/event-stream; charset=utf-8"
NDJSON = b"application/x-ndjson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """A dialect's form of errors: a whole body, and what ends a stream. Both are given the
    request's id."""

    body: Callable[[GatewayError, str], bytes]
    event: Callable[[GatewayError, str], bytes]


def no_own_answer(asked: Asked) -> OwnAnswer | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the requests of one address are read, passed on and answered.

    A backend whose engine is among the ``speakers`` gets the client's body as it came
    (``Asked.body_for``) at ``path``; ``watch`` then finds usage and end in its stream and
    ``usage_in`` in its whole answer. Any other backend gets what ``translate`` makes, and its
    answer is made into the client's form by ``whole`` or, event by event, by ``stream``.
    ``streams_unfit`` are speakers whose streams the dialect's own packages cannot read: these are
    translated all the same.
    ``own_answer`` is for requests that need no model at all: where the leased backend does not
    speak the form, the router answers them itself.
    """

    dialect: str  # as recorded
    operation: str  # as recorded
    path: bytes
    speakers: frozenset[str]
    streams_unfit: frozenset[str] = frozenset()
    read: Callable[[bytes, str | None], Asked]
    translate: Callable[[Mapping[str, msgspec.Raw]], Translated]
    whole: Callable[[bytes, Reply, Timings], bytes]
    usage_in: Callable[[bytes, Asked, str], Usage | None]  # (body, asked, engine)
    stream: Callable[[Reply], StreamTranslation] | None  # None: it never streams
    watch: Callable[[Asked, str], NativeStream] | None  # (asked, engine)
    errors: Errors
    stream_type: bytes = EVENT_STREAM
    own_answer: Callable[[Asked], OwnAnswer | None] = no_own_answer

    @property
    def takes_comments(self) -> bool:
        """Whether a stream may hold comments while its request waits."""
        return self.stream_type == EVENT_STREAM
