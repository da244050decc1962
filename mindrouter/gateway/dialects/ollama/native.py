"""Answers of Ollama backends: what they cost and how they end."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from mindrouter.gateway.dialects.native import NativeStream
from mindrouter.gateway.dialects.translation import invalid_answer
from mindrouter.gateway.told import MAX_TOKENS
from scheduler.core.jobs import Usage

_CONTENT = re.compile(rb'"(?:content|thinking|response)"\s*:\s*"[^"]|"tool_calls"\s*:\s*\[\s*\{')
_DONE = re.compile(rb'"done"\s*:\s*true')


class _Line(msgspec.Struct):
    done: bool = False
    error: Any = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None


_line = msgspec.json.Decoder(_Line)


def usage_in_answer(body: bytes, *, prompt_tokens: int) -> Usage | None:
    """The usage of a whole answer, embeddings included; None where it tells none.

    Raises: GatewayError where it is no answer.
    """
    try:
        return _usage(_line.decode(body), prompt_tokens)
    except (msgspec.MsgspecError, RecursionError):
        raise invalid_answer("an answer that is not valid JSON") from None


class ChatLines(NativeStream):
    """A native stream of ``/api/chat`` or ``/api/generate``."""

    END = b"\n"

    def _look(self, event: bytes) -> bool:
        if _CONTENT.search(event):
            self._count()
        if b'"error"' not in event and not _DONE.search(event):
            return bool(event.strip())
        try:
            parsed = _line.decode(event)
        except (msgspec.MsgspecError, RecursionError):
            return True
        if parsed.error is not None:
            self.error = parsed.error
            return False
        if parsed.done:
            self.done = True
            self.usage = _usage(parsed, self._prompt_tokens)
        return True


def _usage(line: _Line, prompt_tokens: int) -> Usage | None:
    """Ollama leaves out counts of 0, and used to leave out the prompt's when it was cached."""
    prompt, output = line.prompt_eval_count, line.eval_count
    if prompt is None and output is None:
        return None
    told = prompt if prompt is not None else prompt_tokens
    if not all(0 <= n <= MAX_TOKENS for n in (told, output or 0)):
        return None
    return Usage(prompt_tokens=told, completion_tokens=output or 0, estimated=prompt is None)
