"""Limits where jobs are admitted: the ledger, on the clocks and the configuration in force."""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from django.conf import settings

from accounts.limits import Hold, Holder, Ledger, Period, Refusal, Use
from scheduler.budgets import load_used, site_zone
from scheduler.core.errors import Rejected
from scheduler.core.jobs import Job
from scheduler.serving import Limited
from scheduler.snapshot import Snapshot

FORGET_SECONDS = 60.0
_Used = Mapping[tuple[Holder, Period], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Unknown:
    """Budgets whose use so far is to be read: of requests before then and not under way."""

    wanted: Mapping[tuple[Holder, Period], float]
    before: float
    under_way: frozenset[str]


class Admission:
    """The limits of everything that one scheduler serves. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.zone = site_zone()
        self.ledger = Ledger(self.zone)
        self.unknown: list[Unknown] = []
        self.has_limits = False  # whether anybody has one
        self._snapshot = Snapshot()
        self._forgot_at = 0.0

    # ---- configuration

    def configure(
        self,
        snapshot: Snapshot,
        held: Mapping[str, tuple[Hold | None, Job]],
        under_way: Iterable[str],
        now: float,
    ) -> dict[str, Hold]:
        """Take up the limits in force, also for jobs that were admitted before.

        ``held``: {request id: what it holds, its job} of these; the same is returned, as it is
        then. ``under_way``: the ids of all requests that have come and not ended.
        """
        self._snapshot = snapshot
        wall = time.time()
        self.ledger.configure(snapshot.limits, wall)
        self.has_limits = not self.ledger.is_empty
        asked = {name for one in self.unknown for name in one.wanted}
        unknown = self.ledger.unknown_budgets(wall)
        if new := {name: start for name, start in unknown.items() if name not in asked}:
            self.unknown.append(Unknown(new, wall, frozenset(under_way)))
        if self.ledger.is_empty:
            return {}
        found = {}
        for request_id, (before, job) in held.items():
            hold = self.adopt(before, job, now)
            if hold is not None:
                found[request_id] = hold
        return found

    def adopt(self, hold: Hold | None, job: Job, now: float) -> Hold | None:
        """What a job holds that was admitted before, whatever the limits say to it."""
        if self.ledger.is_empty:
            return hold
        estimate = self.estimate(job)
        return self.ledger.adopt(
            hold, job.request_id, self._holders(job), estimate, now, time.time()
        )

    def restore(self, budgets: list[Any]) -> None:
        """What another process knew to be used, as ``Ledger.budgets``; of others the database is
        to be asked."""
        known = self.ledger.restore(budgets, time.time())
        self.unknown = [
            replace(one, wanted={k: v for k, v in one.wanted.items() if k not in known})
            for one in self.unknown
        ]

    def leave_out(self, request_ids: Collection[str]) -> None:
        """These are counted here, and not to be read from the database as well."""
        self.unknown = [
            replace(one, under_way=one.under_way.union(request_ids)) for one in self.unknown
        ]

    def tell_used(self, found: Iterable[tuple[Unknown, _Used]]) -> None:
        """What ``load_unknown`` has found; what was told meanwhile is not told twice."""
        for one, told in found:
            if one in self.unknown:
                self.unknown.remove(one)
                self.ledger.tell_used(told, time.time())

    # ---- a job's way

    def admit(self, job: Job, now: float) -> Hold | Refusal | None:
        """Reserve what the job may use. None: no limit concerns it."""
        if self.ledger.is_empty:
            return None
        holders = self._holders(job)
        return self.ledger.admit(job.request_id, holders, self.estimate(job), now, time.time())

    def reached(self, refusal: Refusal, retry_after: int | None = None) -> Rejected:
        """The error of a refusal; ``retry_after`` in seconds, if more is known than it says."""
        wait = refusal.wait_seconds
        seconds = 60 if wait is None else min(60, int(wait) + 1)
        return Rejected(
            refusal.code,
            refusal.message(self.zone),
            retry_after or seconds,
            hopeless=not refusal.is_worth_waiting,
        )

    def limited(self, hold: Hold, now: float) -> Limited:
        requests, tokens = self.ledger.standings(hold, now, time.time())
        shadowed = tuple(one.described(self.zone) for one in hold.shadowed)
        return Limited(requests, tokens, shadowed)

    def estimate(self, job: Job) -> float:
        """Tokens that the job may use, reserved until it is known what it did use."""
        output = job.max_tokens
        if output is None:
            output = int(settings.QUOTA_DEFAULT_OUTPUT_TOKENS)
            spec = self._snapshot.models.get(job.model_name)
            if spec is not None and spec.context_length is not None:
                output = max(0, min(output, spec.context_length - job.prompt_tokens))
        return float(job.prompt_tokens + output)

    def _holders(self, job: Job) -> list[Holder]:
        snapshot = self._snapshot
        spec = snapshot.models.get(job.model_name)
        holders = [
            Holder("key", job.key_id),
            Holder("user", job.user_id),
            Holder("model", job.model_name if spec is None else spec.name),
        ]
        user = snapshot.users.get(job.user_id)
        if user is not None and user.group_id is not None:
            holders.append(Holder("group", user.group_id))
        return holders

    # ---- background, and looking

    def tidy(self, alive: Container[str], now: float) -> int:
        """Release what nobody holds any more, and forget what is empty. Returns the orphans."""
        orphans = self.ledger.expire_orphans(alive, now)
        if now - self._forgot_at >= FORGET_SECONDS:
            self._forgot_at = now
            self.ledger.forget_idle(now, time.time())
        return orphans

    def use_of(self, holders: Iterable[Holder]) -> list[Use]:
        """Of those that have limits."""
        now, wall = time.monotonic(), time.time()
        found = (self.ledger.use_of(holder, now, wall) for holder in holders)
        return [use for use in found if use is not None]


def load_unknown(unknown: Iterable[Unknown], spool: Path) -> list[tuple[Unknown, _Used]]:
    """What has been used so far, from the database. Raises: DatabaseError."""
    return [(one, load_used(one.wanted, one.before, one.under_way, spool)) for one in unknown]
