"""Who was entitled to what, over time: samples of the running scheduler, added up and kept.

Every ``SAMPLE_SECONDS`` the runtime hands over its view. A minute's samples become one row per
group and one of the cluster, which are kept for ``MINUTES_KEPT``; the same samples are added to the
hour's rows, which stay. What a crash loses is the current minute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connection, transaction

from scheduler import standing
from scheduler.core.views import ShareView
from scheduler.models import ClusterMinute, ShareHour, ShareMinute
from scheduler.serving import LiveView
from scheduler.standing import GroupFigures

SAMPLE_SECONDS = 10.0
MINUTE = 60
HOUR = 3600
MINUTES_KEPT = timedelta(days=7)

#: (hour, group, user id; 0: the group itself)
_HourKey = tuple[int, str, int]


@dataclass(slots=True)
class _Sum:
    """The sum of a group's samples in one minute."""

    entitled: float = 0.0
    received: float = 0.0
    queued: int = 0
    running: int = 0


@dataclass(slots=True)
class _Minute:
    samples: int = 0
    gap: float = 0.0
    gap_bound: float = 0.0
    tokens_per_second: float = 0.0
    groups: dict[str, _Sum] = field(default_factory=lambda: defaultdict(_Sum))
    entitled: dict[_HourKey, float] = field(default_factory=lambda: defaultdict(float))
    nominal: dict[_HourKey, float] = field(default_factory=lambda: defaultdict(float))


class Meter:
    """Adds samples up and stores a minute once it is over. Not safe for two threads at once."""

    def __init__(self) -> None:
        self._at: int | None = None
        self._minute = _Minute()

    def sample(self, view: LiveView) -> None:
        """One look, at the moment that the view was taken; asks the database for the weights."""
        at = int(view.taken_at // MINUTE) * MINUTE
        if self._at is not None and at != self._at:
            minute, before = self._minute, self._at
            self._at, self._minute = at, _Minute()
            store(before, minute)
        self._at = at
        _add(self._minute, at, view, standing.group_figures(view), standing.overview(view))


def _add(
    minute: _Minute,
    at: int,
    view: LiveView,
    figures: Iterable[GroupFigures],
    overview: standing.Overview,
) -> None:
    hour = at // HOUR * HOUR
    minute.samples += 1
    minute.gap = max(minute.gap, view.gap)
    minute.gap_bound = max(minute.gap_bound, view.gap_bound)
    minute.tokens_per_second += overview.tokens_per_second or 0.0
    by_group: dict[str, list[ShareView]] = defaultdict(list)
    names = {one.name for one in figures if one.group_id is not None}
    for share in view.shares:
        if share.queued or share.running:
            by_group[share.group if share.group in names else ""].append(share)
    for one in figures:
        name = "" if one.group_id is None else one.name
        entitled = one.entitled_now or 0.0
        if entitled or one.received or one.queued or one.running:
            total = minute.groups[name]
            total.entitled += entitled
            total.received += one.received or 0.0
            total.queued += one.queued or 0
            total.running += one.running or 0
        if view.shares and any(by_group.values()):
            minute.nominal[hour, name, 0] += one.entitled_all or 0.0
            minute.entitled[hour, name, 0] += entitled
        for user_id, part in split(by_group[name]).items():
            minute.entitled[hour, name, user_id] += entitled * part


def split(shares: Iterable[ShareView]) -> dict[int, float]:
    """{user id: fraction} of what is a group's, by the weights of those with work (R14); equally
    among users whose weights are all 0."""
    weights: dict[int, float] = defaultdict(float)
    for share in shares:
        weights[share.user_id] += share.weight
    total = sum(weights.values())
    if total <= 0.0:
        return {user_id: 1.0 / len(weights) for user_id in weights}
    return {user_id: weight / total for user_id, weight in weights.items()}


# ---- in the database


@transaction.atomic
def store(at: int, minute: _Minute) -> None:
    """Insert a minute's rows, add it to its hour, and forget minutes that are too old."""
    moment = datetime.fromtimestamp(at, tz=UTC)
    count = minute.samples or 1
    ClusterMinute.objects.bulk_create(
        [
            ClusterMinute(
                at=moment,
                gap=minute.gap,
                gap_bound=minute.gap_bound,
                tokens_per_second=minute.tokens_per_second / count,
                queued=sum(one.queued for one in minute.groups.values()) / count,
                running=sum(one.running for one in minute.groups.values()) / count,
            )
        ],
        ignore_conflicts=True,
    )
    ShareMinute.objects.bulk_create(
        [
            ShareMinute(
                at=moment,
                group=name,
                entitled=one.entitled / count,
                received=one.received / count,
                queued=one.queued / count,
                running=one.running / count,
            )
            for name, one in sorted(minute.groups.items())
        ],
        ignore_conflicts=True,
    )
    _add_to_hours(minute.entitled, minute.nominal)
    ClusterMinute.objects.filter(at__lt=moment - MINUTES_KEPT).delete()
    ShareMinute.objects.filter(at__lt=moment - MINUTES_KEPT).delete()


def _add_to_hours(entitled: Mapping[_HourKey, float], nominal: Mapping[_HourKey, float]) -> None:
    keys = sorted({*entitled, *nominal})
    if not keys:
        return
    quote = connection.ops.quote_name
    table = quote(ShareHour._meta.db_table)
    sums = ", ".join(
        f"{quote(one)} = {table}.{quote(one)} + excluded.{quote(one)}"
        for one in ("entitled", "nominal")
    )
    names = ", ".join(map(quote, ("hour", "group", "user_id", "entitled", "nominal")))
    rows: list[tuple[Any, ...]] = [
        (_stored(hour), group, user_id, entitled.get(key, 0.0), nominal.get(key, 0.0))
        for key in keys
        for hour, group, user_id in (key,)
    ]
    with connection.cursor() as cursor:
        # Only names of columns are put in.
        cursor.executemany(
            f"INSERT INTO {table} ({names}) VALUES (%s, %s, %s, %s, %s) "  # noqa: S608
            f"ON CONFLICT ({', '.join(map(quote, ('hour', 'group', 'user_id')))}) "
            f"DO UPDATE SET {sums}",
            rows,
        )


def _stored(hour: int) -> Any:
    return connection.ops.adapt_datetimefield_value(datetime.fromtimestamp(hour, tz=UTC))
