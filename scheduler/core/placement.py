"""Which backend: hard constraints, soft scores and the choice among the candidates (P1–P4).

A constraint returns None when it holds, else it says why not. A scorer returns 0..1, and 0.5 where
nothing is known; times its points it becomes a part of the backend's total.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler.core.affinity import rendezvous
from scheduler.core.cluster import NO_LATENCY, NO_RATE, BackendState, Measures, Offer
from scheduler.core.decisions import ChoiceReason, Failure, SlotsTaken
from scheduler.core.jobs import BackendSpec, Job, ModelSpec, Task
from scheduler.core.queue import JobClass
from scheduler.core.tunables import Tunables

#: (backend id, its points in the order of SCORE_NAMES)
Points = tuple[int, tuple[float, ...]]

UNKNOWN = 0.5
PRIORITY_POINTS = 10.0
#: Totals this close are equal: what separates them is noise of the measurements.
TIE_POINTS = 1.0
#: A latency, and a token rate, that score one half.
HALF_LATENCY_SECONDS = 1.0
HALF_TOKENS_PER_SECOND = 50.0

# ---- P1: constraints that the configuration decides


def has_model(job: Job, backend: BackendSpec) -> str | None:
    if job.model_name in backend.models:
        return None
    return f"does not have {job.model_name}"


def has_permission(group_id: int | None, backend: BackendSpec) -> str | None:
    if backend.allowed_group_ids is None or group_id in backend.allowed_group_ids:
        return None
    return "is not for this user's group"


_CANNOT: dict[Task, str] = {
    "rerank": "does not rerank or score",
    "transcription": "does not transcribe audio",
    "speech": "does not speak",
    "images": "does not make images",
    "moderation": "does not moderate",
}


def has_modality(job: Job, model: ModelSpec) -> str | None:
    if job.needs.vision and model.vision is False:
        return "does not read images"
    if job.needs.embeddings and model.embeddings is False:
        return "does not make embeddings"
    task = job.needs.task
    if task is not None and getattr(model, task) is False:
        return _CANNOT[task]
    return None


def has_structured_output(job: Job, model: ModelSpec) -> str | None:
    return "has no JSON mode" if job.needs.json and model.json is False else None


def has_tools(job: Job, model: ModelSpec) -> str | None:
    return "does not call tools" if job.needs.tools and model.tools is False else None


def has_context(tokens: int, model: ModelSpec) -> str | None:
    if model.context_length is None or tokens <= model.context_length:
        return None
    return f"{tokens} tokens exceed its context of {model.context_length}"


# ---- P1: constraints of the moment


def is_in_service(backend: BackendState) -> str | None:
    if not backend.configured:
        return "has been removed"
    if not backend.spec.enabled:
        return "is disabled"
    if backend.spec.draining:
        return "is draining"
    if backend.spec.paused:
        return "is paused"
    return None


def is_trusted(backend: BackendState, now: float) -> str | None:
    """Outside its fail window, and the probe after it has been answered (P5)."""
    if now < backend.failed_until:
        return f"failed {now - backend.failed_at:.1f} s ago"
    if backend.is_down():
        return "was not reachable at the last poll"
    if backend.suspect and backend.probe is not None:
        return "is being tried with one request after a failure"
    return None


def has_capacity(backend: BackendState) -> SlotsTaken | None:
    """Our requests and those of others, as far as known, leave a slot."""
    slots = backend.spec.max_concurrent
    if backend.in_flight + backend.others < slots:
        return None
    return SlotsTaken(backend.in_flight, backend.others, slots)


def is_not_busy(backend: BackendState, now: float) -> str | None:
    return "has just said that it is busy" if now < backend.busy_until else None


def has_memory(backend: BackendState, model: ModelSpec) -> str | None:
    """Only for a model that is known not to be loaded; what is unknown stands in no way."""
    telemetry = backend.fresh_telemetry()
    if telemetry is None or model.vram_mib is None or telemetry.vram_free_mib is None:
        return None
    if telemetry.loaded_models is None or model.name in telemetry.loaded_models:
        return None
    if model.vram_mib <= telemetry.vram_free_mib:
        return None
    return f"needs {model.vram_mib:.0f} MiB, {telemetry.vram_free_mib:.0f} MiB are free"


def could_have_memory(backend: BackendState, model: ModelSpec) -> str | None:
    """Whether the model would fit if nothing else were there."""
    telemetry = backend.fresh_telemetry()
    if telemetry is None or model.vram_mib is None or telemetry.vram_total_mib is None:
        return None
    if telemetry.loaded_models is not None and model.name in telemetry.loaded_models:
        return None
    if model.vram_mib <= telemetry.vram_total_mib:
        return None
    return f"needs {model.vram_mib:.0f} MiB of {telemetry.vram_total_mib:.0f} MiB"


def failures_now(offers: Sequence[Offer], usable: int, now: float) -> tuple[Failure, ...]:
    """Why each of the offers outside ``usable`` is not a candidate."""
    failures: list[Failure] = []
    for offer in offers:
        if offer.bit & usable:
            continue
        backend = offer.backend
        backend_id = backend.spec.backend_id
        checks: tuple[tuple[str, str | SlotsTaken | None], ...] = (
            ("capacity", has_capacity(backend)),
            ("memory_fit", has_memory(backend, offer.model)),
        )
        if not backend.plain:
            checks += (
                ("enabled", is_in_service(backend)),
                ("fail_window", is_trusted(backend, now)),
                ("busy", is_not_busy(backend, now)),
            )
        failures += [(backend_id, name, why) for name, why in checks if why is not None]
    return tuple(failures)


# ---- P2: soft scores


def score_model_loaded(backend: BackendState, model: ModelSpec) -> float:
    """1 loaded, 0 not, as of the last poll."""
    telemetry = backend.fresh_telemetry()
    if telemetry is None or telemetry.loaded_models is None:
        return UNKNOWN
    return 1.0 if model.name in telemetry.loaded_models else 0.0


def score_low_utilization(backend: BackendState) -> float:
    """1 − the part of its slots in use; averaged with what the last poll says, if it does."""
    used = (backend.in_flight + backend.others) / (backend.spec.max_concurrent or 1)
    if backend.polled_utilization is not None:
        used = (used + backend.polled_utilization) / 2.0
    return 1.0 - used if 0.0 <= used <= 1.0 else 0.0


def score_latency(measures: Measures) -> float:
    """1 / (1 + seconds from dispatch to first byte)."""
    seconds = measures.latency_seconds
    if seconds is None:
        return UNKNOWN
    return HALF_LATENCY_SECONDS / (HALF_LATENCY_SECONDS + seconds)


def score_short_queue(backend: BackendState) -> float:
    """1 / (1 + requests that it has, running or waiting)."""
    return 1.0 / (1.0 + backend.in_flight + backend.others + backend.polled_waiting)


def score_high_throughput(measures: Measures) -> float:
    """r / (r + 50), r = output tokens per second of one request."""
    rate = measures.tokens_per_second
    if rate is None:
        return UNKNOWN
    return rate / (rate + HALF_TOKENS_PER_SECOND)


class Scoring:
    """The scorers with the points that the settings give them."""

    def __init__(self, tunables: Tunables) -> None:
        self._loaded = tunables.score_model_loaded
        self._utilization = tunables.score_low_utilization
        self._latency = tunables.score_latency
        self._queue = tunables.score_short_queue
        self._throughput = tunables.score_high_throughput
        self.affinity = tunables.score_cache_affinity

    def score(self, offers: Sequence[Offer]) -> None:
        """Bring the points and the total of each offer up to date, cache affinity aside.

        A latency or a rate that is not known of all of them says nothing about which is better:
        then it is unknown for each. Only what has changed since it was scored last is scored anew,
        mostly the one backend that got the latest request.
        """
        unknown = 0
        for offer in offers:
            unknown |= offer.measures.unknown
        for offer in offers:
            as_of = (offer.backend.changes + offer.measures.changes) * 4 + unknown
            if offer.scored_as_of != as_of:
                self._score(offer, unknown)
                offer.scored_as_of = as_of

    def points_at_home(self, home: Offer) -> Points:
        """The points of the cache key's home."""
        return home.backend_id, (*home.points[1][:-1], self.affinity)

    def _score(self, offer: Offer, unknown: int) -> None:
        backend, measures = offer.backend, offer.measures
        latency = UNKNOWN if unknown & NO_LATENCY else score_latency(measures)
        rate = UNKNOWN if unknown & NO_RATE else score_high_throughput(measures)
        parts = (
            self._loaded * offer.loaded,
            self._utilization * score_low_utilization(backend),
            self._latency * latency,
            self._queue * score_short_queue(backend),
            self._throughput * rate,
            PRIORITY_POINTS * backend.spec.priority,
            0.0,  # cache affinity
        )
        offer.points = (offer.backend_id, parts)
        offer.total = sum(parts)


