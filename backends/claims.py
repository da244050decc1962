"""Whose poll is due, and the right to make it: one poll per backend and node at a time.

A claim is a conditional UPDATE: of several processes that want one row, one changes it. A claim
expires, so that a process that died holds nothing up.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Q, QuerySet
from django.utils.crypto import salted_hmac

from backends.models import Backend, BackendModel, BackendStatus, Node, NodeStatus

#: Longer than any poll takes.
CLAIM_SECONDS = 10.0
#: Good polls in a row without a model, after which it is gone.
POLLS_UNTIL_GONE = 3
#: Polls start with the beat's ticks, one a second: one that is due within half a tick goes along.
_HALF_TICK_SECONDS = 0.5

#: What is known of a server that was never asked.
UNKNOWN: dict[str, Any] = {
    "answered_at": None,
    "observed_at": None,
    "reachable": None,
    "error": "",
    "version": "",
    "running": None,
    "waiting": None,
    "slots": None,
    "kv_use": None,
    "gpu_use": None,
    "sleeping": None,
    "loaded_models": None,
    "vram_total_mib": None,
    "vram_free_mib": None,
}


def fingerprint(backend: Backend) -> str:
    """Of the address, engine and key that a poll uses; tells nothing of the key."""
    parts = f"{backend.base_url}\n{backend.engine}\n{backend.api_key or ''}"
    return salted_hmac("backends.claims", parts).hexdigest()


def claim_due(now: datetime) -> list[Backend]:
    """The enabled backends whose time has come, claimed for the caller to poll.

    Of several callers each backend falls to one. Backends whose address, engine or key has changed
    since their last poll are due at once, however the change was made.
    """
    backends = with_status(Backend.objects.filter(enabled=True))
    return [backend for backend in backends if _is_due(backend, now) and claim(backend, now)]


def with_status(backends: QuerySet[Backend]) -> list[Backend]:
    """The backends with their status rows, which are made where they are missing."""
    missing = backends.filter(status=None)
    rows = [BackendStatus(backend=backend) for backend in missing]
    if rows:
        BackendStatus.objects.bulk_create(rows, ignore_conflicts=True)
    return list(backends.select_related("status"))


def _is_due(backend: Backend, now: datetime) -> bool:
    if backend.status.fingerprint != fingerprint(backend):
        return True
    return _time_has_come(backend.status.attempted_at, backend.poll_interval, now)


def _time_has_come(last: datetime | None, interval: float, now: datetime) -> bool:
    if last is None or last > now + timedelta(seconds=interval):
        return True  # the second: the clock was set back
    return now >= last + timedelta(seconds=interval - min(_HALF_TICK_SECONDS, interval / 2))


def claim(backend: Backend, now: datetime) -> bool:
    """Take the right to poll ``backend``, or return False when somebody has it or has polled since
    ``backend.status`` was read.

    A poll of the backend's former address hinders nobody: what it still brings is turned down by
    its fingerprint. On success ``backend.status`` is the claimed row.
    """
    current, status = fingerprint(backend), backend.status
    values: dict[str, Any] = {
        "attempted_at": now,
        "claimed_until": now + timedelta(seconds=CLAIM_SECONDS),
    }
    free = _free(now)
    if status.fingerprint != current:
        values |= {"fingerprint": current, "missing_models": _on_probation(backend), **UNKNOWN}
        free = Q()
    # Not as it is now but as it was when it was found due: a poll since then was that poll.
    same = Q(pk=status.pk, attempted_at=status.attempted_at, fingerprint=status.fingerprint)
    if BackendStatus.objects.filter(same & free).update(**values) != 1:
        return False
    backend.status = BackendStatus.objects.get(pk=status.pk)
    return True


def _free(now: datetime) -> Q:
    return (
        Q(claimed_until=None)
        | Q(claimed_until__lte=now)
        | Q(claimed_until__gt=now + timedelta(seconds=CLAIM_SECONDS))  # the clock was set back
    )


def _on_probation(backend: Backend) -> dict[str, int]:
    """The models that a changed backend's first good poll must list, or else they go at once.

    Until then they stay: a mere change of key interrupts nobody.
    """
    listed = BackendModel.objects.filter(backend=backend, listed=True)
    return dict.fromkeys(listed.values_list("name", flat=True), POLLS_UNTIL_GONE - 1)


def release(backend: Backend) -> None:
    """Give the claim on ``backend`` back, unless somebody else has taken it meanwhile."""
    status = backend.status
    BackendStatus.objects.filter(pk=status.pk, claimed_until=status.claimed_until).update(
        claimed_until=None
    )


def claim_due_nodes(now: datetime) -> list[Node]:
    """The nodes with telemetry whose time has come, claimed for the caller to poll."""
    polled = Node.objects.exclude(telemetry_url="")
    rows = [NodeStatus(node=node) for node in polled.filter(status=None)]
    if rows:
        NodeStatus.objects.bulk_create(rows, ignore_conflicts=True)
    return [node for node in polled.select_related("status") if _claim_node(node, now)]


def _claim_node(node: Node, now: datetime) -> bool:
    status = node.status
    if not _time_has_come(status.attempted_at, float(settings.BACKEND_POLL_INTERVAL), now):
        return False
    same = Q(pk=status.pk, attempted_at=status.attempted_at)
    values = {"attempted_at": now, "claimed_until": now + timedelta(seconds=CLAIM_SECONDS)}
    return NodeStatus.objects.filter(same & _free(now)).update(**values) == 1
