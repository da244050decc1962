"""Real SDKs before a backend of canned answers, with nothing between but the translation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mindrouter.gateway.dialects.translation import Translated
from mindrouter.gateway.errors import GatewayError


@dataclass
class Backend:
    """Answers every chat with the same bytes, and keeps what it was asked."""

    answer: bytes
    asked: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, translated: Translated) -> bytes:
        self.asked.append(json.loads(translated.body_for("served")))
        return self.answer


def translated(
    stream: Any, answer: bytes, finish: Callable[[], bytes], request_id: str = "r1"
) -> bytes:
    """A whole stream, as the gateway would write it."""
    told: bytes = stream.feed(answer)
    try:
        return told + finish()
    except GatewayError as error:
        ended: bytes = told + stream.error(error, request_id)
        return ended
