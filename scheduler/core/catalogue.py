"""Which class a job belongs to, and which jobs can never be served (P1, R12).

The configuration decides which backends are eligible; what only the moment decides (slots, fail
windows, free memory) does not matter here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduler.core.cluster import BackendState, Cluster, Offer
from scheduler.core.decisions import Failure
from scheduler.core.errors import Rejected
from scheduler.core.jobs import Job, ModelSpec, Strategy, Task
from scheduler.core.placement import (
    CAPABILITIES,
    Constraint,
    could_have_memory,
    has_context,
    has_memory,
    has_model,
    has_permission,
    score_model_loaded,
)
from scheduler.core.queue import JobClass, Pool

Pair = tuple[BackendState, ModelSpec]
AskKey = tuple[str, bool, bool, bool, bool, Task | None, int | None]


@dataclass(slots=True)
class Ask:
    """All that jobs with the same model, needs and group have in common."""

    pairs: list[Pair]
    failures: tuple[Failure, ...]
    smallest_context: float
    whole: JobClass | None = None  # for a job that is shorter than every context


class Catalogue:
    """The classes, found by what a job asks. Cached until the backends change."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._asks: dict[AskKey, Ask] = {}
        self._strategies: Mapping[str, Strategy] = {}
        self.classes: dict[tuple[str, int, int], JobClass] = {}
        self._pools: dict[int, Pool] = {}  # {mask: pool}
        #: for each class, those whose backends include all of its own, and the reverse (R16)
        self.supersets: dict[JobClass, list[JobClass]] = {}
        self.subsets: dict[JobClass, list[JobClass]] = {}

    # ---- finding a job's class

    def classify(
        self, job: Job, group_id: int | None, avoid: frozenset[int] = frozenset()
    ) -> tuple[JobClass, tuple[Failure, ...]]:
        """The job's class, and why each other backend can never serve it.

        Raises: Rejected when none could.
        """
        needs = job.needs
        key = (
            job.model_name, needs.vision, needs.tools, needs.json, needs.embeddings, needs.task,
            group_id,
        )  # fmt: skip
        ask = self._asks.get(key)
        if ask is None:
            ask = self._asks[key] = self._ask(job, group_id)
        tokens = job.context_tokens
        if tokens is None:
            tokens = job.prompt_tokens + (job.max_tokens or 0)
        if tokens <= ask.smallest_context and not avoid:
            cls, failures = ask.whole, ask.failures
            if cls is None:
                cls = ask.whole = self._class(job.model_name, ask.pairs, avoid)
        else:
            cls, failures = self._with_context(job, ask, tokens, avoid)
        if cls.hopeless:
            raise Rejected(
                "no_backend_available", f"No backend has enough memory for {job.model_name}."
            )
        return cls, failures

    def running_at(
        self, job: Job, group_id: int | None, backend_id: int
    ) -> tuple[JobClass, Offer, tuple[Failure, ...]]:
        """Likewise of a job that runs there already, whatever the configuration says of it now:
        its slot is in use, and it will be charged."""
        with contextlib.suppress(Rejected):
            cls, failures = self.classify(job, group_id)
            for offer in cls.offers:
                if offer.backend_id == backend_id:
                    return cls, offer, failures
        backend = self._cluster.kept(backend_id)
        model = backend.spec.models.get(job.model_name) or ModelSpec(name=job.model_name)
        cls = self._class(job.model_name, [(backend, model)], frozenset())
        return cls, _offer(cls.model_name, backend, model), ()

    def _ask(self, job: Job, group_id: int | None) -> Ask:
        failures: list[Failure] = []
        pairs = self._with_model(job, group_id, failures)
        for name, constraint in CAPABILITIES:
            pairs, why = _kept(pairs, failures, name, constraint, job)
            if not pairs:
                raise Rejected("capability_missing", f"{job.model_name} {why}.")
        contexts = [m.context_length for _, m in pairs if m.context_length is not None]
        return Ask(pairs, tuple(failures), min(contexts, default=float("inf")))

    def _with_model(self, job: Job, group_id: int | None, failures: list[Failure]) -> list[Pair]:
        pairs: list[Pair] = []
        known = False
        for backend in self._cluster.configured():
            spec = backend.spec
            if (why := has_model(job, spec)) is not None:
                failures.append((spec.backend_id, "model_available", why))
                continue
            known = True
            if (why := has_permission(group_id, spec)) is not None:
                failures.append((spec.backend_id, "permission", why))
                continue
            pairs.append((backend, spec.models[job.model_name]))
        if not known:
            raise Rejected("model_not_found", f"No backend has the model {job.model_name}.")
        if not pairs:
            raise Rejected("permission_denied", f"{job.model_name} is not for your group.")
        return pairs

    def _with_context(
        self, job: Job, ask: Ask, tokens: int, avoid: frozenset[int]
    ) -> tuple[JobClass, tuple[Failure, ...]]:
        """Backends whose context holds prompt and answer; if there is none, at least the prompt,
        since a client's limit on the answer often exceeds what it will get."""
        failures = list(ask.failures)
        prompt = job.prompt_tokens if job.context_tokens is None else tokens
        pairs = _fitting(ask.pairs, tokens, failures)
        if not pairs:
            failures = list(ask.failures)
            pairs = _fitting(ask.pairs, prompt, failures)
        if not pairs:
            longest = max(m.context_length or 0 for _, m in ask.pairs)
            raise Rejected(
                "context_length_exceeded",
                f"The prompt has about {prompt} tokens; {job.model_name} takes at most {longest}.",
            )
        return self._class(job.model_name, pairs, avoid), tuple(failures)

    def _class(self, model_name: str, pairs: list[Pair], avoid: frozenset[int]) -> JobClass:
        mask = avoided = 0
        for backend, _ in pairs:
            if backend.spec.backend_id in avoid:
                avoided |= backend.bit
            else:
                mask |= backend.bit
        if not mask:
            mask, avoided = avoided, 0
        key = (model_name, mask, avoided)
        cls = self.classes.get(key)
        if cls is None:
            pool = self._pools.get(mask)
            if pool is None:
                pool = self._pools[mask] = Pool(mask)
            cls = self.classes[key] = JobClass(model_name, pool, avoided)
            pool.classes.append(cls)
            self._fill(cls, pairs)
            self._relate()
        return cls

    def _fill(self, cls: JobClass, pairs: Iterable[Pair]) -> None:
        cls.offers = [_offer(cls.model_name, backend, model) for backend, model in pairs]
        cls.strategy = self._strategies.get(cls.model_name, "score")
        takers = [o.backend.spec for o in cls.offers]
        serving = [spec for spec in takers if spec.in_service]
        cls.queue_bound = sum(spec.max_queue for spec in serving or takers)
        self._look_at_telemetry(cls)

    # ---- changes

    def configure(self, strategies: Mapping[str, Strategy]) -> None:
        """Forget what was derived from the old configuration; classes keep their identity."""
        self._strategies = strategies
        self._asks.clear()
        for cls in list(self.classes.values()):
            self._refill(cls)
        self._relate()

    def _refill(self, cls: JobClass) -> None:
        """Bring a class up to date; whether its jobs still belong there is asked elsewhere."""
        bits = cls.everything
        pairs = [
            (backend, backend.spec.models[cls.model_name])
            for backend in self._cluster.configured()
            if backend.bit & bits and cls.model_name in backend.spec.models
        ]
        self._fill(cls, pairs)

    def forget_idle(self) -> None:
        """Drop the classes without jobs; they come back when they are needed."""
        self._asks.clear()
        self.classes = {k: cls for k, cls in self.classes.items() if cls.queued or cls.running}
        self._pools = {cls.mask: cls.pool for cls in self.classes.values()}
        for pool in self._pools.values():
            pool.classes = [cls for cls in pool.classes if cls.key in self.classes]
        self.supersets, self.subsets = {}, {}
        self._relate()

    def _relate(self) -> None:
        """Which classes' backends include which; to be called after every change of them."""
        classes = list(self.classes.values())
        for cls in classes:
            mask = cls.everything
            self.subsets[cls] = [k for k in classes if not k.everything & ~mask]
            self.supersets[cls] = supersets = [k for k in classes if not mask & ~k.everything]
            cls.least_bound = min(k.queue_bound for k in supersets)

    def look_at_telemetry(self) -> None:
        """Telemetry has changed, or has grown old."""
        for cls in self.classes.values():
            self._look_at_telemetry(cls)

    def _look_at_telemetry(self, cls: JobClass) -> None:
        cls.unfit = 0
        hopeless = bool(cls.offers)
        for offer in cls.offers:
            offer.loaded = score_model_loaded(offer.backend, offer.model)
            offer.scored_as_of = -1
            if has_memory(offer.backend, offer.model) is not None:
                cls.unfit |= offer.backend.bit
            if could_have_memory(offer.backend, offer.model) is None:
                hopeless = False
        cls.hopeless = hopeless


def _offer(model_name: str, backend: BackendState, model: ModelSpec) -> Offer:
    measures = backend.measures_of(model_name)
    return Offer(backend, model, measures, backend.bit, backend.spec.backend_id)


def _kept(
    pairs: list[Pair], failures: list[Failure], name: str, constraint: Constraint, job: Job
) -> tuple[list[Pair], str]:
    """The pairs that meet the constraint; what the others lack goes to ``failures``."""
    kept: list[Pair] = []
    last = ""
    for backend, model in pairs:
        why = constraint(job, model)
        if why is None:
            kept.append((backend, model))
        else:
            last = why
            failures.append((backend.spec.backend_id, name, why))
    return kept, last


def _fitting(pairs: list[Pair], tokens: int, failures: list[Failure]) -> list[Pair]:
    """The pairs whose context holds ``tokens``."""
    fitting: list[Pair] = []
    for backend, model in pairs:
        why = has_context(tokens, model)
        if why is None:
            fitting.append((backend, model))
        else:
            failures.append((backend.spec.backend_id, "context_length", why))
    return fitting
