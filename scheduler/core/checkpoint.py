"""The shares as plain JSON values, to survive a restart: tags, window, credits, averages.

Times are written as ages, since the monotonic clock of the next process is another one. What is
held for running jobs is left out: it has not been used up, and will be charged when they end.
"""

from __future__ import annotations

import math
from typing import Any

from scheduler.core.cluster import Cluster
from scheduler.core.errors import Rejected
from scheduler.core.fairshare import FairShare
from scheduler.core.jobs import Unit
from scheduler.core.parts import Parts, split
from scheduler.core.units import UNSET, Roster, UnitState
from scheduler.core.window import Bucket

VERSION = 1


def save(roster: Roster, share: FairShare, cluster: Cluster, now: float) -> Parts[dict[str, Any]]:
    numbers = {unit: number for number, unit in enumerate(roster.units.values())}
    units: list[list[Any]] = []
    for some_units in split(numbers):
        units += [_saved_unit(unit, roster) for unit in some_units]
        yield
    window: list[dict[str, Any]] = []
    for bucket in list(share.window.buckets):
        tokens: list[list[float]] = []
        for some_tokens in split(bucket.tokens.items()):
            tokens += [[numbers[u], spent] for u, spent in some_tokens if u in numbers]
            yield
        window.append({"age": now - bucket.started_at, "tokens": tokens})
    return {
        "version": VERSION,
        "beta": share.burst.value(now),
        "latest_level": list(share.latest_level),
        "outputs": dict(share.outputs),
        "units": units,
        "window": window,
        "measures": [
            [backend_id, model_name, measures.latency_seconds, measures.tokens_per_second]
            for backend_id, backend in cluster.by_id.items()
            for model_name, measures in backend.measures.items()
        ],
    }


def _saved_unit(unit: UnitState, roster: Roster) -> list[Any]:
    tag = unit.tag - unit.held / roster.weight(unit) if unit.held else unit.tag
    return [
        list(unit.key) if isinstance(unit.key, tuple) else unit.key,
        unit.account.spec.user_id,
        unit.background,
        _finite(tag),
        _finite(unit.other_tag),
        unit.charged_total,
        dict(unit.outputs),
    ]


def _finite(tag: float) -> float | None:
    return tag if math.isfinite(tag) else None


def load(
    state: dict[str, Any], roster: Roster, share: FairShare, cluster: Cluster, now: float
) -> None:
    """Take up what can be understood; units of users that are gone are left out."""
    if state.get("version") != VERSION:
        return
    share.burst.beta = float(state.get("beta", 0.0))
    share.latest_level = [float(level) for level in state.get("latest_level", (0.0, 0.0))]
    share.outputs.update(state.get("outputs", {}))
    units = [_loaded_unit(saved, roster) for saved in state.get("units", ())]
    for saved in state.get("window", ()):
        tokens = {
            unit: float(spent)
            for number, spent in saved["tokens"]
            if (unit := units[number]) is not None
        }
        share.window.put_back(Bucket(now - saved["age"], tokens))
    for unit in units:
        if unit is not None:
            share.window.add(unit, 0.0, now)
    for backend_id, model_name, latency, rate in state.get("measures", ()):
        backend = cluster.by_id.get(backend_id)
        if backend is not None:
            backend.measures_of(model_name).restore(latency, rate)


def _loaded_unit(saved: list[Any], roster: Roster) -> UnitState | None:
    key, user_id, background, tag, other_tag, charged, outputs = saved
    unit_key: Unit = tuple(key) if isinstance(key, list) else key
    try:
        unit = roster.unit(unit_key, roster.account(user_id))
    except Rejected:
        return None
    tags = (UNSET if tag is None else tag, UNSET if other_tag is None else other_tag)
    unit.tag, unit.other_tag = tags if background == unit.background else tags[::-1]
    unit.charged_total = charged
    unit.outputs.update(outputs)
    return unit
