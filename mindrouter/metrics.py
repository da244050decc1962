"""``/metrics``: what Prometheus reads, put together when it asks.

Nothing is counted on a request's way. What requests add up to comes from the recorder's file, where
each is counted once, whichever process served it; what is true now from the running scheduler,
which all gateways share; what concerns one process from the pulses that each process writes. So it
does not matter which of several processes behind a port is asked.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from django.conf import settings
from django.db import DatabaseError, connection
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from rest_framework.exceptions import APIException, AuthenticationFailed

from accounts.attempts import (
    address_of,
    is_among,
    note_failed_key,
    source_of,
    too_many_failed,
)
from accounts.authentication import management_key, permissions_of
from mindrouter.gateway.client import Client
from mindrouter.gateway.errors import GatewayError
from scheduler import pulse, standing
from scheduler.core.views import BackendView, ShareView
from scheduler.counting import (
    COUNTS_FILE,
    FIRST_TOKEN_BUCKETS,
    LEASE_BUCKETS,
    MOST_BACKENDS,
    MOST_MODELS,
    OTHER,
    OUTCOMES,
    TOKENS,
    WAIT_BUCKETS,
    Counts,
    Labels,
    Table,
    load_counts,
)
from scheduler.serving import LiveView, Serving, current

MOST_GROUPS = 100
MOST_LIMITS = 200
SCRAPE_SECONDS = 9.0  # Prometheus gives up after 10
_FORWARDED = (b"x-forwarded-for", b"forwarded", b"x-real-ip")
STATES = ("ready", "failed", "down", "draining", "disabled", "unknown")


# ---- who may read them


async def tell_metrics(client: Client) -> None:
    """Raises: GatewayError where the client may not read them, or they take too long."""
    try:
        async with asyncio.timeout(SCRAPE_SECONDS):
            if not _comes_from_near(client):
                await asyncio.to_thread(_check_key, *_asked_by(client))
            text, kind = await asyncio.to_thread(
                _in_the_form_of, client.header(b"accept") or "", current()
            )
    except TimeoutError as error:
        raise GatewayError(
            "no_backend_available", "The metrics took too long.", retry_after=5
        ) from error
    await client.respond(200, [(b"content-type", kind.encode())], text)


def _comes_from_near(client: Client) -> bool:
    """Whether its address is among the allowed ones. What a proxy forwards that is not trusted may
    come from anywhere."""
    lines = client.head.lines
    source = source_of(client.peer, lines)
    if source == client.peer and any(name in client.headers for name in _FORWARDED):
        return False
    return is_among(source, settings.METRICS_ALLOWED)


def _asked_by(client: Client) -> tuple[str, str]:
    return client.header(b"authorization") or "", address_of(client.peer, client.head.lines)


def _check_key(authorization: str, subscriber: str) -> None:
    """Raises: GatewayError unless it is the key of somebody who may read the pages."""
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer":
        raise GatewayError(
            "invalid_api_key",
            "Metrics are read from the addresses in METRICS_ALLOWED, or with a staff key.",
            headers=((b"www-authenticate", b"Bearer"),),
        )
    try:
        user = management_key(key.strip()).user
    except APIException as error:
        is_wrong = isinstance(error, AuthenticationFailed)  # not only good for other things
        wait = note_failed_key(subscriber) if is_wrong else None
        if wait is not None:
            raise GatewayError(
                "rate_limit_exceeded", too_many_failed(), retry_after=wait
            ) from error
        raise GatewayError("invalid_api_key", str(error.detail)) from error
    except DatabaseError as error:
        raise GatewayError(
            "no_backend_available", "Keys cannot be checked right now.", retry_after=5
        ) from error
    finally:
        connection.close()
    if not permissions_of(user):
        raise GatewayError("permission_denied", "Only staff may read the metrics.")


# ---- all of them


def _in_the_form_of(accept: str, serving: Serving | None) -> tuple[bytes, str]:
    """The text that a scraper with this Accept header takes, and its content type."""
    encode, kind = choose_encoder(accept)
    return encode(_Registry(serving)), kind


class _Registry:
    """What the library's encoders ask for metrics."""

    def __init__(self, serving: Serving | None) -> None:
        self._serving = serving

    def collect(self) -> Iterator[Metric]:
        return families(self._serving)


def families(serving: Serving | None) -> Iterator[Metric]:
    """Every metric, each with its help. To be called from any thread but the event loop's."""
    yield from _of_records(load_counts(settings.STATE_DIR / COUNTS_FILE))
    yield from _of_processes(pulse.pulses())
    yield from _of_the_recorder()
    view = None if serving is None else _view(serving)
    yield _gauge("scheduler_answers", "1: the scheduler answers.", float(view is not None))
    if serving is not None and view is not None:
        yield from _of_the_scheduler(view)
        yield from _of_models(view)
        yield from _of_backends(view.backends)
        yield from _of_groups(serving, view)
        yield from _of_limits(view)


def _view(serving: Serving) -> LiveView | None:
    try:
        return serving.view()
    except TimeoutError:
        return None


# ---- what requests add up to


