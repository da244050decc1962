"""What the pages and the management API share: live figures, joined with the database."""

from __future__ import annotations

from dataclasses import fields

from backends.models import Backend
from scheduler import serving
from scheduler.explain import Case
from scheduler.models import Decision
from scheduler.serving import LiveView, QueuePicture


def live() -> LiveView | None:
    """The running scheduler's view of itself, at most 1 s old; None where none runs."""
    running = serving.current()
    return None if running is None else running.view()


def queue_picture() -> QueuePicture | None:
    """Everything that waits now; None where no scheduler runs."""
    running = serving.current()
    return None if running is None else running.queue_picture()


def evict(request_id: str) -> bool:
    """Drop a waiting request. False: no such request waits here."""
    running = serving.current()
    return running is not None and running.evict(request_id)


def case_of(decision: Decision) -> Case:
    """A stored decision as the pure explanations take it. At most one query, for names."""
    values = {one.name: getattr(decision, one.name) for one in fields(Case)}
    for name, value in values.items():
        if name.endswith("_at") and value is not None:
            values[name] = value.timestamp()
    values["backend_names"] = _backend_names(decision)
    return Case(**values)


def _backend_names(decision: Decision) -> dict[str, str]:
    """{backend id: name}: as recorded, else as they are called today."""
    names = {str(key): name for key, name in decision.backend_names.items()}
    if decision.selected_backend_id is not None:
        names.setdefault(str(decision.selected_backend_id), decision.selected_backend)
    mentioned = {*map(str, decision.candidate_backends), *decision.constraints}
    if missing := mentioned - set(names):
        found = Backend.objects.filter(pk__in=missing).values_list("pk", "name")
        names.update((str(pk), name) for pk, name in found)
    return names
