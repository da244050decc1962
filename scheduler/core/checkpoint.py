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
from scheduler.core.parts import JsonList, Parts, split
from scheduler.core.units import UNSET, Roster, UnitState
from scheduler.core.window import Bucket

VERSION = 1


class Saving:
    """The units in a checkpoint that is being written, each as it was when that began.

    Whoever is charged meanwhile is written first, so that all of it is of one moment.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._new: list[list[Any]] = []  # written since ``take``
        self.numbers: dict[UnitState, int] = {}

    def keep(self, unit: UnitState) -> None:
        """Write it as it is now, unless it has been written."""
        if unit not in self.numbers:
            self.numbers[unit] = len(self.numbers)
            self._new.append(_saved_unit(unit, self._roster))

    def take(self) -> list[list[Any]]:
        new, self._new = self._new, []
        return new


def save(roster: Roster, share: FairShare, cluster: Cluster, now: float) -> Parts[dict[str, Any]]:
    """Everything as it is at the first part; the long lists are encoded already."""
    saving = share.saving = Saving(roster)
    # Only the newest bucket is ever added to.
    buckets = [(bucket.started_at, bucket.tokens) for bucket in share.window.buckets]
    if buckets:
        buckets[-1] = (buckets[-1][0], dict(buckets[-1][1]))
    state = {
        "version": VERSION,
        "beta": share.burst.value(now),
        "latest_level": list(share.latest_level),
        "outputs": dict(share.outputs),
        "measures": [
            [backend_id, model_name, measures.latency_seconds, measures.tokens_per_second]
            for backend_id, backend in cluster.by_id.items()
            for model_name, measures in backend.measures.items()
        ],
    }
    units = JsonList()
    try:
        for some_units in split(roster.units.values()):
            for unit in some_units:
                saving.keep(unit)
            units.add(saving.take())
            yield
        units.add(saving.take())
    finally:
        share.saving = None
    window: list[dict[str, Any]] = []
    numbers = saving.numbers
    for started_at, tokens in buckets:
        counted = JsonList()
        for some_tokens in split(tokens.items()):
            counted.add([[numbers[u], spent] for u, spent in some_tokens if u in numbers])
            yield
        window.append({"age": now - started_at, "tokens": counted.encoded()})
    return state | {"units": units.encoded(), "window": window}


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


class BrokenCheckpointError(Exception):
    """What was saved is none of ours: what was read before the fault is taken up, and no more."""


def load(
    state: dict[str, Any], roster: Roster, share: FairShare, cluster: Cluster, now: float
) -> Parts[None]:
    """Take up what can be understood; units of users that are gone are left out.

    Raises: BrokenCheckpointError.
    """
    if state.get("version") != VERSION:
        return
    try:
        yield from _take_up(state, roster, share, cluster, now)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise BrokenCheckpointError(repr(error)) from error


def _take_up(
    state: dict[str, Any], roster: Roster, share: FairShare, cluster: Cluster, now: float
) -> Parts[None]:
    share.burst.beta = float(state.get("beta", 0.0))
    share.latest_level = [float(level) for level in state.get("latest_level", (0.0, 0.0))]
    share.outputs.update(state.get("outputs", {}))
    units: list[UnitState | None] = []
    for some_units in split(state.get("units", ())):
        units += [_loaded_unit(saved, roster) for saved in some_units]
        yield
    for saved in state.get("window", ()):
        tokens = yield from _loaded_tokens(saved["tokens"], units)
        share.window.put_back(Bucket(now - saved["age"], tokens))
    for some_loaded in split(units):
        for unit in some_loaded:
            if unit is not None:
                share.window.add(unit, 0.0, now)
        yield
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


def _loaded_tokens(
    saved: list[list[float]], units: list[UnitState | None]
) -> Parts[dict[UnitState, float]]:
    tokens: dict[UnitState, float] = {}
    for some_tokens in split(saved):
        for number, spent in some_tokens:
            unit = units[int(number)]
            if unit is not None:
                tokens[unit] = float(spent)
        yield
    return tokens
