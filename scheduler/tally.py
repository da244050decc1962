"""What becomes of many requests, in bounded memory: shares, waits, refusals, utilisation. PURE."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.core.jobs import BackendSpec, UserSpec

NO_GROUP = "(no group)"
#: Waits are counted in steps of 2 %, from a millisecond on, so a percentile is as exact as that.
_STEP = math.log(1.02)
_LEAST_SECONDS = 0.001


class Waits:
    """Percentiles of waiting times; within 1 % of the true ones, and 0 below a millisecond."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.total = 0

    def add(self, seconds: float) -> None:
        self.total += 1
        if seconds < _LEAST_SECONDS:
            self.counts[-1] += 1
        else:
            self.counts[int(math.log(seconds / _LEAST_SECONDS) / _STEP)] += 1

    def merge(self, other: Waits) -> None:
        self.counts.update(other.counts)
        self.total += other.total

    def percentile(self, part: float) -> float:
        """Seconds that ``part`` (0..1) of the requests waited at most; 0 where there are none."""
        rank = math.ceil(part * self.total)
        for step in sorted(self.counts):
            rank -= self.counts[step]
            if rank <= 0:
                return 0.0 if step < 0 else _LEAST_SECONDS * math.exp((step + 0.5) * _STEP)
        return 0.0


class Tally:
    """The requests of one user, one group or everybody."""

    __slots__ = ("contended_tokens", "left", "refused", "requests", "served", "tokens", "waits")

    def __init__(self) -> None:
        self.requests = 0
        self.served = 0
        self.left = 0  # the client went away while waiting
        self.tokens = 0
        self.contended_tokens = 0  # of what was dispatched while others waited
        self.refused: Counter[str] = Counter()
        self.waits = Waits()

    def serve(self, tokens: int, waited: float, *, contended: bool) -> None:
        self.served += 1
        self.tokens += tokens
        if contended:
            self.contended_tokens += tokens
        self.waits.add(waited)

    def merge(self, other: Tally) -> None:
        self.requests += other.requests
        self.served += other.served
        self.left += other.left
        self.tokens += other.tokens
        self.contended_tokens += other.contended_tokens
        self.refused.update(other.refused)
        self.waits.merge(other.waits)

    def as_json(self, total: Tally) -> dict[str, Any]:
        """Shares are fractions of ``total``; None where nothing was contended."""
        contended = total.contended_tokens
        return {
            "requests": self.requests,
            "served": self.served,
            "left": self.left,
            "refused": dict(self.refused),
            "tokens": self.tokens,
            "share": self.tokens / total.tokens if total.tokens else 0.0,
            "contended_share": self.contended_tokens / contended if contended else None,
            "p50": self.waits.percentile(0.5),
            "p95": self.waits.percentile(0.95),
            "p99": self.waits.percentile(0.99),
        }


class TallyBook:
    """The tallies of a run, one for each user."""

    def __init__(self, users: Mapping[int, UserSpec]) -> None:
        self._users = users
        self._tallies: dict[int, Tally] = {}
        self._first: float | None = None
        self._last = 0.0
        self.busy: defaultdict[int, float] = defaultdict(float)  # {backend id: slot-seconds}

    def of(self, user_id: int) -> Tally:
        tally = self._tallies.get(user_id)
        if tally is None:
            tally = self._tallies[user_id] = Tally()
        return tally

    def began(self, at: float) -> None:
        if self._first is None:
            self._first = self._last = at

    def ended(self, at: float) -> None:
        self._last = max(self._last, at)

    def result(self, backends: Sequence[BackendSpec]) -> dict[str, Any]:
        """JSON values: {"seconds", "total", "groups": {name: …}, "users": {name: …},
        "utilisation": {backend: 0..1}}; each tally as ``Tally.as_json``. Seconds, tokens."""
        total = Tally()
        groups: dict[str, Tally] = {}
        for user_id, tally in self._tallies.items():
            total.merge(tally)
            groups.setdefault(self._group(user_id), Tally()).merge(tally)
        seconds = self._last - (self._first or 0.0)
        return {
            "seconds": seconds,
            "total": total.as_json(total),
            "groups": {name: groups[name].as_json(total) for name in sorted(groups)},
            "users": {
                self._name(user_id): tally.as_json(total) | {"group": self._group(user_id)}
                for user_id, tally in sorted(self._tallies.items())
            },
            "utilisation": {
                one.name: self.busy[one.backend_id] / (one.max_concurrent * seconds)
                for one in backends
                if one.enabled and one.max_concurrent and seconds > 0.0
            },
        }

    def _group(self, user_id: int) -> str:
        spec = self._users.get(user_id)
        return (spec.group_name if spec else None) or NO_GROUP

    def _name(self, user_id: int) -> str:
        spec = self._users.get(user_id)
        return spec.username if spec else f"user {user_id}"
