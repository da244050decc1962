"""The words about one decision; no database."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.explain import Case, duration, number, reason_in_words, sentence, served_ahead
from scheduler.explain_tables import (
    constraints,
    moments,
    priority_formula,
    priority_terms,
    scores,
    timeline,
)

NO_BREAK = "\N{NO-BREAK SPACE}"


def case(**values: Any) -> Case:
    """A request that waited 12.4 s and went to gpu-2."""
    defaults: dict[str, Any] = {
        "outcome": "completed",
        "model_requested": "llama3:70b",
        "selected_backend": "gpu-2",
        "selected_backend_id": 2,
        "candidate_backends": [1, 2],
        "backend_names": {"1": "gpu-1", "2": "gpu-2", "3": "gpu-3"},
        "scores": {"1": 188.0, "2": 247.5},
        "score_parts": {
            "1": {"model_loaded": 0.0, "latency": 38.0, "short_queue": 30.0, "priority": 120.0},
            "2": {"model_loaded": 100.0, "latency": 38.0, "short_queue": 9.5, "priority": 100.0},
        },
        "constraints": {"3": {"capacity": "8 of 8 slots in use"}},
        "selection_reason": "score",
        "wait_reason": "backends_full",
        "served_ahead": {"staff": [4, 900.0], "faculty": [31, 40000.0]},
        "arrived_at": 1000.0,
        "queued_at": 1000.1,
        "dispatched_at": 1012.5,
        "first_byte_at": 1013.0,
        "first_token_at": 1013.5,
        "ended_at": 1020.0,
    }
    return Case(**(defaults | values))


def refused(**values: Any) -> Case:
    return Case(outcome="refused", arrived_at=1000.0, ended_at=1000.003, **values)


def plain(text: str) -> str:
    return text.replace(NO_BREAK, " ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (-0.5, "0 ms"),
        (0.0032, "3 ms"),
        (0.9996, "1.0 s"),
        (12.41, "12.4 s"),
        (99.96, "1 min 40 s"),
        (125, "2 min 5 s"),
        (300, "5 min"),
    ],
)
def test_durations_carry_their_unit(seconds, text):
    assert plain(duration(seconds)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (3.0, "3"), (-1234.5, "−1,234.5"), (-0.01, "0"), (0.25, "0.2"), (1000, "1,000")],
)
def test_numbers_are_shown_without_needless_zeros(value, text):
    assert number(value) == text


def test_a_wait_and_a_placement_are_told_in_one_sentence():
    assert plain(sentence(case())) == (
        "Waited 12.4 s because all backends with llama3:70b were full; "
        "31 requests of faculty and 4 of staff were served ahead; "
        "went to gpu-2: model loaded (247.5 points, next gpu-1 with 188)."
    )


def test_a_request_that_found_a_slot_did_not_wait():
    told = sentence(case(dispatched_at=1000.102, wait_reason="none", served_ahead={}))
    assert told.startswith("Did not wait; went to gpu-2: ")


def test_one_request_ahead_is_told_in_the_singular():
    told = sentence(case(served_ahead={"": [1, 20.0]}))
    assert "1 request of users without a group was served ahead" in told


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("others_ahead", "because others were owed more;"),
        ("own_backlog", "because earlier requests of the same user came first;"),
        ("paused", "because all backends with llama3:70b were disabled, draining or down;"),
        ("solar_flare", "because solar flare;"),
    ],
)
def test_every_wait_says_why(reason, words):
    assert words in sentence(case(wait_reason=reason))


def test_a_model_name_with_braces_is_harmless():
    assert "with {0} were full" in sentence(case(model_requested="{0}"))


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("affinity", "went to gpu-2: the backend of this conversation's cache."),
        ("round_robin", "went to gpu-2: its turn among equals."),
        ("only_candidate", "went to gpu-2: the only one that could take it."),
        ("fail_open", "went to gpu-2: all had failed, so the best ranked was tried."),
    ],
)
def test_every_choice_says_why(reason, words):
    assert sentence(case(selection_reason=reason)).endswith(words)


def test_a_retry_names_the_backends_that_failed_before():
    attempts = [
        {"backend": "gpu-1", "reason": "upstream_connect_failed"},
        {"backend": "gpu-2", "reason": ""},
    ]
    told = sentence(case(attempts=attempts, selection_reason="only_candidate"))
    assert "went to gpu-2 after gpu-1 (the backend did not take the connection) failed:" in told


@pytest.mark.parametrize(
    ("values", "ending"),
    [
        (
            {"outcome": "cancelled", "reason": "client_disconnected", "completion_tokens": 40},
            "; the client left after 40 tokens.",
        ),
        (
            {"outcome": "failed", "reason": "upstream_ended_early"},
            "; failed: the backend ended the answer early.",
        ),
        ({"outcome": "aborted"}, "; the router's process died before the answer had ended."),
    ],
)
def test_a_bad_end_is_told_too(values, ending):
    assert sentence(case(**values)).endswith(ending)


def test_a_refusal_is_told_with_its_reason():
    assert sentence(refused(reason="queue_full")) == "Refused at once: the queue was full."
    assert sentence(refused(message="No.")) == "Refused at once: No."


def test_leaving_the_queue_is_told_with_its_reason():
    left = case(
        outcome="cancelled",
        reason="client_disconnected",
        dispatched_at=None,
        ended_at=1003.3,
        served_ahead={},
    )
    assert plain(sentence(left)) == (
        "Waited 3.2 s because all backends with llama3:70b were full; "
        "left the queue without being served: the client left."
    )


def test_an_unknown_reason_is_shown_in_its_own_words():
    assert reason_in_words("moon_phase_wrong") == "moon phase wrong"


def test_those_ahead_are_listed_most_first():
    assert [(row.group, row.jobs, row.tokens) for row in served_ahead(case())] == [
        ("faculty", 31, 40000.0),
        ("staff", 4, 900.0),
    ]


def test_the_timeline_is_to_scale():
    parts = timeline(case())
    assert [(part.name, round(part.seconds, 6)) for part in parts] == [
        ("before the queue", 0.1),
        ("in the queue", 12.4),
        ("until the first byte", 0.5),
        ("until the first token", 0.5),
        ("answer", 6.5),
    ]
    assert [(round(part.left, 6), round(part.width, 6)) for part in parts] == [
        (0.0, 0.5),
        (0.5, 62.0),
        (62.5, 2.5),
        (65.0, 2.5),
        (67.5, 32.5),
    ]


def test_a_clock_that_went_back_shows_no_negative_time():
    assert [moment.after for moment in moments(case(first_byte_at=1001.0))] == pytest.approx(
        [0.0, 0.1, 12.5, 12.5, 13.5, 20.0]
    )


def test_a_refusal_has_a_timeline_of_one_part():
    parts = timeline(refused())
    assert [(part.name, part.left, part.width) for part in parts] == [("before the queue", 0, 100)]


def test_the_constraint_table_has_the_chosen_backend_first_and_the_failed_ones_last():
    assert [(row.name, row.selected, row.failures) for row in constraints(case())] == [
        ("gpu-2", True, []),
        ("gpu-1", False, []),
        ("gpu-3", False, ["capacity: 8 of 8 slots in use"]),
    ]


def test_constraints_show_numbers_and_bare_facts():
    looked = case(
        constraints={"3": {"context_length": 4096, "enabled": "is draining", "odd_rule": None}}
    )
    assert constraints(looked)[-1].failures == [
        "context length: 4,096",
        "in service: is draining",
        "odd rule",
    ]


def test_the_score_table_has_the_chosen_backend_first():
    table = scores(case())
    assert table is not None
    assert (table.backends, table.totals) == (["gpu-2", "gpu-1"], ["247.5", "188"])
    assert table.rows[0] == ("model loaded", ["100", "0"])
    assert scores(refused()) is None


def test_a_negative_base_is_divided_by_the_factor():
    heavy = case(
        user_deficit=-1000.0,
        burst_credits=400.0,
        user_weight=3.0,
        deprioritization_factor=0.5,
        wait_bonus=12.0,
        priority=-388.0,  # (-1000 + 400) / 3 / 0.5 + 12
    )
    assert priority_formula(heavy) == "(−1,000 + 400) ÷ 3 ÷ 0.5 + 12 = −388"
    assert [term.name for term in priority_terms(heavy)] == [
        "deficit",
        "burst_credits",
        "weight",
        "deprioritization_factor",
        "wait_bonus",
        "priority",
    ]


def test_a_positive_base_is_multiplied_and_weight_zero_divides_by_one():
    background = case(user_deficit=600.0, user_weight=0.0, wait_bonus=1.0, priority=601.0)
    assert priority_formula(background) == "(600 + 0) ÷ 1 × 1 + 1 = 601"


def test_without_a_choice_there_is_no_priority():
    assert (priority_formula(refused()), priority_terms(refused())) == ("", [])