# ---- P3, P4: the choice


def home_of(cache_key: str, offers: Sequence[Offer]) -> Offer:
    """The first of the offers in the key's own order."""

    def drawn(offer: Offer) -> float:
        spec = offer.backend.spec
        return rendezvous(cache_key, spec.address, spec.max_concurrent)

    return max(offers, key=drawn)


def place(
    cls: JobClass, cache_key: str | None, usable: int, scoring: Scoring
) -> tuple[Offer, ChoiceReason, list[Points]]:
    """The best of the class's usable backends, why it is that one, and all candidates' points."""
    candidates = cls.offers
    if usable != cls.everything:
        candidates = [offer for offer in candidates if offer.bit & usable]
    scoring.score(candidates)
    points: list[Points] = []
    totals: list[float] = []
    for offer in candidates:
        points.append(offer.points)
        totals.append(offer.total)
    home = None
    if cache_key is not None:
        home = home_of(cache_key, candidates)
        i = candidates.index(home)
        points[i] = scoring.points_at_home(home)
        totals[i] += scoring.affinity
    if len(candidates) == 1:
        return candidates[0], "only_candidate", points
    if cls.strategy == "affinity" and home is not None:
        return home, "affinity", points
    least = float("-inf") if cls.strategy == "round_robin" else max(totals) - TIE_POINTS
    chosen, tied = _picked_longest_ago(candidates, totals, least)
    if tied > 1:
        return chosen, "round_robin", points
    if chosen is home and len([t for t in totals if t >= least - scoring.affinity]) > 1:
        return chosen, "affinity", points  # without these points another one would have won
    return chosen, "score", points


def _picked_longest_ago(
    offers: Sequence[Offer], totals: Sequence[float], least: float
) -> tuple[Offer, int]:
    """Of those with at least ``least`` points the one that was chosen least recently; and how
    many there are. One pass, as it is taken for each request."""
    chosen, tied = offers[0], 0
    for offer, total in zip(offers, totals, strict=True):
        if total < least:
            continue
        if not tied or offer.backend.picked < chosen.backend.picked:
            chosen = offer
        tied += 1
    return chosen, tied


Constraint = Callable[[Job, ModelSpec], str | None]
#: What a request may need of a model, apart from its context.
CAPABILITIES: tuple[tuple[str, Constraint], ...] = (
    ("modality", has_modality),
    ("structured_output", has_structured_output),
    ("tools", has_tools),
)
