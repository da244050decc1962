"""What may still be used: requests and tokens a minute, requests at once, token budgets. PURE.

Limits are set on *holders*: a key, a user, a group as a whole, a model. A request is admitted when
every limit of every holder that it concerns has room for it, and then reserves in all of them, in
one step: nothing is reserved by one that is refused. What it was charged replaces the estimate at
its end.

A minute is any 60 seconds: a request counts in the minute that follows its admission, so no
stretch of 60 seconds ever holds more than the limit. Tokens beyond the estimate are counted all
the same, and may exceed a limit by what the admitted requests were underestimated. A budget's
period is a calendar day, week (from Monday) or month in the site's zone; a request belongs to the
period in which it was admitted.

``now`` is monotonic seconds, ``wall`` seconds of the epoch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, tzinfo
from typing import Any, Literal, NamedTuple

MINUTE = 60.0
#: Refusals that end later than this are not worth waiting for.
WORTH_WAITING_SECONDS = 60.0

Kind = Literal["key", "user", "group", "model"]
Period = Literal["day", "week", "month"]


class Holder(NamedTuple):
    """Whose limit it is: the number of a key, user or group, or the name of a model."""

    kind: Kind
    ident: int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSet:
    """The limits of one holder. None: no limit; 0: nothing.

    Those in ``shadow``, by their names, refuse nothing and tell what they would have refused.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    token_budget: int | None = None
    budget_period: Period = "day"
    max_queued: int | None = None
    shadow: frozenset[str] = frozenset()

    @property
    def is_empty(self) -> bool:
        return (
            self.requests_per_minute is None
            and self.tokens_per_minute is None
            and self.max_concurrent is None
            and self.token_budget is None
            and self.max_queued is None
        )


def period_bounds(wall: float, period: Period, zone: tzinfo) -> tuple[float, float]:
    """The calendar period that holds ``wall``: its first moment and the next one's.

    A day is as long as the zone's clocks make it: 23, 24 or 25 hours, and other lengths elsewhere.
    Where the clocks skip midnight the day begins when they do, where they repeat it with the first.
    """
    day = datetime.fromtimestamp(wall, zone).date()
    if period == "week":
        first = day - timedelta(days=day.weekday())
        following = first + timedelta(days=7)
    elif period == "month":
        first = day.replace(day=1)
        following = (first + timedelta(days=32)).replace(day=1)
    else:
        first, following = day, day + timedelta(days=1)
    return _midnight(first, zone), _midnight(following, zone)


def _midnight(day: date, zone: tzinfo) -> float:
    return datetime.combine(day, time(), zone).timestamp()


@dataclass(frozen=True, slots=True)
class Refusal:
    """The limit that has no room, and how it stands.

    ``wait_seconds``: until this request would fit as far as can be told; None: it never will.
    ``resets_at``: when the minute or the period is over for all that is in it, epoch seconds.
    """

    code: str
    limit: str  # named like the field
    holder: Holder
    value: int
    used: float  # reservations included
    asked: float
    wait_seconds: float | None
    resets_at: float | None
    period: Period | None = None

    @property
    def is_worth_waiting(self) -> bool:
        return self.wait_seconds is not None and self.wait_seconds <= WORTH_WAITING_SECONDS

    def message(self, zone: tzinfo) -> str:
        """Names the limit, its value, what is used and when it resets."""
        per = f" per {self.period}" if self.period else ""
        told = f"{_WHOSE[self.holder.kind].format(self.holder.ident)} limit {self.limit} is "
        told += f"{self.value}{per}, of which {self.used:.15g} "
        told += "is used or reserved" if self.asked != 1.0 or self.period else "is used"
        if self.asked != 1.0 or self.period:
            told += f"; this request needs up to {self.asked:.15g}"
        if self.wait_seconds is None:
            return f"{told}, which is more than the limit."
        if self.resets_at is None:
            return f"{told}; it resets as requests end."
        return f"{told}; it resets at {iso(self.resets_at, zone)}."

    def described(self, zone: tzinfo) -> dict[str, str | float | None]:
        """As JSON values."""
        return {
            "holder": self.holder.kind,
            "limit": self.limit,
            "value": self.value,
            "used": self.used,
            "asked": self.asked,
            "resets_at": None if self.resets_at is None else iso(self.resets_at, zone),
        }


_WHOSE: Mapping[Kind, str] = {
    "key": "Your key's",
    "user": "Your",
    "group": "Your group's",
    "model": "The model {}'s",
}


