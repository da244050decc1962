"""A backend's life in service: enabled, disabled, drained, paused, resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backends.models import Backend

#: What each action sets. A drain ends by itself (see ``draining``), a pause does not.
ACTIONS: Mapping[str, Mapping[str, bool]] = {
    "enable": {"enabled": True, "draining": False},
    "disable": {"enabled": False, "draining": False},
    "drain": {"draining": True},
    "pause": {"paused": True},
    "resume": {"draining": False, "paused": False},
}


def change(backends: Iterable[Backend], action: str, *, reason: str = "") -> list[Backend]:
    """Do one of ``ACTIONS`` to each backend; returns those that it changed.

    Each is saved by itself, since the history does not see an update of many rows. What is
    disabled has nothing to drain.
    """
    changed = []
    for backend in backends:
        values = ACTIONS[action]
        if action == "drain" and not backend.enabled:
            continue
        if all(getattr(backend, name) == value for name, value in values.items()):
            continue
        for name, value in values.items():
            setattr(backend, name, value)
        backend._change_reason = reason or action  # type: ignore[attr-defined]
        backend.save(update_fields=list(values))
        changed.append(backend)
    return changed
