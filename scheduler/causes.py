"""Why a request was slow: one cause, from what its record says.

PURE: values in, a code out; no Django, no clock. Three stretches can make a request slow: its wait
in the queue, the time until the backend began to answer, and an answer that trickled. A request is
slow where they come to ``SLOW_SECONDS`` together, and its cause is the longest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SLOW_SECONDS = 5.0
#: Tokens a second that an answer may be expected to come at; a slower one is late by the rest.
LEAST_RATE = 5.0
#: Prompt tokens, less those from the cache, that explain a late first token.
LONG_PROMPT_TOKENS = 8000

NO_BACKEND = "no_backend"
OWN_BACKLOG = "own_backlog"
OTHERS_AHEAD = "others_ahead"
ALL_FULL = "all_full"
COLD_LOAD = "cold_load"
SLOW_BACKEND = "slow_backend"
LONG_PROMPT = "long_prompt"

#: {cause: in words}, in the order in which reports show them.
CAUSES: Mapping[str, str] = {
    NO_BACKEND: "no backend had the model",
    OWN_BACKLOG: "own backlog",
    OTHERS_AHEAD: "others ahead",
    ALL_FULL: "every slot was in use",
    COLD_LOAD: "cold load of the model",
    SLOW_BACKEND: "slow backend",
    LONG_PROMPT: "long prompt",
}

#: Refusals because nothing could serve it; other refusals are not slow requests.
_NOWHERE = frozenset({"model_not_found", "no_backend_available"})
_WAITS = {
    "backends_failed": NO_BACKEND,
    "paused": NO_BACKEND,
    "no_memory": NO_BACKEND,
    "own_backlog": OWN_BACKLOG,
    "others_ahead": OTHERS_AHEAD,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a cause is found from, named as in the record. Times are epoch seconds."""

    outcome: str
    reason: str = ""
    stream: bool = False
    wait_reason: str = ""
    loaded_points: float | None = None  # of the chosen backend, for having the model in memory
    served_ahead: Mapping[str, Sequence[float]] = field(default_factory=dict)
    attempts: Sequence[Any] = ()  # (started, ended) of each, epoch seconds or None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    queued_at: float | None = None
    dispatched_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None


def cause(facts: Facts) -> str:
    """The code of why it was slow, one of ``CAUSES``; empty where it was not."""
    if facts.outcome == "refused" and facts.reason in _NOWHERE:
        return NO_BACKEND
    lost = _lost(facts)
    stretches = {
        "wait": max(0.0, _waited(facts) - lost),
        "failed": lost,
        "start": _start(facts),
        "trickle": _trickle(facts),
    }
    if sum(stretches.values()) < SLOW_SECONDS:
        return ""
    match max(stretches, key=lambda name: stretches[name]):
        case "wait":
            return _of_the_wait(facts)
        case "start":
            return _of_the_start(facts)
    return SLOW_BACKEND


def _waited(facts: Facts) -> float:
    left = facts.ended_at if facts.dispatched_at is None else facts.dispatched_at
    return _between(facts.queued_at, left)


def _lost(facts: Facts) -> float:
    """On backends that failed it, before the one that did not."""
    return sum(_between(started, ended) for started, ended in facts.attempts[:-1])


def _start(facts: Facts) -> float:
    """From the dispatch to the first token. Where the answer comes as a whole, what is left of
    the time when its tokens have had theirs."""
    if facts.stream:
        began = facts.ended_at if facts.first_token_at is None else facts.first_token_at
        return _between(facts.dispatched_at, began)
    return max(0.0, _between(facts.dispatched_at, facts.ended_at) - _expected(facts))


def _trickle(facts: Facts) -> float:
    if not facts.stream:
        return 0.0
    return max(0.0, _between(facts.first_token_at, facts.ended_at) - _expected(facts))


def _expected(facts: Facts) -> float:
    return (facts.completion_tokens or 0) / LEAST_RATE


def _between(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else max(0.0, end - start)


def _of_the_wait(facts: Facts) -> str:
    if facts.wait_reason in _WAITS:
        return _WAITS[facts.wait_reason]
    # Nobody waited before it, but somebody who came later was served before it.
    return OTHERS_AHEAD if any(jobs for jobs, _ in facts.served_ahead.values()) else ALL_FULL


def _of_the_start(facts: Facts) -> str:
    if facts.loaded_points == 0.0:
        return COLD_LOAD
    read = (facts.prompt_tokens or 0) - (facts.cached_tokens or 0)
    return LONG_PROMPT if read >= LONG_PROMPT_TOKENS else SLOW_BACKEND