def _of_records(counts: Counts) -> Iterator[Metric]:
    yield _counter(
        "requests", "Requests that have ended.", ("outcome", "reason"), _single(counts.requests)
    )
    yield _counter(
        "group_requests",
        "The same by group and model.",
        ("group", "model", "outcome"),
        _spread(counts.by_outcome, OUTCOMES),
    )
    yield _counter(
        "tokens",
        "Tokens of requests that reached a backend; cached ones are part of the prompt's.",
        ("group", "model", "kind"),
        _spread(counts.tokens, TOKENS),
    )
    pair = ("group", "model")
    yield _counter(
        "charged_tokens", "Tokens charged to shares (R1).", pair, _single(counts.charged)
    )
    yield _counter("slot_seconds", "Seconds that slots were held.", pair, _single(counts.slots))
    yield _histogram(
        "wait_seconds", "Time in the queue.", ("group", "model"), counts.waits, WAIT_BUCKETS
    )
    yield _histogram(
        "first_token_seconds",
        "From a request's arrival to its first token.",
        ("model",),
        counts.first_tokens,
        FIRST_TOKEN_BUCKETS,
    )
    yield _histogram(
        "lease_seconds",
        "From asking for a slot to having it, where one was free.",
        (),
        counts.leases,
        LEASE_BUCKETS,
    )
    yield _counter(
        "attempts",
        "Requests sent to backends, by what became of them.",
        ("backend", "result"),
        _single(counts.attempts),
    )
    yield _counter("retries", "Attempts after a first one.", (), _single(counts.retries))
    yield _counter(
        "limits_refused",
        "Requests that a limit or a bound of a queue refused.",
        ("group", "reason"),
        _single(counts.limits),
    )


def _single(table: Table) -> dict[Labels, float]:
    return {labels: sums[0] for labels, sums in table.rows.items()}


def _spread(table: Table, kinds: Sequence[str]) -> dict[Labels, float]:
    """With each of a row's sums under a label of its own."""
    return {
        (*labels, kind): value
        for labels, sums in table.rows.items()
        for kind, value in zip(kinds, sums, strict=True)
    }


# ---- the processes on this data folder


def _of_processes(pulses: Sequence[pulse.Pulse]) -> Iterator[Metric]:
    seen: Counter[str] = Counter()
    named = []
    for one in pulses:
        seen[one.kind] += 1
        # Numbered in turn, not by process ids, which are ever new.
        named.append(((f"{one.kind}-{seen[one.kind]}",), one))
    label = ("process",)
    kinds: dict[Labels, float] = {(kind,): number for kind, number in seen.items()}
    yield _gauges("processes", "Processes that live.", ("kind",), kinds)
    for name, text, value in (
        ("loop_lag_seconds", "How late the event loop was, at worst in 2 s.", "loop_lag"),
        ("serving", "Requests under way.", "serving"),
        ("spool_unwritten", "Writes of records that wait in memory.", "unwritten"),
        ("process_start_time_seconds", "When it started, in epoch seconds.", "started_at"),
        ("database_away", "1: the database cannot be reached.", "database_away"),
        ("scheduler_in_touch", "1: in touch with the scheduler, or leading.", "in_touch"),
    ):
        yield _gauges(name, text, label, {who: float(getattr(one, value)) for who, one in named})
    for name, text, value in (
        ("spool_lines_lost", "Records that were lost.", "lines_lost"),
        ("spool_write_errors", "Failed writes of records.", "write_errors"),
    ):
        yield _counter(name, text, label, {who: float(getattr(one, value)) for who, one in named})


def _of_the_recorder() -> Iterator[Metric]:
    recorder = pulse.recorder_pulse()
    backlog = pulse.spool_backlog(recorder)
    yield _gauge("spool_backlog_bytes", "Records in the spool, not loaded yet.", backlog)
    if recorder is not None:
        lag = max(0.0, time.time() - recorder.caught_up_at)
        yield _gauge("recorder_lag_seconds", "Since the recorder last had everything.", lag)
        yield _gauge(
            "stream_waiting_bytes",
            "Decisions that the webhook has not taken.",
            recorder.stream_waiting_bytes,
        )
        yield _counter(
            "stream_lost",
            "Decisions that the stream could not take.",
            (),
            {(): float(recorder.stream_lost)},
        )


# ---- the running scheduler


def _of_the_scheduler(view: LiveView) -> Iterator[Metric]:
    yield _gauge("queued", "Requests that wait.", view.stats.queue_total)
    yield _gauge("average_wait_seconds", "Of those waiting now.", view.stats.average_wait_seconds)
    yield _gauge(
        "service_gap_tokens", "How far apart waiting users are served (T1), per weight.", view.gap
    )
    yield _gauge("service_gap_bound_tokens", "What it may be at most.", view.gap_bound)
    yield _gauge("burst_level_tokens", "Burst credits per unit of weight (R10).", view.burst)
    jain = jain_index(view.shares)
    if jain is not None:
        yield _gauge(
            "jain_index", "Of recent tokens per weight, among those with work: 1 is even.", jain
        )
    yield _gauge("active_users", "Users with work or recent tokens.", view.stats.total_users)
    yield _gauge("configuration_version", "In force.", view.configuration_version)


