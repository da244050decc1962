"""Long looks at the scheduler in parts of about 1 ms each, between which others may be served.

One look at 10,000 users takes tens of milliseconds; nobody can be served meanwhile. So a look is a
generator that yields between two parts and returns what it has seen. Jobs come and go while it
pauses: what it shows is as true as the moment it takes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")

#: Yields between two parts, returns the whole.
Parts = Generator[None, None, _T]

PART_ITEMS = 200  # users and the like: some 5 µs each
_encode = msgspec.json.Encoder().encode


def split(items: Iterable[_T]) -> Iterator[list[_T]]:
    """The items as they are now, in lists of ``PART_ITEMS``."""
    now = list(items)
    return (now[i : i + PART_ITEMS] for i in range(0, len(now), PART_ITEMS))


class JsonList:
    """A list as JSON that is put together from parts: encoded in one go, it would take as long as
    all of them."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, items: list[Any]) -> None:
        if items:
            self._parts.append(_encode(items)[1:-1])

    def encoded(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + b",".join(self._parts) + b"]")


def as_json(items: Iterable[Any]) -> Parts[msgspec.Raw]:
    """The items, which may come one by one, as a JSON list."""
    coming, found = iter(items), JsonList()
    while some := list(islice(coming, PART_ITEMS)):
        found.add(some)
        yield
    return found.encoded()


def whole(parts: Parts[_T]) -> _T:
    """All parts in one go."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            seen: _T = end.value
            return seen
