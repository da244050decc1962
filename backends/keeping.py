"""What polls found goes into the database.

Numbers go to the status rows, which no process reloads its configuration for. Models are
configuration: their rows are written only when something has really changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from backends.claims import POLLS_UNTIL_GONE
from backends.engines.gpu import Gpu, Memory, assigned, combined
from backends.engines.observation import ModelInfo, Observation
from backends.models import Backend, BackendModel, BackendStatus, Node, NodeStatus
from backends.probe import ProbeResult
from backends.sampling import sample_backend, sample_node
from scheduler.core.jobs import CAPABILITIES

_DETECTED = (*CAPABILITIES, "context_length", "vram_mib")
#: A model's need of memory moves a little with each load; less than this changes nothing.
_VRAM_TOLERANCE = 0.1


def save_observation(backend: Backend, result: ProbeResult) -> bool:
    """Keep the outcome of the poll that ``backend.status`` is the claim of; False when it was not
    wanted.

    It is not wanted when a later poll's outcome is there already, or when the backend's address,
    engine or key has changed since. A failed poll leaves the last known models and numbers, with
    their age.
    """
    claimed = backend.status
    started_at = claimed.attempted_at or timezone.now()
    with transaction.atomic():
        rows = BackendStatus.objects.filter(
            Q(answered_at=None) | Q(answered_at__lt=started_at),
            pk=claimed.pk,
            fingerprint=claimed.fingerprint,
        )
        before = rows.select_for_update().first()
        if before is None:
            return False
        values: dict[str, Any] = {
            "answered_at": started_at,
            "reachable": result.reachable,
            "error": result.error,
        }
        if result.observation is not None and result.observation.models is not None:
            values |= {"observed_at": started_at, "detected_engine": result.engine}
            values |= _numbers(result.observation, _node_memory(backend, started_at))
            values["missing_models"] = sync_models(
                backend, result.observation.models, before.missing_models
            )
        elif before.observed_at is None:
            values["detected_engine"] = result.engine
        if rows.update(**values) != 1:
            transaction.set_rollback(True)
            return False
        _announce_engine(backend, before.detected_engine, values.get("detected_engine"))
        sample_backend(backend, started_at, values)
    return True


def _announce_engine(backend: Backend, before: str, after: Any) -> None:
    """The names a model answers to depend on the engine, so a change of it counts as one of the
    configuration, which the database counts by writes to this table."""
    if after is not None and after != before:
        Backend.objects.filter(pk=backend.pk).update(name=F("name"))


def _numbers(observation: Observation, node: Memory) -> dict[str, Any]:
    def told_or(told: float | None, other: float | None) -> float | None:
        return other if told is None else told

    return {
        "version": observation.version,
        "running": observation.running,
        "waiting": observation.waiting,
        "slots": observation.slots,
        "kv_use": observation.kv_use,
        "gpu_use": node.utilization,
        "sleeping": observation.sleeping,
        "loaded_models": None if observation.loaded is None else dict(observation.loaded),
        "vram_total_mib": told_or(observation.vram_total_mib, node.total_mib),
        "vram_free_mib": told_or(observation.vram_free_mib, node.free_mib),
    }


def _node_memory(backend: Backend, now: datetime) -> Memory:
    """The memory of the backend's GPUs, unknown when their node's last good answer is too old."""
    oldest = now - timedelta(seconds=float(settings.BACKEND_STALE_AFTER))
    status = NodeStatus.objects.filter(node=backend.node_id, observed_at__gte=oldest).first()
    if status is None:
        return Memory()
    return combined(assigned([Gpu(**gpu) for gpu in status.gpus], backend.gpu_indexes))


def save_node(node: Node, started_at: datetime, gpus: Sequence[Gpu] | None, error: str) -> None:
    """Keep what a node told; ``gpus`` None is a failed poll, which leaves the last known ones."""
    rows = NodeStatus.objects.filter(Q(observed_at=None) | Q(observed_at__lt=started_at), node=node)
    values: dict[str, Any] = {"error": error, "claimed_until": None}
    if gpus is not None:
        values |= {"observed_at": started_at, "gpus": [asdict(gpu) for gpu in gpus]}
    with transaction.atomic():
        if rows.update(**values) == 1 and gpus is not None:
            sample_node(node, started_at, gpus)


# ---- models


def sync_models(
    backend: Backend, models: Sequence[ModelInfo], missing: Mapping[str, int]
) -> dict[str, int]:
    """Make the backend's model rows those that a good poll listed; returns the new ``missing``:
    for each listed row that was not among them, the number of good polls in a row.

    Rows made by hand stay, hand-set values are never touched. A model goes only after
    ``POLLS_UNTIL_GONE`` polls without it: a server that is reloading lists none for a moment.
    """
    rows = {row.name: row for row in BackendModel.objects.filter(backend=backend)}
    listed = {model.name: model for model in models}
    _update_rows([(rows[n], m) for n, m in listed.items() if n in rows])
    _add(backend, [_new_row(backend, model) for n, model in listed.items() if n not in rows])
    absent = [row for name, row in rows.items() if row.listed and name not in listed]
    counts = {row.name: int(missing.get(row.name, 0)) + 1 for row in absent}
    gone = [row for row in absent if counts[row.name] >= POLLS_UNTIL_GONE]
    _remove(gone)
    return {name: n for name, n in counts.items() if n < POLLS_UNTIL_GONE}


def _add(backend: Backend, new: Sequence[BackendModel]) -> None:
    """In bulk, and with the beginning of their histories: later changes have what was before."""
    # An admin may be adding the very same name.
    BackendModel.objects.bulk_create(new, ignore_conflicts=True)
    names = [row.name for row in new]
    made = BackendModel.objects.filter(backend=backend, name__in=names, by_hand=False)
    BackendModel.history.bulk_history_create(made, default_change_reason="Found by a poll")


def _new_row(backend: Backend, model: ModelInfo) -> BackendModel:
    row = BackendModel(backend=backend, name=model.name, by_hand=False)
    _apply(row, model)
    return row


def _update_rows(pairs: Sequence[tuple[BackendModel, ModelInfo]]) -> None:
    changed = [row for row, model in pairs if _apply(row, model)]
    if changed:
        fields = ["listed", *(f"detected_{name}" for name in _DETECTED)]
        BackendModel.objects.bulk_update(changed, fields)


def _apply(row: BackendModel, model: ModelInfo) -> bool:
    """Write what was detected into ``row``; True when that changed it."""
    values: dict[str, Any] = {
        "listed": True,
        "detected_context_length": _context_length(row, model),
        "detected_vram_mib": _vram(row, model),
    }
    for name in CAPABILITIES:
        value = getattr(model, name)
        if value is not None or model.detailed:
            values[f"detected_{name}"] = value
    changed = {name for name, value in values.items() if getattr(row, name) != value}
    for name in changed:
        setattr(row, name, values[name])
    return bool(changed)


def _context_length(row: BackendModel, model: ModelInfo) -> int | None:
    """As it runs now; else as it last ran, within what the model can do at most."""
    known = row.detected_context_length
    if model.context_length is not None:
        return model.context_length
    if model.context_limit is not None:
        return min(known or model.context_limit, model.context_limit)
    return None if model.detailed else known


def _vram(row: BackendModel, model: ModelInfo) -> float | None:
    """As measured when it was last loaded; before that, at least what its weights take."""
    known = row.detected_vram_mib
    if model.vram_mib is None:
        return max(filter(None, (known, model.vram_at_least_mib)), default=None)
    if known is not None and abs(known - model.vram_mib) <= _VRAM_TOLERANCE * model.vram_mib:
        return known
    return model.vram_mib


def _remove(rows: Sequence[BackendModel]) -> None:
    """Delete rows that nobody put anything into; the others stay, not listed."""
    touched = [row for row in rows if row.by_hand or _has_hand_set_values(row)]
    kept = {row.pk for row in touched}
    if kept:
        BackendModel.objects.filter(pk__in=kept).update(listed=False)
    for row in rows:
        if row.pk not in kept:
            row._change_reason = "No longer listed"  # type: ignore[attr-defined]
            row.delete()


def _has_hand_set_values(row: BackendModel) -> bool:
    return any(getattr(row, name) is not None for name in _DETECTED)
