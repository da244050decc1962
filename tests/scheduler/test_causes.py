"""The one cause of a slow request, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.causes import CAUSES, Facts, cause


def served(*, waited: float = 0.0, start: float = 0.1, answer: float = 1.0, **values: Any) -> Facts:
    """A streamed answer of 100 tokens, queued at 1000."""
    defaults: dict[str, Any] = {
        "outcome": "completed",
        "stream": True,
        "loaded_points": 100.0,
        "prompt_tokens": 20,
        "completion_tokens": 100,
        "queued_at": 1000.0,
        "dispatched_at": 1000.0 + waited,
        "first_token_at": 1000.0 + waited + start,
        "ended_at": 1000.0 + waited + start + answer,
    }
    return Facts(**{**defaults, **values})


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        pytest.param(served(), "", id="it was not slow"),
        pytest.param(served(waited=3.0, start=1.9), "", id="just fast enough"),
        pytest.param(served(answer=20.0), "", id="100 tokens may take 20 s"),
        pytest.param(served(waited=9, wait_reason="own_backlog"), "own_backlog", id="own backlog"),
        pytest.param(served(waited=9, wait_reason="others_ahead"), "others_ahead", id="others"),
        pytest.param(served(waited=9, wait_reason="paused"), "no_backend", id="disabled"),
        pytest.param(served(waited=9, wait_reason="backends_failed"), "no_backend", id="failed"),
        pytest.param(served(waited=9, wait_reason="no_memory"), "no_backend", id="no memory"),
        pytest.param(served(waited=9, wait_reason="backends_full"), "all_full", id="full"),
        pytest.param(
            served(waited=9, wait_reason="backends_full", served_ahead={"staff": (2, 50.0)}),
            "others_ahead",
            id="full, and others came in between",
        ),
        pytest.param(
            served(waited=9, wait_reason="backends_full", served_ahead={"staff": (0, 0.0)}),
            "all_full",
            id="full, and nobody came in between",
        ),
        pytest.param(served(start=6, loaded_points=0.0), "cold_load", id="cold load"),
        pytest.param(served(start=6, prompt_tokens=8000), "long_prompt", id="long prompt"),
        pytest.param(served(start=6, prompt_tokens=7999), "slow_backend", id="short prompt"),
        pytest.param(
            served(start=6, prompt_tokens=9000, cached_tokens=1001),
            "slow_backend",
            id="long prompt, most of it from the cache",
        ),
        pytest.param(served(start=6), "slow_backend", id="slow to begin"),
        pytest.param(served(answer=25.0), "slow_backend", id="100 tokens in 25 s"),
        pytest.param(
            served(waited=4, start=4.1, wait_reason="others_ahead"),
            "slow_backend",
            id="the longest stretch decides",
        ),
        pytest.param(
            served(waited=4, start=4, wait_reason="others_ahead"),
            "others_ahead",
            id="the first of equal stretches decides",
        ),
        pytest.param(
            served(
                waited=9,
                wait_reason="others_ahead",
                attempts=[(1001.0, 1007.0), (1009.0, None)],
            ),
            "slow_backend",
            id="6 s of the 9 went to a backend that failed",
        ),
        pytest.param(
            served(stream=False, first_token_at=1010.0, answer=20.0), "", id="a whole answer"
        ),
        pytest.param(
            served(stream=False, start=5, answer=20.0), "slow_backend", id="a late whole answer"
        ),
        pytest.param(
            Facts(
                outcome="refused",
                reason="queue_timeout",
                wait_reason="others_ahead",
                queued_at=1000.0,
                ended_at=1300.0,
            ),
            "others_ahead",
            id="waited for ever",
        ),
        pytest.param(
            Facts(outcome="refused", reason="model_not_found", ended_at=1.0),
            "no_backend",
            id="nobody has it",
        ),
        pytest.param(
            Facts(outcome="refused", reason="queue_full"), "", id="a refusal is no slow request"
        ),
    ],
)
def test_the_cause_of_a_slow_request_is_its_longest_stretch(facts: Facts, expected: str) -> None:
    assert cause(facts) == expected
    assert expected in {"", *CAUSES}
