"""One log line per request, when its record is stored."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from typing import Any

from scheduler.spool import Record

_PLAIN = re.compile(r"[\w.:/@+-]+")
logger = logging.getLogger("mindrouter.requests")


def log_requests(records: Iterable[Record]) -> None:
    """To the logger ``mindrouter.requests``, level INFO; as JSON each figure is a field."""
    if logger.isEnabledFor(logging.INFO):
        for record in records:
            fields = _fields(record)
            text = " ".join(f"{name}={_word(value)}" for name, value in fields.items())
            logger.info(text, extra={"request_id": record.request_id, **fields})


def _fields(record: Record) -> dict[str, Any]:
    """Seconds and tokens; what is unknown or empty is left out."""
    sent = record.ended_at if record.dispatched_at is None else record.dispatched_at
    fields = {
        "outcome": record.outcome,
        "status": record.status,
        "reason": record.reason,
        "endpoint": record.endpoint,
        "model": record.model_served or record.model_requested,
        "user": record.user,
        "group": record.group,
        "backend": record.selected_backend,
        "attempts": len(record.attempts) or None,
        "waited": _between(record.queued_at, sent),
        "first_token": _between(record.arrived_at, record.first_token_at),
        "took": _between(record.arrived_at, record.ended_at),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "client_request_id": record.client_request_id,
    }
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _word(value: Any) -> str:
    """Quoted where it would end the line or look like something else."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start), 4)
