"""Entitled against received over days, and why requests were slow, from the hourly totals.

What a group was entitled to in an hour is its part of the samples in which anybody had work, of
all tokens charged in that hour. Hours without a sample cannot be compared: their tokens count in
``tokens`` and in no share. Days and weeks are those of the site's time zone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from typing import Any, Literal

from django.db import connection
from django.db.models import QuerySet, Sum
from django.utils import timezone

from accounts.models import User
from scheduler.causes import CAUSES
from scheduler.models import ShareHour, UsageHour

By = Literal["group", "user"]
What = Literal["groups", "users", "causes"]
MOST_DAYS = 92
NO_GROUP = "(no group)"


@dataclass(frozen=True, slots=True)
class Period:
    """Whole days; ``last`` is one of them."""

    first: date
    last: date

    @property
    def since(self) -> datetime:
        return _midnight(self.first)

    @property
    def until(self) -> datetime:
        return _midnight(self.last + timedelta(days=1))


def _midnight(day: date) -> datetime:
    return timezone.make_aware(datetime.combine(day, time()))


@dataclass(slots=True)
class Row:
    """One group's or user's standing on one day, or in a whole period. Tokens as charged (R1)."""

    day: date | None  # None: the whole period
    name: str
    requests: int = 0
    tokens: float = 0.0
    received: float = 0.0  # of the tokens, in hours that can be compared
    entitled: float = 0.0  # among those who had work
    of: float = 0.0  # what all received in those hours
    borrowed: float = 0.0  # received beyond the weight's part of all groups
    lent: float = 0.0  # left to others of that part

    @property
    def entitled_share(self) -> float | None:
        return self.entitled / self.of if self.of else None

    @property
    def received_share(self) -> float | None:
        return self.received / self.of if self.of else None


@dataclass(slots=True)
class Week:
    """Slow requests of one week by cause."""

    monday: date
    requests: int = 0
    slow: int = 0
    causes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))

    @property
    def ranked(self) -> list[tuple[str, int]]:
        """(cause in words, requests) of those that occurred, most first."""
        found = [(CAUSES[name], number) for name, number in self.causes.items() if number]
        return sorted(found, key=lambda one: -one[1])


# ---- shares


def shares(period: Period, by: By) -> list[Row]:
    """Each day's rows, ordered by day and name. Borrowed and lent are those of groups.

    Five queries at most, however many rows there are.
    """
    hours = _hours(period)
    rows: dict[tuple[date, Any], Row] = {}
    nominal: dict[tuple[datetime, Any], float] = {}
    for at, key, entitled, part in _entitled(period, by):
        hour = hours.get(at)
        if hour is not None and hour.worth:
            _row(rows, hour, key).entitled += entitled * hour.worth
            if part:
                nominal[at, key] = part * hour.worth
    for at, key, requests, tokens in _used(period, by):
        hour = hours[at]
        row = _row(rows, hour, key)
        row.requests += requests
        row.tokens += tokens
        if hour.worth:
            row.received += tokens
            _lend(row, tokens - nominal.pop((at, key), 0.0))
    for (at, key), tokens in nominal.items():
        _lend(_row(rows, hours[at], key), -tokens)
    return _finished(rows, hours, _usernames() if by == "user" else None)


@dataclass(frozen=True, slots=True)
class _Hour:
    """``worth``: the tokens that one sample stands for; 0: the hour cannot be compared."""

    day: date
    tokens: float
    worth: float


def _hours(period: Period) -> dict[datetime, _Hour]:
    """Those with requests."""
    charged = _usage(period).values_list("hour").annotate(tokens=Sum("charged_tokens"))
    entitled = _entitlements(period).filter(user_id=0).values_list("hour")
    samples = dict(entitled.annotate(samples=Sum("entitled")))
    return {
        at: _Hour(
            timezone.localtime(at).date(),
            tokens,
            tokens / samples[at] if samples.get(at) else 0.0,
        )
        for at, tokens in charged
    }


def _row(rows: dict[tuple[date, Any], Row], hour: _Hour, key: Any) -> Row:
    row = rows.get((hour.day, key))
    if row is None:
        row = rows[hour.day, key] = Row(hour.day, "")
    return row


def _finished(
    rows: Mapping[tuple[date, Any], Row],
    hours: Mapping[datetime, _Hour],
    usernames: Mapping[int, str] | None,
) -> list[Row]:
    of: dict[date, float] = defaultdict(float)
    for hour in hours.values():
        of[hour.day] += hour.tokens if hour.worth else 0.0
    for (day, key), row in rows.items():
        row.of = of[day]
        # A user who has been deleted is known by number.
        row.name = key or NO_GROUP if usernames is None else usernames.get(key, f"#{key}")
    return [rows[key] for key in sorted(rows, key=lambda one: (one[0], rows[one].name))]


def _lend(row: Row, surplus: float) -> None:
    row.borrowed += max(0.0, surplus)
    row.lent += max(0.0, -surplus)


def users(period: Period) -> list[Row]:
    """Each user's standing in the whole period, those with the most tokens first: what ``shares``
    by user comes to, added up by the database, since there may be a row per user and hour."""
    names = _usernames()
    with connection.cursor() as cursor:
        cursor.execute(_USERS_SQL, {"since": _stored(period.since), "until": _stored(period.until)})
        found = cursor.fetchall()
    hours = _hours(period)
    of = sum(hour.tokens for hour in hours.values() if hour.worth)
    rows = [
        Row(None, names.get(user_id, f"#{user_id}"), int(requests), tokens, received, entitled, of)
        for user_id, requests, tokens, received, entitled in found
    ]
    return sorted(rows, key=lambda row: (-row.tokens, row.name))


def _stored(moment: datetime) -> Any:
    return connection.ops.adapt_datetimefield_value(moment)


_USERS_SQL = """
WITH charged AS (
    SELECT hour, SUM(charged_tokens) AS tokens FROM scheduler_usagehour
    WHERE hour >= %(since)s AND hour < %(until)s GROUP BY hour
), worth AS (
    SELECT charged.hour AS hour, charged.tokens / SUM(entitled) AS tokens
    FROM charged JOIN scheduler_sharehour ON scheduler_sharehour.hour = charged.hour
    WHERE user_id = 0 AND charged.tokens > 0
    GROUP BY charged.hour, charged.tokens HAVING SUM(entitled) > 0
), parts AS (
    SELECT user_id, SUM(requests) AS requests, SUM(charged_tokens) AS tokens,
        SUM(CASE WHEN worth.hour IS NULL THEN 0 ELSE charged_tokens END) AS received,
        0.0 AS entitled
    FROM scheduler_usagehour LEFT JOIN worth ON worth.hour = scheduler_usagehour.hour
    WHERE scheduler_usagehour.hour >= %(since)s AND scheduler_usagehour.hour < %(until)s
        AND user_id > 0
    GROUP BY user_id
    UNION ALL
    SELECT user_id, 0, 0.0, 0.0, SUM(entitled * worth.tokens)
    FROM scheduler_sharehour JOIN worth ON worth.hour = scheduler_sharehour.hour
    WHERE user_id > 0 GROUP BY user_id
)
SELECT user_id, SUM(requests), SUM(tokens), SUM(received), SUM(entitled)
FROM parts GROUP BY user_id
"""


def whole(rows: Iterable[Row]) -> list[Row]:
    """The days' rows of each name together, those with the most tokens first."""
    sums: dict[str, Row] = {}
    days: dict[date, float] = {}
    for row in rows:
        one = sums.setdefault(row.name, Row(None, row.name))
        one.requests += row.requests
        for name in ("tokens", "received", "entitled", "borrowed", "lent"):
            setattr(one, name, getattr(one, name) + getattr(row, name))
        if row.day is not None:
            days[row.day] = row.of
    for one in sums.values():
        one.of = sum(days.values())
    return sorted(sums.values(), key=lambda row: (-row.tokens, row.name))