def iso(moment: float, zone: tzinfo) -> str:
    """Epoch seconds as ISO 8601 in a zone, to the second."""
    return datetime.fromtimestamp(round(moment), zone).isoformat()


class Standing(NamedTuple):
    """How a limit stands; ``reset_seconds`` until nothing of it is used any more."""

    limit: int
    remaining: float
    reset_seconds: float


class _Entry:
    """What one request has of a minute."""

    __slots__ = ("amount", "at")

    def __init__(self, at: float, amount: float) -> None:
        self.at = at
        self.amount = amount


class Window:
    """What was admitted in the last 60 seconds."""

    __slots__ = ("_entries", "total")

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        self.total = 0.0

    def expire(self, now: float) -> None:
        entries = self._entries
        while entries and entries[0].at <= now - MINUTE:
            self.total -= entries.popleft().amount
        if not entries:
            self.total = 0.0  # without what adding and taking away fractions leaves

    def add(self, amount: float, now: float) -> _Entry:
        entry = _Entry(now, amount)
        self._entries.append(entry)
        self.total += amount
        return entry

    def correct(self, entry: _Entry, amount: float, now: float) -> None:
        """Another amount for an entry, if it is still in the window."""
        self.expire(now)
        if entry.at > now - MINUTE:
            self.total += amount - entry.amount
            entry.amount = amount

    def seconds_until(self, room: float, now: float) -> float:
        """Until at most ``room`` is used."""
        used, left_at = self.total, now
        for entry in self._entries:
            if used <= room:
                break
            used -= entry.amount
            left_at = entry.at + MINUTE
        return max(0.0, left_at - now)

    def reset_seconds(self, now: float) -> float:
        """Until the window is empty."""
        return self._entries[-1].at + MINUTE - now if self._entries else 0.0


class Budget:
    """Tokens of a calendar period: used, and reserved by what runs."""

    __slots__ = ("_zone", "end", "period", "reserved", "start", "used")

    def __init__(self, period: Period, zone: tzinfo, wall: float) -> None:
        self.period: Period = period
        self._zone = zone
        self._begin(wall)

    def _begin(self, wall: float) -> None:
        self.start, self.end = period_bounds(wall, self.period, self._zone)
        self.used = self.reserved = 0.0

    def turn(self, wall: float) -> None:
        """Begin anew when the period is over. A clock set back changes nothing."""
        if wall >= self.end:
            self._begin(wall)


class Meter:
    """What one holder uses of its limits."""

    __slots__ = ("budget", "holder", "limits", "requests", "running", "tokens", "waiting")

    def __init__(self, holder: Holder, limits: LimitSet) -> None:
        self.holder = holder
        self.limits = limits
        self.running = 0  # admitted and not ended
        self.waiting = 0  # of these: in the queue
        self.requests: Window | None = None
        self.tokens: Window | None = None
        self.budget: Budget | None = None

    def fit(self, limits: LimitSet, zone: tzinfo, wall: float) -> None:
        """Take up changed limits; what is measured already goes on being measured."""
        self.limits = limits
        self.requests = _window(limits.requests_per_minute, self.requests)
        self.tokens = _window(limits.tokens_per_minute, self.tokens)
        if limits.token_budget is None:
            self.budget = None
        elif self.budget is None or self.budget.period != limits.budget_period:
            self.budget = Budget(limits.budget_period, zone, wall)

    def advance(self, now: float, wall: float) -> None:
        if self.requests is not None:
            self.requests.expire(now)
        if self.tokens is not None:
            self.tokens.expire(now)
        if self.budget is not None:
            self.budget.turn(wall)

    @property
    def is_idle(self) -> bool:
        return not self.running and not any(
            window is not None and window.total for window in (self.requests, self.tokens)
        )

    # ---- checks

    def refusals(self, estimate: float, now: float, wall: float) -> Iterator[Refusal]:
        """Every limit that has no room for one request of so many tokens."""
        limits = self.limits
        if self.requests is not None and limits.requests_per_minute is not None:
            limit = limits.requests_per_minute
            if self.requests.total + 1 > limit:
                yield self._of_window("requests_per_minute", self.requests, limit, 1.0, now, wall)
        if self.tokens is not None and limits.tokens_per_minute is not None:
            limit = limits.tokens_per_minute
            if self.tokens.total + estimate > limit:
                yield self._of_window("tokens_per_minute", self.tokens, limit, estimate, now, wall)
        limit_at_once = limits.max_concurrent
        if limit_at_once is not None and self.running >= limit_at_once:
            yield Refusal(
                "concurrency_limit_exceeded", "max_concurrent", self.holder, limit_at_once,
                self.running, 1.0, 1.0 if limit_at_once else None, None,
            )  # fmt: skip
        if self.budget is not None and limits.token_budget is not None:
            budget = self.budget
            used = budget.used + budget.reserved
            if used + estimate > limits.token_budget:
                fits = estimate <= limits.token_budget
                yield Refusal(
                    "quota_exceeded", "token_budget", self.holder, limits.token_budget,
                    used, estimate, budget.end - wall if fits else None, budget.end, budget.period,
                )  # fmt: skip

    def _of_window(
        self, name: str, window: Window, limit: int, asked: float, now: float, wall: float
    ) -> Refusal:
        fits = asked <= limit
        return Refusal(
            "rate_limit_exceeded", name, self.holder, limit, window.total, asked,
            window.seconds_until(limit - asked, now) if fits else None,
            wall + window.reset_seconds(now),
        )  # fmt: skip

    # ---- looking

    def request_standing(self, now: float) -> Standing | None:
        limit = self.limits.requests_per_minute
        if self.requests is None or limit is None:
            return None
        return Standing(
            limit, max(0.0, limit - self.requests.total), self.requests.reset_seconds(now)
        )

    def token_standings(self, now: float, wall: float) -> Iterator[Standing]:
        limit = self.limits.tokens_per_minute
        if self.tokens is not None and limit is not None:
            left = max(0.0, limit - self.tokens.total)
            yield Standing(limit, left, self.tokens.reset_seconds(now))
        limit, budget = self.limits.token_budget, self.budget
        if budget is not None and limit is not None:
            left = max(0.0, limit - budget.used - budget.reserved)
            yield Standing(limit, left, budget.end - wall)


