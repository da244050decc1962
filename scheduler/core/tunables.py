"""Every number of the scheduling rules that an admin may change, with the defaults of the rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunables:
    """Tokens, seconds and points; the rule that uses each is named beside it."""

    share_mode: Literal["user", "group"] = "user"  # R14
    #: R15: each end user of a trusted key weighs as much as its owner, or all of them together
    end_user_share: Literal["member", "split"] = "member"
    background_weight: float = 1.0  # R15: of a background call, per weight of who makes it
    quantum: float = 1000.0  # R2, tokens per unit of weight
    cost_input_token: float = 1.0  # R1
    cost_output_token: float = 1.0  # R1
    cost_cached_token: float | None = None  # R1; None = the input price
    debt_cap: float = 8192.0  # R7, R8, tokens
    fairness_window: float = 300.0  # R9, seconds
    deprioritize_threshold: float = 0.5  # R9, fraction of settled tokens
    burst_credit_rate: float = 100.0  # R10, tokens per idle second
    burst_credit_cap: float = 1000.0  # R10, tokens per unit of weight
    wait_bonus_rate: float = 1.0  # R11, tokens per second
    max_wait: float = 300.0  # R16, seconds
    max_queued: int | None = None  # R16, jobs in total; None = only the backends' bounds
    max_queued_per_user: int | None = None  # R16
    score_model_loaded: float = 100.0  # P2, points
    score_low_utilization: float = 50.0
    score_latency: float = 40.0
    score_short_queue: float = 30.0
    score_high_throughput: float = 20.0
    score_cache_affinity: float = 60.0  # P3
    backend_fail_window: float = 30.0  # P5, seconds
    backend_stale_after: float = 30.0  # P1, seconds
    backend_max_attempts: int = 3  # P6

    def cost(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> float:
        """R1, in tokens."""
        cached = min(cached_tokens, prompt_tokens)
        of_cached = self.cost_cached_token
        return (
            self.cost_input_token * (prompt_tokens - cached)
            + (self.cost_input_token if of_cached is None else of_cached) * cached
            + self.cost_output_token * completion_tokens
        )
