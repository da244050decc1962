"""Answers that are passed on as they are, whatever they hold: JSON, text, audio, or events."""

from __future__ import annotations

from typing import Any

import msgspec

from backends.upstream import Response
from mindrouter.gateway import failures
from mindrouter.gateway.client import Headers
from mindrouter.gateway.dialects.native import NativeStream
from mindrouter.gateway.dialects.splitter import data_of
from mindrouter.gateway.exchange import Exchange
from mindrouter.gateway.failures import Failure
from mindrouter.gateway.relay import HELD_BYTES, BodyRelay
from mindrouter.gateway.requests import Asked, estimate_tokens
from mindrouter.gateway.surfaces import estimates
from mindrouter.gateway.surfaces.usage import read_usage, usage_of_seconds
from scheduler.core.jobs import Usage
from scheduler.serving import Claim
from scheduler.snapshot import Endpoint

_NULL = msgspec.Raw(b"null")


class _Answer(msgspec.Struct):
    usage: msgspec.Raw = _NULL
    text: str | None = None
    duration: float | str | None = None
    error: Any = None


_answer = msgspec.json.Decoder(_Answer)


class SurfaceRelay(BodyRelay):
    """A whole answer of any content type.

    ``at_once``: it is passed on while it comes, as audio is heard before its end. Any other is
    kept until it is whole, unless it is large.
    """

    __slots__ = ("_at_once", "_is_json")
    _read_usage = staticmethod(read_usage)

    def __init__(
        self,
        exchange: Exchange,
        claim: Claim,
        asked: Asked,
        endpoint: Endpoint,
        head: Headers,
        *,
        is_json: bool,
        at_once: bool,
    ) -> None:
        super().__init__(exchange, claim, asked, endpoint, head)
        self._is_json = is_json
        self._at_once = at_once

    async def run(self, response: Response) -> Failure | None:
        """Relay to the end. A Failure: the client has seen nothing of it.

        Raises: CutShortError once bytes have gone to the client; UpstreamError before.
        """
        exchange = self._exchange
        held: list[bytes] = []
        size, most = 0, 0 if self._at_once else HELD_BYTES
        while data := await response.read():
            held.append(data)
            size += len(data)
            exchange.record.first_token_at = exchange.record.first_byte_at
            if size > most:
                await self._pass_on(response, b"".join(held))
                return None
        body = b"".join(held)
        if self._at_once:
            return failures.not_an_answer(self._endpoint, "sent an empty answer")
        usage = None
        if self._is_json:
            try:
                answer = _answer.decode(body)
            except msgspec.ValidationError:
                answer = _Answer()  # some say just a text
            except (msgspec.DecodeError, RecursionError):
                return failures.not_an_answer(self._endpoint, "sent what is not valid JSON")
            if answer.error is not None:
                return failures.from_event(answer.error, self._endpoint)
            usage = self._usage_of(answer)
        exchange.complete(self._claim, usage or self._estimate(body), at_once=False)
        await exchange.client.respond(200, self._head, body)
        return None

    def _usage_of(self, answer: _Answer) -> Usage | None:
        """Where the length of the audio is told, the text still has to be estimated."""
        usage = read_usage(answer.usage) or usage_of_seconds(answer.duration)
        if usage is None or not usage.estimated:
            return usage
        return _estimated(usage.prompt_tokens, _text_tokens(answer.text or ""))

    def _estimate(self, body: bytes) -> Usage:
        output = self._asked.max_tokens
        if output is None:
            output = _said_tokens(body, is_json=self._is_json)
            output = output if body else estimate_tokens(self._sent)
        return _estimated(self._asked.prompt_tokens, output)

    def delivered(self) -> Usage | None:
        """What the client has had of an answer that is not whole; None: nothing."""
        if not self._sent:
            return None
        whole = self._estimate(b"")
        if not self._at_once:
            return whole
        part = estimates.audio_file_tokens(self._sent)
        return _estimated(whole.prompt_tokens, min(part, whole.completion_tokens))


def _estimated(prompt_tokens: int, output_tokens: int) -> Usage:
    return Usage(prompt_tokens=prompt_tokens, completion_tokens=output_tokens, estimated=True)


def _said_tokens(body: bytes, *, is_json: bool) -> int:
    if not is_json:
        return estimate_tokens(len(body.strip()))
    try:
        return _text_tokens(_answer.decode(body).text or "")
    except (msgspec.MsgspecError, RecursionError):
        return estimate_tokens(len(body))


def _text_tokens(text: str) -> int:
    return estimate_tokens(len(text.encode("utf-8", "replace")))


class _Event(msgspec.Struct):
    type: str | None = None
    usage: msgspec.Raw = _NULL
    choices: list[dict[str, Any]] = []
    error: Any = None


_event = msgspec.json.Decoder(_Event)
_LAST = (".done", ".completed")


class SurfaceEvents(NativeStream):
    """Events with a type (``transcript.text.delta``), as OpenAI's, or like those of a chat, as
    vLLM's transcriptions. Each is passed on as it came.

    ``output_tokens`` is what the whole is estimated at; None: count the events.
    """

    def __init__(self, *, prompt_tokens: int, output_tokens: int | None) -> None:
        super().__init__(prompt_tokens=prompt_tokens)
        self._output_tokens = output_tokens
        self._finish_seen = False

    @property
    def finished(self) -> bool:
        """Whether the backend said that it had finished. Its stream may go on all the same: several
        images end one after the other, and some say ``[DONE]`` behind it."""
        return self.done or self._finish_seen

    @property
    def estimated_tokens(self) -> int:
        if self._output_tokens is not None and self.first_token_seen:
            return self._output_tokens
        return super().estimated_tokens

    def _look(self, event: bytes) -> bool:
        data = data_of(event)
        if data is None:
            return True
        if data.strip() == b"[DONE]":
            self.done = True
            return True
        try:
            told = _event.decode(data)
        except (msgspec.MsgspecError, RecursionError):
            return True
        if told.error is not None or told.type == "error":
            self.error = told.error or _plain(data)
            return False
        self.usage = read_usage(told.usage) or self.usage
        if (told.type or "").endswith(_LAST) or any(c.get("finish_reason") for c in told.choices):
            self._finish_seen = True
        if told.type or told.choices:
            self._count()
        return True


def _plain(data: bytes) -> Any:
    return msgspec.json.decode(data)
