"""One decision in words: why it waited, and why it went there.

PURE: values in, texts out; no Django, no clock. Its tables are in ``explain_tables``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NOTHING = "–"
NO_BREAK = "\N{NO-BREAK SPACE}"  # a unit stays with its figure
#: Shorter waits are the time it takes to decide, not waiting.
_NO_WAIT_SECONDS = 0.05

_WAIT_REASONS = {
    "backends_full": "all backends with {model} were full",
    "others_ahead": "others were owed more",
    "own_backlog": "earlier requests of the same user came first",
    "backends_failed": "all backends with {model} had failed",
    "paused": "all backends with {model} were disabled, draining or down",
    "no_memory": "no backend had the memory for {model}",
}
#: Causes that the wait in the queue does not tell.
_LATE = {
    "cold_load": "the model had to be loaded first",
    "long_prompt": "the prompt was long",
    "slow_backend": "the backend was slow",
}
_ADVANTAGES = {
    "model_loaded": "model loaded",
    "low_utilization": "less used",
    "latency": "faster first byte",
    "short_queue": "shorter queue",
    "high_throughput": "higher token rate",
    "priority": "higher priority",
    "cache_affinity": "holds the conversation's cache",
}
_SELECTIONS = {
    "affinity": "the backend of this conversation's cache",
    "round_robin": "its turn among equals",
    "only_candidate": "the only one that could take it",
    "fail_open": "all had failed, so the best ranked was tried",
}
_REASONS = {
    "invalid_request": "the request was not valid",
    "invalid_api_key": "the API key is not valid",
    "permission_denied": "this user may not use it",
    "model_not_found": "no backend has the model",
    "capability_missing": "no backend with the model can do what was asked",
    "context_length_exceeded": "the request is longer than the model's context",
    "body_too_large": "the request body is too large",
    "rate_limit_exceeded": "the rate limit was reached",
    "concurrency_limit_exceeded": "the user had as many requests open as allowed",
    "quota_exceeded": "the token budget was used up",
    "queue_full": "the queue was full",
    "queue_timeout": "the longest wait was reached",
    "client_disconnected": "the client left",
    "upstream_connect_failed": "the backend did not take the connection",
    "upstream_timeout": "the backend took too long to begin",
    "upstream_stalled": "the backend stopped in the middle of the answer",
    "upstream_ended_early": "the backend ended the answer early",
    "upstream_error": "the backend reported an error",
    "upstream_invalid": "the backend's answer was not valid",
    "no_backend_available": "no backend could take it",
    "shutting_down": "the router was stopping",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A decision's values, named as in the record. Times are epoch seconds."""

    outcome: str
    reason: str = ""
    message: str = ""
    model_requested: str = ""
    selected_backend: str = ""
    selected_backend_id: int | None = None
    candidate_backends: Sequence[int] = ()
    backend_names: Mapping[str, str] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    score_parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    constraints: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    selection_reason: str = ""
    attempts: Sequence[Mapping[str, Any]] = ()
    user_deficit: float | None = None
    user_weight: float | None = None
    burst_credits: float | None = None
    deprioritization_factor: float | None = None
    wait_bonus: float | None = None
    priority: float | None = None
    wait_reason: str = ""
    position_at_arrival: int | None = None
    served_ahead: Mapping[str, Any] = field(default_factory=dict)
    completion_tokens: int | None = None
    arrived_at: float | None = None
    queued_at: float | None = None
    dispatched_at: float | None = None
    first_byte_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    cause: str = ""  # why it was slow, one of scheduler.causes

    @property
    def waited_seconds(self) -> float | None:
        """Seconds in the queue, until a backend took it or it left."""
        left = self.ended_at if self.dispatched_at is None else self.dispatched_at
        return None if self.queued_at is None or left is None else max(left - self.queued_at, 0.0)

    def name_of(self, backend_id: int | str) -> str:
        return self.backend_names.get(str(backend_id), f"backend {backend_id}")


# ---- figures


def duration(seconds: float | None) -> str:
    """0.0032 as "3 ms", 12.41 as "12.4 s", 125 as "2 min 5 s", None as a dash."""
    if seconds is None:
        return NOTHING
    if seconds < 0.9995:
        return f"{max(seconds, 0) * 1000:.0f}{NO_BREAK}ms"
    if seconds < 99.95:
        return f"{seconds:.1f}{NO_BREAK}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}{NO_BREAK}min" + (f" {rest}{NO_BREAK}s" if rest else "")


def number(value: float | None, digits: int = 1) -> str:
    """1234.50 as "1,234.5", 3.0 as "3", None as a dash; a negative one gets a minus sign."""
    if value is None:
        return NOTHING
    text = f"{value:,.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text.replace("-", "\N{MINUS SIGN}")


def wait_in_words(code: str) -> str:
    """Why somebody waits, without a model's name."""
    return _WAIT_REASONS.get(code, code.replace("_", " ")).format(model="the model")


