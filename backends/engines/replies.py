"""What is asked of a backend and what it answers, and readers that survive any answer.

A backend may lie: wrong types, HTML, negative counts, NaN. Every reader here turns what it cannot
use into None, which means unknown, and never raises.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

#: The largest count the database can hold; more is a lie.
MAX_COUNT = 2**31 - 1
MAX_MODELS = 1000
MAX_NAME_LENGTH = 300
MIB = 1024 * 1024

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Question:
    """One request of a poll. ``cache`` not empty: the answer holds as long as that text does, so
    that it need not be asked at each poll."""

    path: str
    method: str = "GET"
    body: bytes | None = None
    cache: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, whole. ``server`` is its Server header."""

    status: int
    body: bytes = b""
    server: str = ""


Replies = Mapping[Question, Reply]


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a metrics page."""

    name: str
    labels: Mapping[str, str]
    value: float


def json_of(replies: Replies, question: Question, form: Any = Any) -> Any:
    """The decoded body of a 200 answer to ``question``, else None.

    ``form``: a msgspec type that names the wanted fields, to skip the rest of a long answer.
    """
    reply = replies.get(question)
    if reply is None or reply.status != 200:
        return None
    try:
        return msgspec.json.decode(reply.body, type=form)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; whatever else is in it is left out."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def text(value: Any, limit: int = 100) -> str:
    """A short printable text, else ""."""
    if not isinstance(value, str) or len(value) > limit or not value.isprintable():
        return ""
    return value.strip()


def texts(value: Any) -> list[str] | None:
    """The texts of a list, or None when it is no list."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else None


def yes_no(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def number(value: Any, high: float = math.inf) -> float | None:
    """A finite number of 0..high, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int) and value > 2**63:
        return None
    return float(value) if 0 <= value <= high and math.isfinite(value) else None


def count(value: Any) -> int | None:
    """A whole number that is not negative; 2.0 counts as 2."""
    found = number(value, MAX_COUNT)
    return int(found) if found is not None and found.is_integer() else None


def positive(value: Any) -> int | None:
    """A count of at least 1: sizes and contexts, of which 0 makes no sense."""
    return count(value) or None


def mib(value: Any) -> float | None:
    """Bytes as MiB, to one decimal."""
    size = number(value)
    return None if size is None else round(size / MIB, 1)


def total(values: Iterable[float | None]) -> float | None:
    """The sum of what is known, or None when nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def names(entries: Iterable[tuple[Any, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Usable model names, each once, of ``(name, entry)`` pairs; at most ``MAX_MODELS``."""
    seen: set[str] = set()
    for candidate, entry in entries:
        name = text(candidate, MAX_NAME_LENGTH)
        if not name or name in seen:
            continue
        seen.add(name)
        yield name, entry
        if len(seen) >= MAX_MODELS:
            return


def samples(replies: Replies, question: Question, wanted: frozenset[str]) -> list[Sample]:
    """The lines of a metrics page whose name is in ``wanted``.

    A busy vLLM sends 700 lines of which a handful matter: lines are picked before they are read.
    """
    reply = replies.get(question)
    if reply is None or reply.status != 200:
        return []
    found = []
    for line in reply.body.decode("utf-8", "replace").splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in wanted:
            sample = _sample(name, line[len(name) :])
            if sample is not None:
                found.append(sample)
    return found


def _sample(name: str, rest: str) -> Sample | None:
    labels, _, tail = rest.rpartition("}") if rest.startswith("{") else ("", "", rest)
    fields = tail.split()
    try:
        value = float(fields[0])
    except (IndexError, ValueError):
        return None
    return Sample(name, dict(_LABEL.findall(labels)), value)


def first_present(found: Iterable[Sample], *candidates: str) -> list[float | None]:
    """The values of the first of ``candidates`` that has any: names change between versions."""
    found = list(found)
    for candidate in candidates:
        values = [number(sample.value) for sample in found if sample.name == candidate]
        if values:
            return values
    return []
