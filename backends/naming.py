"""Which backends have which model, by every name that a client may use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backends.catalog import effective_engine, models_by_name
from backends.models import Backend


@dataclass(frozen=True, slots=True)
class Names:
    """{model name: names of the backends that have it}: those in service, and the others."""

    usable: Mapping[str, tuple[str, ...]]
    others: Mapping[str, tuple[str, ...]]


def load_names() -> Names:
    """As the configuration says at this moment; two queries."""
    usable: dict[str, list[str]] = defaultdict(list)
    others: dict[str, list[str]] = defaultdict(list)
    for backend in Backend.objects.select_related("status").prefetch_related("models"):
        status = getattr(backend, "status", None)
        engine = effective_engine(backend.engine, status.detected_engine if status else "")
        in_service = backend.enabled and not backend.draining and not backend.paused
        for name in models_by_name(engine, backend.models.all()):
            (usable if in_service else others)[name].append(backend.name)
    return Names(*({name: tuple(held) for name, held in one.items()} for one in (usable, others)))


def live_target(targets: Sequence[str], names: Names) -> str | None:
    """The target that an alias means now: the first that a backend in service has, else the first
    that any backend has, for which requests then wait. None: no backend has any."""
    for known in (names.usable, names.others):
        for target in targets:
            if target in known:
                return target
    return None