def reason_in_words(code: str) -> str:
    """What a reason code says; unknown ones in their own words."""
    return _REASONS.get(code, code.replace("_", " "))


# ---- who was ahead


@dataclass(frozen=True, slots=True)
class Ahead:
    group: str
    jobs: int
    tokens: float


def served_ahead(case: Case) -> list[Ahead]:
    """Who was served in this class while it waited, most first."""
    rows = [
        Ahead(group or "users without a group", int(jobs), float(tokens))
        for group, (jobs, tokens) in case.served_ahead.items()
    ]
    return sorted((row for row in rows if row.jobs), key=lambda row: (-row.jobs, row.group))


# ---- the sentence


def sentence(case: Case) -> str:
    """Why it waited and why it went there, or why it did not."""
    if case.queued_at is None and case.dispatched_at is None:
        return f"{_not_queued(case)}."
    clauses = [_waiting(case)]
    if ahead := _ahead(case):
        clauses.append(ahead)
    if case.dispatched_at is None:
        clauses.append(_left_queue(case))
    else:
        clauses.append(_placement(case))
        if case.cause in _LATE:
            clauses.append(f"slow because {_LATE[case.cause]}")
        if ending := _ending(case):
            clauses.append(ending)
    return "; ".join(clauses) + "."


def _not_queued(case: Case) -> str:
    if case.outcome == "refused":
        return f"Refused at once: {_why(case)}"
    return f"{case.outcome.capitalize()} before it was queued: {_why(case)}"


def _why(case: Case) -> str:
    if case.reason:
        return reason_in_words(case.reason)
    return case.message.rstrip(".") or "no reason was recorded"


def _waiting(case: Case) -> str:
    waited = case.waited_seconds
    if waited is None:
        return "Is still waiting"
    if case.wait_reason in ("", "none") or (
        case.dispatched_at is not None and waited < _NO_WAIT_SECONDS
    ):
        return "Did not wait" if waited < _NO_WAIT_SECONDS else f"Waited {duration(waited)}"
    because = _WAIT_REASONS.get(case.wait_reason, case.wait_reason.replace("_", " "))
    return f"Waited {duration(waited)} because {because.format(model=case.model_requested)}"


def _ahead(case: Case) -> str:
    rows = served_ahead(case)
    if not rows:
        return ""
    first = f"{rows[0].jobs:,} {'request' if rows[0].jobs == 1 else 'requests'} of {rows[0].group}"
    texts = [first, *(f"{row.jobs:,} of {row.group}" for row in rows[1:])]
    verb = "was" if sum(row.jobs for row in rows) == 1 else "were"
    return f"{_joined(texts)} {verb} served ahead"


def _left_queue(case: Case) -> str:
    if case.outcome == "aborted":
        return "the router's process died while it waited"
    return f"left the queue without being served: {_why(case)}"


def _placement(case: Case) -> str:
    text = f"went to {case.selected_backend or 'a backend'}"
    if failed := _failed_attempts(case):
        text += f" after {failed}"
    why = _selection(case)
    return f"{text}: {why}" if why else text


def _failed_attempts(case: Case) -> str:
    failures = [
        f"{attempt.get('backend', '?')} ({reason_in_words(str(attempt.get('reason') or '?'))})"
        for attempt in list(case.attempts)[:-1]
    ]
    return _joined(failures) + " failed" if failures else ""


def _selection(case: Case) -> str:
    if case.selection_reason in _SELECTIONS:
        return _SELECTIONS[case.selection_reason]
    chosen = str(case.selected_backend_id)
    others = {key: value for key, value in case.scores.items() if key != chosen}
    if chosen not in case.scores:
        return case.selection_reason.replace("_", " ")
    total = number(case.scores[chosen])
    if not others:
        return f"{_SELECTIONS['only_candidate']} ({total} points)"
    second = max(others, key=lambda key: others[key])
    against = f"{total} points, next {case.name_of(second)} with {number(others[second])}"
    advantages = _advantages(case, chosen, second)
    return f"{', '.join(advantages) or 'best total'} ({against})"


def _advantages(case: Case, chosen: str, second: str) -> list[str]:
    """Where the chosen one had more points than the next, most first; at most three."""
    mine, theirs = case.score_parts.get(chosen, {}), case.score_parts.get(second, {})
    gained = {name: points - theirs.get(name, 0) for name, points in mine.items()}
    best = sorted((name for name in gained if gained[name] > 0.05), key=lambda n: -gained[n])
    return [_ADVANTAGES.get(name, name.replace("_", " ")) for name in best[:3]]


def _ending(case: Case) -> str:
    if case.outcome == "completed":
        return ""
    if case.outcome == "aborted":
        return "the router's process died before the answer had ended"
    if case.outcome == "cancelled":
        tokens = case.completion_tokens or 0
        return f"{_why(case)} after {tokens:,} {'token' if tokens == 1 else 'tokens'}"
    return f"{case.outcome}: {_why(case)}"


def _joined(texts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))