def _window(limit: int | None, window: Window | None) -> Window | None:
    return None if limit is None else window or Window()


class _Share:
    """What a request holds of one meter."""

    __slots__ = ("budget", "meter", "period_start", "request", "tokens")

    def __init__(self, meter: Meter, estimate: float, now: float) -> None:
        self.meter = meter
        meter.running += 1
        self.request = None if meter.requests is None else meter.requests.add(1.0, now)
        self.tokens = None if meter.tokens is None else meter.tokens.add(estimate, now)
        self.budget: Budget | None = None
        self.period_start = 0.0
        self.join_budget(estimate)

    def join_budget(self, estimate: float) -> None:
        """Reserve in the meter's budget, which may be another one than when it was admitted."""
        budget = self.meter.budget
        if budget is not self.budget:
            self.budget = budget
            if budget is not None:
                self.period_start = budget.start
                budget.reserved += estimate

    def end(self, estimate: float, charged: float, now: float, *, counted: bool) -> None:
        meter, budget = self.meter, self.budget
        meter.running -= 1
        if meter.tokens is not None and self.tokens is not None:
            meter.tokens.correct(self.tokens, charged, now)
        if not counted and meter.requests is not None and self.request is not None:
            meter.requests.correct(self.request, 0.0, now)
        if budget is not None and self.period_start == budget.start:  # else that period is over
            budget.reserved -= estimate
            budget.used += charged


class Hold:
    """What one admitted request has reserved, until it ends."""

    __slots__ = ("_shares", "estimate", "queued", "request_id", "shadowed")

    def __init__(self, request_id: str, estimate: float, shadowed: tuple[Refusal, ...]) -> None:
        self.request_id = request_id
        self.estimate = estimate
        self.shadowed = shadowed  # what limits in shadow would have refused it for
        self.queued = False
        self._shares: list[_Share] = []

    @property
    def meters(self) -> list[Meter]:
        return [share.meter for share in self._shares]

    def reserve(self, meters: Iterable[Meter], now: float) -> None:
        self._shares += [_Share(meter, self.estimate, now) for meter in meters]

    def join_budgets(self) -> None:
        """Reserve in budgets that were set since."""
        for share in self._shares:
            share.join_budget(self.estimate)

    def end(self, charged: float, now: float, *, counted: bool) -> None:
        self.proceed()
        for share in self._shares:
            share.end(self.estimate, charged, now, counted=counted)
        self._shares = []

    def wait(self) -> Refusal | None:
        """It has to wait in the queue. Returns the bound of a key or model that is reached."""
        for share in self._shares:
            meter = share.meter
            bound = meter.limits.max_queued
            if bound is not None and meter.waiting >= bound:
                full = Refusal(
                    "queue_full", "max_queued", meter.holder, bound, meter.waiting, 1.0, 1.0, None
                )
                if "max_queued" not in meter.limits.shadow:
                    return full
                self.shadowed += (full,)
        self.queued = True
        for share in self._shares:
            share.meter.waiting += 1
        return None

    def proceed(self) -> None:
        """It waits no more."""
        if self.queued:
            self.queued = False
            for share in self._shares:
                share.meter.waiting -= 1


