"""The shares as plain JSON values, to survive a restart: tags, window, credits, averages.

Times are written as ages, since the monotonic clock of the next process is another one. What is
held for running jobs is left out: it has not been used up, and will be charged when they end.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec

from scheduler.core.cluster import Cluster
from scheduler.core.errors import Rejected
from scheduler.core.fairshare import FairShare
from scheduler.core.jobs import Unit
from scheduler.core.parts import JsonList, Parts, split
from scheduler.core.units import UNSET, Roster, UnitState
from scheduler.core.window import Bucket

VERSION = 1

_Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e300)]
#: As ``_saved_unit`` makes it.
_SavedUnit = tuple[
    int | str | list[int | str], int, bool, _Number | None, _Number | None, _Amount,
    dict[str, _Amount],
]  # fmt: skip
_SavedTokens = tuple[Annotated[int, msgspec.Meta(ge=0)], _Number]
#: {key of the state: what it is}; the long lists are looked at in parts.
_KINDS = {
    "beta": _Number,
    "latest_level": tuple[_Number, _Number],
    "outputs": dict[str, _Amount],
    "measures": list[tuple[int, str, _Amount | None, _Amount | None]],
    "units": list[Any],
    "window": list[dict[str, Any]],
}


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
    """What was saved is none of ours."""


def checked(value: Any, kind: Any) -> None:
    """Raises: BrokenCheckpointError, unless the JSON value is of this type."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BrokenCheckpointError(str(error)) from error


def check(state: Any) -> Parts[None]:
    """Raises: BrokenCheckpointError, where ``load`` or what comes after it would fail."""
    checked(state, dict[str, Any])
    if state.get("version") != VERSION:
        return
    for name, kind in _KINDS.items():
        if name in state:
            checked(state[name], kind)
    units = state.get("units", ())
    for some_units in split(units):
        checked(some_units, list[_SavedUnit])
        yield
    for saved in state.get("window", ()):
        checked(saved.get("age"), _Amount)
        checked(saved.get("tokens"), list[Any])
        for some_tokens in split(saved["tokens"]):
            checked(some_tokens, list[_SavedTokens])
            if any(number >= len(units) for number, _ in some_tokens):
                raise BrokenCheckpointError("tokens of a unit that was not saved")
            yield


def load(state: Any, roster: Roster, share: FairShare, cluster: Cluster, now: float) -> Parts[None]:
    """Take up all of it; units of users that are gone are left out, and so is what another
    version has saved.

    Raises: BrokenCheckpointError, before anything was taken up.
    """
    yield from check(state)
    if state.get("version") != VERSION:
        return
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
