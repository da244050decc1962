"""The arithmetic of limits: minutes, calendar budgets, requests at once."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from accounts.limits import (
    MINUTE,
    Hold,
    Holder,
    Ledger,
    LimitSet,
    Period,
    Refusal,
    period_bounds,
)

ADA, EVE, KEY = Holder("user", 1), Holder("user", 2), Holder("key", 7)
GROUP, MODEL = Holder("group", 3), Holder("model", "m")
BOTH = frozenset({"requests_per_minute", "max_concurrent"})
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp()
BERLIN = ZoneInfo("Europe/Berlin")


def ledger_of(limits: Mapping[Holder, LimitSet], zone: Any = UTC, wall: float = NOON) -> Ledger:
    ledger = Ledger(zone)
    ledger.configure(limits, wall)
    ledger.tell_used(
        {key: (start, 0.0) for key, start in ledger.unknown_budgets(wall).items()}, wall
    )
    return ledger


def one(
    ledger: Ledger, name: str, estimate: float = 1, *, at: float = 0.0, holder: Holder = ADA
) -> Hold | Refusal | None:
    return ledger.admit(name, [holder], estimate, at, NOON + at)


def passes(ledger: Ledger, name: str, estimate: float = 1, *, at: float = 0.0) -> Hold:
    answer = one(ledger, name, estimate, at=at)
    assert isinstance(answer, Hold), answer
    return answer


def refused(ledger: Ledger, name: str, estimate: float = 1, *, at: float = 0.0) -> Refusal:
    answer = one(ledger, name, estimate, at=at)
    assert isinstance(answer, Refusal), answer
    return answer


# ---- a minute


def test_a_minute_holds_its_limit_and_is_free_again_60_seconds_after_each() -> None:
    ledger = ledger_of({ADA: LimitSet(requests_per_minute=2)})
    passes(ledger, "a", at=0)
    passes(ledger, "b", at=20)
    no = refused(ledger, "c", at=30)
    assert (no.code, no.limit, no.value, no.used) == (
        "rate_limit_exceeded", "requests_per_minute", 2, 2,
    )  # fmt: skip
    assert no.wait_seconds == 30
    assert no.resets_at == NOON + 80
    refused(ledger, "c", at=59.9)
    passes(ledger, "c", at=60)
    assert refused(ledger, "d", at=61).wait_seconds == 19


def test_tokens_wait_for_as_many_to_leave_as_are_asked_for() -> None:
    ledger = ledger_of({ADA: LimitSet(tokens_per_minute=100)})
    passes(ledger, "a", 30, at=0)
    passes(ledger, "b", 30, at=10)
    passes(ledger, "c", 40, at=20)
    assert refused(ledger, "d", 50, at=30).wait_seconds == 40
    assert refused(ledger, "d", 30, at=30).wait_seconds == 30


def test_a_minute_counts_what_was_charged_instead_of_the_estimate() -> None:
    ledger = ledger_of({ADA: LimitSet(tokens_per_minute=100)})
    hold = passes(ledger, "a", 100)
    refused(ledger, "b", 1)
    ledger.settle(hold, 60.0, 5.0)
    assert refused(ledger, "b", 41, at=5).used == 60
    passes(ledger, "b", 40, at=5)


def test_what_can_never_fit_waits_for_nothing() -> None:
    ledger = ledger_of({ADA: LimitSet(tokens_per_minute=100, token_budget=50)})
    no = refused(ledger, "a", 101)
    assert no.wait_seconds is None
    assert not no.is_worth_waiting


# ---- requests at once


def test_what_ends_frees_its_place() -> None:
    ledger = ledger_of({ADA: LimitSet(max_concurrent=1)})
    hold = passes(ledger, "a")
    assert refused(ledger, "b").code == "concurrency_limit_exceeded"
    ledger.settle(hold, 0.0, 1.0)
    ledger.settle(hold, 0.0, 1.0)
    passes(ledger, "b")
    refused(ledger, "c")


def test_what_nobody_holds_any_more_is_released() -> None:
    ledger = ledger_of({ADA: LimitSet(max_concurrent=2, token_budget=100)})
    passes(ledger, "a", 40)
    passes(ledger, "b", 40)
    assert ledger.expire_orphans({"b"}, 1.0) == 1
    use = ledger.use_of(ADA, 1.0, NOON + 1)
    assert use is not None
    assert (use.running, use.budget_reserved, use.budget_used) == (1, 40, 0)


# ---- budgets


def test_a_budget_takes_what_equals_the_rest_and_not_one_token_more() -> None:
    ledger = ledger_of({ADA: LimitSet(token_budget=100)})
    first = passes(ledger, "a", 60)
    assert refused(ledger, "b", 41).code == "quota_exceeded"
    passes(ledger, "c", 40)
    ledger.settle(first, 10.0, 1.0)
    assert refused(ledger, "d", 51).used == 50
    passes(ledger, "d", 50)


def test_the_next_period_begins_with_nothing_used_and_owes_nothing_for_the_last() -> None:
    wall = datetime(2026, 6, 1, 23, 59, 59, tzinfo=UTC).timestamp()
    ledger = ledger_of({ADA: LimitSet(token_budget=100)}, wall=wall)
    late = ledger.admit("a", [ADA], 100, 0.0, wall)
    assert isinstance(late, Hold)
    early = ledger.admit("b", [ADA], 70, 1.0, wall + 1)
    assert isinstance(early, Hold)
    ledger.settle(late, 90.0, 2.0)
    ledger.settle(early, 20.0, 2.0)
    use = ledger.use_of(ADA, 2.0, wall + 2)
    assert use is not None
    assert (use.budget_used, use.budget_reserved) == (20, 0)


def test_a_clock_set_back_opens_no_budget_again() -> None:
    ledger = ledger_of({ADA: LimitSet(token_budget=100)})
    ledger.settle(passes(ledger, "a", 100), 100.0, 1.0)
    yesterday = ledger.admit("b", [ADA], 1, 2.0, NOON - 86400)
    assert isinstance(yesterday, Refusal)


def test_a_budget_made_longer_begins_with_what_is_told_of_it() -> None:
    ledger = ledger_of({ADA: LimitSet(token_budget=100, budget_period="day")})
    ledger.settle(passes(ledger, "a", 50), 50.0, 1.0)
    ledger.configure({ADA: LimitSet(token_budget=100, budget_period="month")}, NOON)
    [(name, start)] = ledger.unknown_budgets(NOON).items()
    assert (name, start) == ((ADA, "month"), datetime(2026, 6, 1, tzinfo=UTC).timestamp())
    ledger.tell_used({name: (start, 75.0)}, NOON)
    assert refused(ledger, "b", 26).used == 75
    assert ledger.unknown_budgets(NOON) == {}


def test_a_meter_forgotten_while_idle_keeps_its_budget() -> None:
    ledger = ledger_of({ADA: LimitSet(token_budget=100, requests_per_minute=9)})
    ledger.settle(passes(ledger, "a", 50), 50.0, 1.0)
    ledger.forget_idle(30.0, NOON + 30)
    assert ADA in ledger._meters  # a minute is not over
    ledger.forget_idle(61.0, NOON + 61)
    assert ADA not in ledger._meters
    assert refused(ledger, "b", 51, at=62).used == 50


def test_requests_under_way_count_for_limits_that_are_set_meanwhile() -> None:
    ledger = ledger_of({ADA: LimitSet(max_concurrent=5)})
    hold = passes(ledger, "a", 60)
    ledger.configure(
        {ADA: LimitSet(max_concurrent=5, token_budget=100), KEY: LimitSet(max_concurrent=1)}, NOON
    )
    ledger.tell_used({(ADA, "day"): (period_bounds(NOON, "day", UTC)[0], 0.0)}, NOON)
    assert ledger.adopt(hold, "a", [ADA, KEY], 60, 1.0, NOON + 1) is hold
    assert refused(ledger, "b", 41, at=1).used == 60
    assert isinstance(one(ledger, "b", at=1, holder=KEY), Refusal)
    ledger.settle(hold, 30.0, 2.0)
    assert isinstance(one(ledger, "b", at=2, holder=KEY), Hold)
    assert refused(ledger, "c", 71, at=2).used == 30


# ---- several limits


def test_one_limit_without_room_reserves_in_none() -> None:
    ledger = ledger_of({
        ADA: LimitSet(requests_per_minute=10),
        GROUP: LimitSet(token_budget=10),
        MODEL: LimitSet(max_concurrent=3),
    })  # fmt: skip
    assert isinstance(ledger.admit("a", [ADA, GROUP, MODEL], 11, 0.0, NOON), Refusal)
    for holder in (ADA, GROUP, MODEL):
        use = ledger.use_of(holder, 0.0, NOON)
        assert use is not None
        assert not use.requests_in_minute
        assert not use.running
        assert not use.budget_reserved


def test_of_several_limits_the_one_that_lasts_longest_is_told() -> None:
    ledger = ledger_of({
        ADA: LimitSet(requests_per_minute=1, max_concurrent=1),
        GROUP: LimitSet(token_budget=100),
    })  # fmt: skip
    ledger.admit("a", [ADA, GROUP], 100, 0.0, NOON)
    answer = ledger.admit("b", [ADA, GROUP], 1, 1.0, NOON + 1)
    assert isinstance(answer, Refusal)
    assert answer.limit == "token_budget"
    assert ledger.refused == {"token_budget": 1}


def test_shadow_refuses_nothing_and_tells_all() -> None:
    ledger = ledger_of({
        ADA: LimitSet(requests_per_minute=0, max_concurrent=0, shadow=BOTH),
        GROUP: LimitSet(max_concurrent=9),
    })  # fmt: skip
    answer = ledger.admit("a", [ADA, GROUP], 1, 0.0, NOON)
    assert isinstance(answer, Hold)
    assert [one.limit for one in answer.shadowed] == ["requests_per_minute", "max_concurrent"]


def test_a_limit_in_shadow_lets_none_pass_that_another_refuses() -> None:
    ledger = ledger_of({
        ADA: LimitSet(requests_per_minute=0, max_concurrent=1, shadow=BOTH - {"max_concurrent"}),
        GROUP: LimitSet(max_concurrent=0, shadow=BOTH),
    })  # fmt: skip
    first = ledger.admit("a", [ADA, GROUP], 1, 0.0, NOON)
    assert isinstance(first, Hold)
    assert [one.limit for one in first.shadowed] == ["requests_per_minute", "max_concurrent"]
    second = ledger.admit("b", [ADA, GROUP], 1, 0.0, NOON)
    assert isinstance(second, Refusal)
    assert (second.holder, second.limit) == (ADA, "max_concurrent")


def test_a_queue_bound_in_shadow_lets_wait_and_tells() -> None:
    ledger = ledger_of({ADA: LimitSet(max_queued=0, shadow=frozenset({"max_queued"}))})
    hold = ledger.admit("a", [ADA], 1, 0.0, NOON)
    assert isinstance(hold, Hold)
    assert hold.wait() is None
    assert [one.limit for one in hold.shadowed] == ["max_queued"]


# ---- periods

#: Both changes of 2026 in each, and how long those days are.
CHANGES = [
    ("Europe/Berlin", (2026, 3, 29), 23),
    ("Europe/Berlin", (2026, 10, 25), 25),
    ("America/Santiago", (2026, 4, 4), 25),  # at midnight, back into the old day
    ("America/Santiago", (2026, 9, 6), 23),  # midnight itself is skipped
    ("Australia/Lord_Howe", (2026, 4, 5), 24.5),
    ("Australia/Lord_Howe", (2026, 10, 4), 23.5),
    ("America/Havana", (2026, 3, 8), 23),
    ("America/Havana", (2026, 11, 1), 25),  # midnight comes twice
]


@pytest.mark.parametrize(("zone", "day", "hours"), CHANGES)
def test_a_day_is_as_long_as_its_clocks_make_it(
    zone: str, day: tuple[int, int, int], hours: float
) -> None:
    noon = datetime(*day, 12, tzinfo=ZoneInfo(zone)).timestamp()
    start, end = period_bounds(noon, "day", ZoneInfo(zone))
    assert (end - start) / 3600 == hours


@pytest.mark.parametrize(
    ("period", "start", "end"),
    [
        ("day", "2026-10-25T00:00:00+02:00", "2026-10-26T00:00:00+01:00"),
        ("week", "2026-10-19T00:00:00+02:00", "2026-10-26T00:00:00+01:00"),
        ("month", "2026-10-01T00:00:00+02:00", "2026-11-01T00:00:00+01:00"),
    ],
)
def test_periods_are_those_of_the_calendar(period: Period, start: str, end: str) -> None:
    """On the Sunday on which summer time ends."""
    found = period_bounds(datetime(2026, 10, 25, 12, tzinfo=BERLIN).timestamp(), period, BERLIN)
    assert [datetime.fromtimestamp(moment, BERLIN).isoformat() for moment in found] == [start, end]


moments = st.one_of(
    st.integers(1735689600, 1924992000),  # 2025–2030
    *(
        st.integers(-90000, 90000).map(
            lambda off, day=day, zone=zone: int(
                datetime(*day, tzinfo=ZoneInfo(zone)).timestamp() + off
            )
        )
        for zone, day, _ in CHANGES
    ),
)


@settings(max_examples=300, deadline=None)
@given(
    moment=moments,
    zone=st.sampled_from(sorted({zone for zone, _, _ in CHANGES})),
    period=st.sampled_from(["day", "week", "month"]),
)
def test_periods_follow_each_other_without_gap_or_overlap(
    moment: int, zone: str, period: Period
) -> None:
    place = ZoneInfo(zone)
    start, end = period_bounds(moment, period, place)
    assert start <= moment < end
    assert period_bounds(start, period, place) == (start, end)
    assert period_bounds(end - 1, period, place) == (start, end)
    assert period_bounds(end, period, place)[0] == end
    assert period_bounds(start - 1, period, place)[1] == start
    lengths = {"day": (1, 1), "week": (7, 7), "month": (28, 31)}[period]
    least, most = (timedelta(days=days).total_seconds() for days in lengths)
    assert least - 3600 <= end - start <= most + 3600


# ---- any history

SETS = st.builds(
    LimitSet,
    requests_per_minute=st.none() | st.integers(0, 6),
    tokens_per_minute=st.none() | st.integers(0, 60),
    max_concurrent=st.none() | st.integers(0, 4),
    token_budget=st.none() | st.integers(0, 200),
)


ENDS = ["settled", "left", "refused"]


class History(RuleBasedStateMachine):
    """Requests come and end in any order around the midnight on which clocks change."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.offset = datetime(2026, 10, 25, 23, 58, tzinfo=BERLIN).timestamp()
        self.limits: dict[Holder, LimitSet] = {}
        self.ledger = Ledger(BERLIN)
        self.open: dict[str, tuple[Hold, float, float, list[Holder]]] = {}
        #: {holder: [(admitted at, tokens reserved or charged, does it count)]}
        self.admitted: dict[Holder, dict[str, list[float]]] = {}
        self.number = 0

    @property
    def wall(self) -> float:
        return self.offset + self.now

    @initialize(ada=SETS, group=SETS, model=SETS)
    def configure(self, ada: LimitSet, group: LimitSet, model: LimitSet) -> None:
        wanted = {ADA: ada, GROUP: group, MODEL: model}
        self.limits = {holder: one for holder, one in wanted.items() if not one.is_empty}
        self.ledger.configure(self.limits, self.wall)
        unknown = self.ledger.unknown_budgets(self.wall)
        self.ledger.tell_used({key: (start, 0.0) for key, start in unknown.items()}, self.wall)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(estimate=st.integers(0, 50), group=st.booleans())
    def admit(self, estimate: int, group: bool) -> None:
        self.number += 1
        name, holders = str(self.number), [ADA, MODEL, *([GROUP] if group else [])]
        fits = all(self.has_room(holder, estimate) for holder in holders)
        answer = self.ledger.admit(name, holders, estimate, self.now, self.wall)
        if not any(holder in self.limits for holder in holders):
            assert answer is None
            return
        assert isinstance(answer, Hold) == fits
        if isinstance(answer, Hold):
            self.open[name] = answer, self.now, float(estimate), holders
            for holder in holders:
                self.admitted.setdefault(holder, {})[name] = [self.now, float(estimate), 1.0]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), charged=st.integers(0, 60), how=st.sampled_from(ENDS))
    def end(self, data: Any, charged: int, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        hold, _, _, holders = self.open.pop(name)
        if how == "settled":
            self.ledger.settle(hold, charged, self.now)
        else:
            charged = 0
            self.ledger.release(hold, self.now, counted=how == "left")
        for holder in holders:
            entry = self.admitted[holder][name]
            entry[1], entry[2] = float(charged), 0.0 if how == "refused" else 1.0

    def has_room(self, holder: Holder, estimate: float) -> bool:
        """The same told from the whole history."""
        limits = self.limits.get(holder)
        if limits is None:
            return True
        entries = self.admitted.get(holder, {}).values()
        recent = [one for one in entries if one[0] > self.now - MINUTE]
        start = period_bounds(self.wall, limits.budget_period, BERLIN)[0]
        spent = sum(tokens for at, tokens, _ in entries if self.offset + at >= start)
        at_once = sum(holder in holders for *_, holders in self.open.values())
        return not (
            _over(limits.requests_per_minute, sum(one[2] for one in recent) + 1)
            or _over(limits.tokens_per_minute, sum(one[1] for one in recent) + estimate)
            or _over(limits.max_concurrent, at_once + 1)
            or _over(limits.token_budget, spent + estimate)
        )

    @invariant()
    def nothing_is_reserved_when_nothing_runs(self) -> None:
        if not self.open:
            for holder in self.limits:
                use = self.ledger.use_of(holder, self.now, self.wall)
                assert use is not None
                assert use.running == 0
                assert not use.budget_reserved


def _over(limit: int | None, used: float) -> bool:
    return limit is not None and used > limit


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
