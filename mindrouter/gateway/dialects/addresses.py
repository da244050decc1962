"""All addresses of dialects besides OpenAI's own, and whose errors an address gets."""

from __future__ import annotations

from mindrouter.gateway.dialects import openai
from mindrouter.gateway.dialects.anthropic import forms as anthropic
from mindrouter.gateway.dialects.form import Errors, Form
from mindrouter.gateway.dialects.ollama import forms as ollama
from mindrouter.gateway.dialects.responses import forms as responses
from mindrouter.gateway.errors import GatewayError

FORMS: dict[str, Form] = {**anthropic.FORMS, **ollama.FORMS, **responses.FORMS}
_ANTHROPICS = ("/v1/messages", "/anthropic")


def _openai_body(error: GatewayError, request_id: str) -> bytes:
    return openai.error_body(error)


def _openai_event(error: GatewayError, request_id: str) -> bytes:
    return openai.error_event(error)


OPENAI_ERRORS = Errors(body=_openai_body, event=_openai_event)


def errors_at(path: str) -> Errors:
    """The form that errors have at an address, one that nothing is at included."""
    if path == "/api" or path.startswith("/api/"):
        return ollama.ERRORS
    if any(path == start or path.startswith(start + "/") for start in _ANTHROPICS):
        return anthropic.ERRORS
    form = FORMS.get(path)
    return form.errors if form is not None else OPENAI_ERRORS
