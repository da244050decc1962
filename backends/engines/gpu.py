"""What a node tells of its GPUs: a DCGM exporter's metrics page or a JSON endpoint. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from backends.engines.replies import (
    Question,
    Reply,
    Sample,
    json_of,
    mapping,
    mappings,
    mean,
    number,
    samples,
    text,
    total,
)

_USED = "DCGM_FI_DEV_FB_USED"
_FREE = "DCGM_FI_DEV_FB_FREE"
_RESERVED = "DCGM_FI_DEV_FB_RESERVED"
_USE = "DCGM_FI_DEV_GPU_UTIL"
_TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"
_POWER = "DCGM_FI_DEV_POWER_USAGE"
_WANTED = frozenset({_USED, _FREE, _RESERVED, _USE, _TEMPERATURE, _POWER})
_MIB_PER_GIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. What the board does not support is None, never 0."""

    index: str
    uuid: str = ""
    name: str = ""
    memory_total_mib: float | None = None
    memory_used_mib: float | None = None
    memory_free_mib: float | None = None
    #: 0..1
    utilization: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Of several GPUs together, in MiB; None unless each of them tells it."""

    total_mib: float | None = None
    free_mib: float | None = None
    utilization: float | None = None


def parse_gpus(reply: Reply) -> tuple[Gpu, ...] | None:
    """The GPUs in ``reply``, or None when it is neither of the two forms."""
    question = Question("")
    answer = json_of({question: reply}, question)
    if answer is not None:
        gpus = mapping(answer).get("gpus")
        if not isinstance(gpus, list):
            return None
        return tuple(_from_json(entry, place) for place, entry in enumerate(mappings(gpus)))
    found = samples({question: reply}, question, _WANTED)
    return _from_metrics(found) if found else None


def assigned(gpus: Sequence[Gpu], indexes: Sequence[int] | None) -> list[Gpu]:
    """The node's GPUs with these indexes, in their order; all of them for None.

    One that the node does not tell of is there all the same, with everything about it unknown:
    the memory of the others alone would be less than what the backend has.
    """
    if indexes is None:
        return list(gpus)
    known = {gpu.index: gpu for gpu in gpus}
    return [known.get(str(index), Gpu(index=str(index))) for index in indexes]


def combined(gpus: Sequence[Gpu]) -> Memory:
    """What a backend that uses these GPUs has."""
    return Memory(
        total_mib=_sum_of_all(gpu.memory_total_mib for gpu in gpus),
        free_mib=_sum_of_all(gpu.memory_free_mib for gpu in gpus),
        utilization=mean(gpu.utilization for gpu in gpus),
    )


def _sum_of_all(values: Iterable[float | None]) -> float | None:
    values = list(values)
    return None if None in values else total(values)


def _from_json(entry: dict[str, Any], place: int) -> Gpu:
    index = entry.get("index")
    return Gpu(
        index=str(index) if isinstance(index, int) else str(place),
        uuid=text(entry.get("uuid")),
        name=text(entry.get("name")),
        memory_total_mib=_gib(entry.get("memory_total_gb")),
        memory_used_mib=_gib(entry.get("memory_used_gb")),
        memory_free_mib=_gib(entry.get("memory_free_gb")),
        utilization=_percent(entry.get("utilization_gpu")),
        temperature_celsius=number(entry.get("temperature_gpu")),
        power_watts=number(entry.get("power_draw_watts")),
    )


def _gib(value: Any) -> float | None:
    size = number(value)
    return None if size is None else round(size * _MIB_PER_GIB, 1)


def _percent(value: Any) -> float | None:
    part = number(value, 100.0)
    return None if part is None else part / 100


def _from_metrics(found: Iterable[Sample]) -> tuple[Gpu, ...]:
    cards: dict[str, dict[str, Sample]] = {}
    for sample in found:
        # Slices of a card (MIG) are reported beside it: counting both would count memory twice.
        if not sample.labels.get("GPU_I_ID"):
            key = sample.labels.get("UUID") or sample.labels.get("gpu", "")
            cards.setdefault(key, {})[sample.name] = sample
    return tuple(_card(card) for card in cards.values())


def _card(card: dict[str, Sample]) -> Gpu:
    def value(name: str, high: float = float("inf")) -> float | None:
        return number(card[name].value, high) if name in card else None

    labels = next(iter(card.values())).labels
    used, free = value(_USED), value(_FREE)
    known = used is not None and free is not None
    return Gpu(
        index=text(labels.get("gpu")),
        uuid=text(labels.get("UUID")),
        name=text(labels.get("modelName")),
        memory_total_mib=total([used, free, value(_RESERVED)]) if known else None,
        memory_used_mib=used,
        memory_free_mib=free,
        utilization=_percent(value(_USE)),
        temperature_celsius=value(_TEMPERATURE),
        power_watts=value(_POWER),
    )