def _usage(period: Period) -> QuerySet[UsageHour]:
    return UsageHour.objects.filter(hour__gte=period.since, hour__lt=period.until).order_by()


def _entitlements(period: Period) -> QuerySet[ShareHour]:
    return ShareHour.objects.filter(hour__gte=period.since, hour__lt=period.until).order_by()


def _entitled(period: Period, by: By) -> Iterator[tuple[datetime, Any, float, float]]:
    rows = _entitlements(period)
    if by == "group":
        return rows.filter(user_id=0).values_list("hour", "group", "entitled", "nominal").iterator()
    users = rows.filter(user_id__gt=0).values_list("hour", "user_id")
    return users.annotate(one=Sum("entitled"), other=Sum("nominal")).iterator()


def _used(period: Period, by: By) -> Iterator[tuple[datetime, Any, int, float]]:
    rows = _usage(period)
    if by == "user":
        rows = rows.filter(user_id__gt=0)
    grouped = rows.values_list("hour", "group" if by == "group" else "user_id")
    return grouped.annotate(number=Sum("requests"), tokens=Sum("charged_tokens")).iterator()


def _usernames() -> dict[int, str]:
    return dict(User.objects.order_by().values_list("pk", "username"))


# ---- slow requests


def weeks(period: Period) -> list[Week]:
    """Newest first; one query."""
    columns = {name: Sum(f"slow_{name}") for name in CAUSES}
    found: dict[date, Week] = {}
    hours = _usage(period).values_list("hour").annotate(number=Sum("requests"), **columns)
    for hour, requests, *counts in hours.iterator():
        day = timezone.localtime(hour).date()
        monday = day - timedelta(days=day.weekday())
        week = found.setdefault(monday, Week(monday))
        week.requests += requests
        week.slow += sum(counts)
        for name, number in zip(CAUSES, counts, strict=True):
            week.causes[name] += number
    return sorted(found.values(), key=lambda week: week.monday, reverse=True)


# ---- as values, for exports


def as_values(period: Period, what: What) -> list[dict[str, Any]]:
    """A report as flat rows of plain values."""
    if what == "causes":
        return [
            {
                "week_of": week.monday.isoformat(),
                "requests": week.requests,
                "slow": week.slow,
                **week.causes,
            }
            for week in weeks(period)
        ]
    by: By = "group" if what == "groups" else "user"
    return [
        {
            "day": row.day.isoformat() if row.day else None,
            by: row.name,
            "requests": row.requests,
            "tokens": round(row.tokens, 3),
            "entitled_tokens": round(row.entitled, 3),
            "received_tokens": round(row.received, 3),
            "entitled_share": _rounded(row.entitled_share),
            "received_share": _rounded(row.received_share),
            **(
                {"borrowed_tokens": round(row.borrowed, 3), "lent_tokens": round(row.lent, 3)}
                if by == "group"
                else {}
            ),
        }
        for row in shares(period, by)
    ]


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 6)
