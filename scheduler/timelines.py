"""The cluster's last hours as charts: shares of each group, gap and bound, queue, token rate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.core.cache import cache
from django.utils import timezone

from accounts.forms import weight_text
from accounts.models import Boost
from scheduler.changes import Change, changes, may
from scheduler.charts import Chart, Point, Span, chart
from scheduler.models import ClusterMinute, ShareMinute
from scheduler.templatetags.figures import figure, percent, tokens

#: {hours to choose from: seconds of a step}
WINDOWS = {1: 60.0, 6: 300.0, 24: 900.0}
#: Groups that get a chart: those with the largest shares.
MOST_GROUPS = 12
_KEPT_SECONDS = 30  # the rows come once a minute

_Groups = dict[str, tuple[list[Point], list[Point]]]
_Cluster = list[tuple[float, ...]]


def markers(user: Any, hours: int) -> list[tuple[float, str]]:
    """(epoch seconds, in words) of the changes that ``user`` may read, and of the beginnings and
    ends of boosts; oldest first."""
    since = timezone.now() - timedelta(hours=hours)
    rows, _ = changes(user)
    found = [(row.at.timestamp(), _in_words(row)) for row in rows if row.at >= since]
    if may(user, "view", Boost):
        found += _boosts(since)
    return sorted(found)


def _boosts(since: datetime) -> Iterator[tuple[float, str]]:
    """Those of the period; what is to come has not happened."""
    now = timezone.now()
    for one in Boost.objects.filter(starts_at__lte=now, ends_at__gte=since).select_related(
        "group", "user"
    ):
        what = f"boost {one.name}: ×{weight_text(one.factor)} for {one.whose}"
        if one.starts_at >= since:
            yield one.starts_at.timestamp(), f"{what} begins"
        if one.ends_at <= now:
            yield one.ends_at.timestamp(), f"{what} ends"


def _in_words(row: Change) -> str:
    what = f"{row.kind} {row.what}".strip()
    values = ", ".join(f"{one.name} {one.before} → {one.after}" for one in row.values)
    done = f"{what}: {values}" if values else f"{what} {row.action}"
    return f"{done} (by {row.who})" if row.who else done


def charts(hours: int, events: Sequence[tuple[float, str]]) -> tuple[list[Chart], list[Chart]]:
    """Those of the cluster, and one for each group, the largest first."""
    until = timezone.now().timestamp()
    span = Span(until - hours * 3600, until, WINDOWS[hours])
    found = cache.get_or_set(f"timelines-{hours}", lambda: _load(hours), _KEPT_SECONDS)
    cluster, groups = found or ([], {})
    return _of_the_cluster(cluster, span, events), [
        one
        for name, (entitled, received) in groups.items()
        if (
            one := chart(
                name or "(no group)",
                {"entitled": ("before", entitled), "received": ("after", received)},
                span,
                percent,
                top=1.0,
                markers=events,
            )
        )
    ]


def _load(hours: int) -> tuple[_Cluster, _Groups]:
    since = timezone.now() - timedelta(hours=hours)
    cluster = [
        (at.timestamp(), *values)
        for at, *values in ClusterMinute.objects.filter(at__gte=since)
        .order_by("at")
        .values_list("at", "gap", "gap_bound", "queued", "running", "tokens_per_second")
    ]
    groups: _Groups = defaultdict(lambda: ([], []))
    rows = ShareMinute.objects.filter(at__gte=since).order_by("at")
    for at, group, entitled, received in rows.values_list("at", "group", "entitled", "received"):
        moment = at.timestamp()
        groups[group][0].append((moment, entitled))
        groups[group][1].append((moment, received))
    largest = sorted(groups, key=lambda name: -_weight(groups[name]))[:MOST_GROUPS]
    return cluster, {name: groups[name] for name in largest}


def _weight(curves: Iterable[list[Point]]) -> float:
    return sum(value for points in curves for _, value in points)


def _of_the_cluster(rows: _Cluster, span: Span, events: Sequence[tuple[float, str]]) -> list[Chart]:
    def points(column: int) -> list[Point]:
        return [(row[0], row[column]) for row in rows]

    def rate(value: float) -> str:
        return f"{tokens(value)} tokens/s"

    found = [
        chart(
            "Gap in service, tokens per unit of weight",
            {"largest gap": ("after", points(1)), "bound": ("before", points(2))},
            span,
            figure,
            markers=events,
        ),
        chart(
            "Requests",
            {"waiting": ("before", points(3)), "running": ("after", points(4))},
            span,
            tokens,
            markers=events,
        ),
        chart("Tokens", {"settled": ("after", points(5))}, span, rate, markers=events),
    ]
    return [one for one in found if one is not None]