def jain_index(shares: Iterable[ShareView]) -> float | None:
    """Jain's index of what those with work have had in the fairness window per unit of weight:
    1 is even, 1/n is all for one. None: nobody has had anything."""
    had = [
        one.recent_tokens / one.weight
        for one in shares
        if (one.queued or one.running) and one.weight > 0.0
    ]
    squares = sum(one * one for one in had)
    return sum(had) ** 2 / (len(had) * squares) if squares > 0.0 else None


def _of_models(view: LiveView) -> Iterator[Metric]:
    waiting: dict[Labels, float] = {(k,): n for k, n in view.stats.queue_by_model.items()}
    queued = _bounded(waiting, MOST_MODELS)
    yield _gauges("model_queued", "Requests that wait for it.", ("model",), queued)


def _of_backends(backends: Sequence[BackendView]) -> Iterator[Metric]:
    known = sorted(backends, key=lambda one: one.id)[:MOST_BACKENDS]
    label = ("backend",)
    for name, text, value in (
        ("backend_in_flight", "Slots in use.", "in_flight"),
        ("backend_slots", "Its slots.", "max_concurrent"),
        ("backend_queued", "Waiting requests that it could serve.", "queued"),
        ("backend_foreign", "Requests there that are not ours.", "foreign"),
    ):
        figures: dict[Labels, float] = {(one.name,): float(getattr(one, value)) for one in known}
        for one in sorted(backends, key=lambda one: one.id)[MOST_BACKENDS:]:
            figures[OTHER,] = figures.get((OTHER,), 0.0) + float(getattr(one, value))
        yield _gauges(name, text, label, figures)
    yield _gauges(
        "backend_state",
        "1: the state that it is in.",
        ("backend", "state"),
        {(one.name, state): float(one.state == state) for one in known for state in STATES},
    )
    yield _gauges(
        "backend_telemetry_age_seconds",
        "Since what is known of it was observed.",
        label,
        {
            (one.name,): one.observed_age_seconds
            for one in known
            if one.observed_age_seconds is not None
        },
    )
    yield _gauges(
        "backend_fail_window_seconds",
        "Until it is tried again (P5); 0: it has not failed.",
        label,
        {(one.name,): one.failed_for_seconds or 0.0 for one in known},
    )


def _of_groups(serving: Serving, view: LiveView) -> Iterator[Metric]:
    """Nothing while the database is away, which has the weights."""
    if serving.database_away:
        return
    try:
        figures = standing.group_figures(view)
    except DatabaseError:
        return
    finally:
        connection.close()
    for name, text, value in (
        ("group_entitled_share", "0..1, among the groups that have work.", "entitled_now"),
        ("group_received_share", "0..1, of the tokens in the fairness window.", "received"),
        ("group_recent_tokens", "Settled in the fairness window.", "recent_tokens"),
        ("group_queued", "Its requests that wait.", "queued"),
        ("group_running", "Its requests that run.", "running"),
        ("group_weight", "In force, boosts included.", "weight"),
    ):
        values: dict[Labels, float] = {
            (one.name,): float(getattr(one, value) or 0.0) for one in figures
        }
        yield _gauges(name, text, ("group",), _bounded(values, MOST_GROUPS))


def _of_limits(view: LiveView) -> Iterator[Metric]:
    for name, text, counted in (
        (
            "limit_refused",
            "Requests refused for it since the scheduler began.",
            view.limits_refused,
        ),
        (
            "limit_shadowed",
            "Requests that it would have refused, were it not in shadow.",
            view.limits_shadowed,
        ),
    ):
        figures = _bounded({(one,): number for one, number in counted.items()}, MOST_LIMITS)
        yield _counter(name, text, ("limit",), figures)


# ---- forms


def _bounded(figures: Mapping[Labels, float], cap: int) -> dict[Labels, float]:
    """The first ``cap`` by name; what the others add up to as "other"."""
    names = sorted(figures)
    kept = {name: figures[name] for name in names[:cap]}
    if names[cap:]:
        kept[OTHER,] = kept.get((OTHER,), 0.0) + sum(figures[name] for name in names[cap:])
    return kept


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"mindrouter_{name}", text, value=value)


def _gauges(name: str, text: str, labels: Sequence[str], values: Mapping[Labels, float]) -> Metric:
    family = GaugeMetricFamily(f"mindrouter_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _counter(name: str, text: str, labels: Sequence[str], values: Mapping[Labels, float]) -> Metric:
    family = CounterMetricFamily(f"mindrouter_{name}", text, labels=labels)
    for key, value in values.items() if labels else {(): values.get((), 0.0)}.items():
        family.add_metric(key, value)
    return family


def _histogram(
    name: str, text: str, labels: Sequence[str], table: Table, buckets: Sequence[float]
) -> Metric:
    family = HistogramMetricFamily(f"mindrouter_{name}", text, labels=labels)
    bounds = [*map(str, buckets), "+Inf"]
    for key, sums in table.rows.items():
        family.add_metric(
            key, list(zip(bounds, accumulate(sums[:-1]), strict=True)), sum_value=sums[-1]
        )
    return family
