"""What an answer tells of its usage: tokens under any of their names, or seconds of audio."""

from __future__ import annotations

import math

import msgspec

from mindrouter.gateway.surfaces.estimates import audio_tokens
from mindrouter.gateway.told import MAX_TOKENS
from scheduler.core.jobs import Usage

_Number = float | None


class _Told(msgspec.Struct):
    prompt_tokens: _Number = None
    completion_tokens: _Number = None
    input_tokens: _Number = None
    output_tokens: _Number = None
    total_tokens: _Number = None
    seconds: float | str | None = None  # vLLM writes a text


_told = msgspec.json.Decoder(_Told)


def read_usage(raw: msgspec.Raw) -> Usage | None:
    """Of a ``usage`` object; None where it tells nothing that can be believed.

    Seconds of audio become tokens, as an estimate without any output.
    """
    try:
        told = _told.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None
    prompt = told.input_tokens if told.prompt_tokens is None else told.prompt_tokens
    output = (
        told.output_tokens if told.completion_tokens is None else told.completion_tokens
    ) or 0.0
    if prompt is None and told.total_tokens is not None:
        prompt = told.total_tokens - output
    if prompt is None:
        return usage_of_seconds(told.seconds)
    if min(prompt, output) < 0 or max(prompt, output) > MAX_TOKENS or not prompt + output:
        return None
    return Usage(prompt_tokens=int(prompt), completion_tokens=int(output))


def usage_of_seconds(told: float | str | None) -> Usage | None:
    """Of so much audio."""
    try:
        seconds = float(told) if told is not None else 0.0
    except ValueError:
        return None
    if not math.isfinite(seconds) or seconds <= 0:
        return None
    return Usage(prompt_tokens=audio_tokens(seconds), completion_tokens=0, estimated=True)
