"""The end of a drain."""

from __future__ import annotations

from collections.abc import Collection

from django.db import transaction

from backends.models import Backend


def disable_drained(backend_ids: Collection[int]) -> list[str]:
    """Disable those of the backends that are still to be drained; returns their names.

    For the process that knows that nothing runs on them. An admin may have resumed one meanwhile,
    and another process may have been here: each row is looked at again under a lock, so that each
    drain ends once, with one line of history.
    """
    with transaction.atomic():
        drained = Backend.objects.select_for_update().filter(
            pk__in=backend_ids, enabled=True, draining=True
        )
        names = []
        for backend in drained:
            backend.enabled = backend.draining = False
            backend._change_reason = "drained: nothing runs on it any more"  # type: ignore[attr-defined]
            backend.save(update_fields=["enabled", "draining"])
            names.append(backend.name)
    return names