class Use(NamedTuple):
    """How much of its limits a holder uses now. Windows and budget are None without a limit."""

    holder: Holder
    limits: LimitSet
    running: int
    waiting: int
    requests_in_minute: float | None
    tokens_in_minute: float | None
    budget_used: float | None
    budget_reserved: float | None
    budget_resets_at: float | None


class Ledger:
    """The use of every limit there is. Not thread-safe.

    Meters are made when they are first needed and dropped when nothing is in them, so the many
    members of a group with limits cost nothing until they come.
    """

    def __init__(self, zone: tzinfo) -> None:
        self._zone = zone
        self._limits: Mapping[Holder, LimitSet] = {}
        self._meters: dict[Holder, Meter] = {}
        self._used: dict[Holder, tuple[float, float]] = {}  # {holder: (period's start, tokens)}
        self._budgets: set[tuple[Holder, Period]] = set()
        #: Budgets whose use so far is known; replaced as a whole, as ``budgets`` looks at it later.
        self._known: frozenset[tuple[Holder, Period]] = frozenset()
        self._holds: dict[str, Hold] = {}
        self.refused: Counter[str] = Counter()  # {limit: requests}, since the start
        self.shadowed: Counter[str] = Counter()

    @property
    def is_empty(self) -> bool:
        """Whether nobody has a limit."""
        return not self._limits

    # ---- configuration

    def configure(self, limits: Mapping[Holder, LimitSet], wall: float) -> None:
        """Take up changed limits. See ``adopt`` and ``unknown_budgets`` for what is to follow."""
        self._limits = limits
        for holder, meter in list(self._meters.items()):
            wanted = limits.get(holder)
            if wanted is None:
                del self._meters[holder]
            elif wanted != meter.limits:
                meter.fit(wanted, self._zone, wall)
        self._budgets = {
            (holder, one.budget_period)
            for holder, one in limits.items()
            if one.token_budget is not None
        }
        for holder, _ in self._known - self._budgets:
            self._used.pop(holder, None)
        self._known &= frozenset(self._budgets)

    def unknown_budgets(self, wall: float) -> dict[tuple[Holder, Period], float]:
        """{(holder, period): its start} of budgets whose use so far was never told."""
        return {
            (holder, period): period_bounds(wall, period, self._zone)[0]
            for holder, period in self._budgets - self._known
        }

    def tell_used(
        self, told: Mapping[tuple[Holder, Period], tuple[float, float]], wall: float
    ) -> None:
        """{(holder, period): (its start, tokens used in it)} beyond what was settled here."""
        self._known |= told.keys() & self._budgets  # else the limit has changed meanwhile
        for (holder, period), (start, tokens) in told.items():
            if (holder, period) not in self._budgets:
                continue
            if start != period_bounds(wall, period, self._zone)[0]:
                continue  # the period has turned meanwhile
            meter = self._meters.get(holder)
            if meter is None:
                before, settled = self._used.get(holder, (start, 0.0))
                self._used[holder] = start, tokens + (settled if before == start else 0.0)
            elif meter.budget is not None:
                meter.budget.turn(wall)
                meter.budget.used += tokens

    def budgets(self) -> Iterator[list[Any]]:
        """[kind, holder, period, its start, tokens used] of all that is known to be used now,
        whenever they are taken."""
        used, known = dict(self._used), self._known
        for holder, meter in self._meters.items():
            if meter.budget is not None:
                used[holder] = meter.budget.start, meter.budget.used
        return (
            [holder.kind, holder.ident, period, *used[holder]]
            for holder, period in known
            if holder in used
        )

    def restore(self, budgets: Iterable[Any], wall: float) -> set[tuple[Holder, Period]]:
        """Take up ``budgets`` of another ledger; returns those whose use is known by it."""
        told = {
            (Holder(kind, ident), period): (start, used)
            for kind, ident, period, start, used in budgets
        }
        self.tell_used(told, wall)
        return told.keys() & self._known

    def adopt(
        self, hold: Hold | None, request_id: str, holders: Iterable[Holder], estimate: float,
        now: float, wall: float,
    ) -> Hold | None:  # fmt: skip
        """Count a request that was admitted before these limits were set."""
        held = set() if hold is None else set(hold.meters)
        missing = [meter for meter in self._meters_of(holders, wall) if meter not in held]
        if missing:
            if hold is None:
                hold = self._holds[request_id] = Hold(request_id, estimate, ())
            hold.reserve(missing, now)
        if hold is not None:
            hold.join_budgets()
        return hold

    # ---- a request's way

    def admit(
        self, request_id: str, holders: Iterable[Holder], estimate: float, now: float, wall: float
    ) -> Hold | Refusal | None:
        """Check all limits, then reserve in all. None: no limit concerns the request.

        Of several limits without room the one is told that lasts longest.
        """
        meters = self._meters_of(holders, wall)
        if not meters:
            return None
        refused: list[Refusal] = []
        shadowed: list[Refusal] = []
        for meter in meters:
            meter.advance(now, wall)
            for one in meter.refusals(estimate, now, wall):
                (shadowed if one.limit in meter.limits.shadow else refused).append(one)
        if refused:
            worst = max(refused, key=_lasts)
            self.refused[worst.limit] += 1
            return worst
        for one in shadowed:
            self.shadowed[one.limit] += 1
        hold = self._holds[request_id] = Hold(request_id, estimate, tuple(shadowed))
        hold.reserve(meters, now)
        return hold

    def settle(self, hold: Hold, charged: float, now: float) -> None:
        """The request has ended and was charged so much. A second call changes nothing."""
        self._holds.pop(hold.request_id, None)
        hold.end(charged, now, counted=True)

    def release(self, hold: Hold, now: float, *, counted: bool) -> None:
        """It ended without charge. Not ``counted``: it was refused, and uses nothing at all."""
        self._holds.pop(hold.request_id, None)
        hold.end(0.0, now, counted=counted)

    def expire_orphans(self, alive: Container[str], now: float) -> int:
        """Release what requests hold that are not among the ``alive`` ones; returns how many."""
        orphans = [hold for request_id, hold in self._holds.items() if request_id not in alive]
        for hold in orphans:
            self.release(hold, now, counted=True)
        return len(orphans)

    def forget_idle(self, now: float, wall: float) -> None:
        """Drop the meters that nothing is in; what is used of budgets stays known."""
        for holder, meter in list(self._meters.items()):
            meter.advance(now, wall)
            if meter.is_idle:
                del self._meters[holder]
                if meter.budget is not None:
                    self._used[holder] = meter.budget.start, meter.budget.used

    def _meters_of(self, holders: Iterable[Holder], wall: float) -> list[Meter]:
        limits = self._limits
        return [self._meter(holder, wall) for holder in holders if holder in limits]

    def _meter(self, holder: Holder, wall: float) -> Meter:
        meter = self._meters.get(holder)
        if meter is None:
            meter = self._meters[holder] = Meter(holder, self._limits[holder])
            meter.fit(meter.limits, self._zone, wall)
            start, used = self._used.pop(holder, (0.0, 0.0))
            if meter.budget is not None and meter.budget.start == start:
                meter.budget.used = used
        return meter

    # ---- looking

    def standings(self, hold: Hold, now: float, wall: float) -> tuple[Standing | None, ...]:
        """Of the request's limits on requests, and of those on tokens, the one with least left."""
        meters = hold.meters
        requests = [one for meter in meters if (one := meter.request_standing(now)) is not None]
        tokens = [one for meter in meters for one in meter.token_standings(now, wall)]
        return min(requests, key=_left, default=None), min(tokens, key=_left, default=None)

    def use_of(self, holder: Holder, now: float, wall: float) -> Use | None:
        """How a holder stands; None without limits."""
        limits = self._limits.get(holder)
        if limits is None:
            return None
        meter = self._meters.get(holder)
        if meter is None:
            meter = Meter(holder, limits)  # just to be looked at
            meter.fit(limits, self._zone, wall)
            start, used = self._used.get(holder, (0.0, 0.0))
            if meter.budget is not None and meter.budget.start == start:
                meter.budget.used = used
        meter.advance(now, wall)
        budget = meter.budget
        return Use(
            holder=holder,
            limits=limits,
            running=meter.running,
            waiting=meter.waiting,
            requests_in_minute=None if meter.requests is None else meter.requests.total,
            tokens_in_minute=None if meter.tokens is None else meter.tokens.total,
            budget_used=None if budget is None else budget.used,
            budget_reserved=None if budget is None else budget.reserved,
            budget_resets_at=None if budget is None else budget.end,
        )


def _lasts(refusal: Refusal) -> float:
    return float("inf") if refusal.wait_seconds is None else refusal.wait_seconds


def _left(standing: Standing) -> float:
    return standing.remaining
