"""R10: credits that grow while the cluster is idle and halve while jobs wait."""

from __future__ import annotations

from scheduler.core.tunables import Tunables

_HALVING_SECONDS = 30.0  # while jobs keep waiting
_RESPITE_SECONDS = 1.0  # between the ends of two short queues


class BurstCredits:
    """One figure for everybody, in tokens per unit of weight."""

    def __init__(self, tunables: Tunables) -> None:
        self.beta = 0.0
        self.idle_since: float | None = None
        self.contended = False
        self.halved_at = float("-inf")
        self.tune(tunables)

    def tune(self, tunables: Tunables) -> None:
        self._rate = tunables.burst_credit_rate
        self._cap = tunables.burst_credit_cap

    def value(self, now: float) -> float:
        if self.idle_since is None:
            return self.beta
        return max(
            self.beta, min(self._cap, self.beta + max(0.0, now - self.idle_since) * self._rate)
        )

    def rest(self, now: float) -> None:
        """Nothing is queued or running any more."""
        self.idle_since = now

    def wake(self, now: float) -> None:
        """A job has come."""
        if self.beta < self._cap:
            self.beta = self.value(now)
        self.idle_since = None

    def after_pass(self, queued: int, now: float) -> None:
        """Halve when jobs are still waiting after everything was dispatched that could be."""
        if not queued:
            self.contended = False
            return
        pause = _HALVING_SECONDS if self.contended else _RESPITE_SECONDS
        self.contended = True
        if now - self.halved_at >= pause:
            self.beta *= 0.5
            self.halved_at = now

    def next_halving(self) -> float:
        """When that is; never: infinity."""
        halves = self.contended and self.beta
        return self.halved_at + _HALVING_SECONDS if halves else float("inf")
