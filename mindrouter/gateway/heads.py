"""Heads of requests, and how one is known again that a connection has seen before."""

from __future__ import annotations

import re
from typing import Self

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*\r\n", re.IGNORECASE)
_LONGEST_NUMBER = 9
#: A longer one is not remembered: it would be kept for each open connection.
MAX_REMEMBERED_BYTES = 4096


class Head:
    """The request line and the headers, as (lower-case name, value); ``headers`` has the last of
    each name.

    Never changed once it is made, as all requests that begin alike share it.
    """

    __slots__ = ("headers", "key_digest", "lines", "method", "path")

    def __init__(self, method: str, path: str, lines: list[tuple[bytes, bytes]]) -> None:
        self.method = method
        self.path = path
        self.lines = lines
        self.headers = dict(lines)
        self.key_digest: str | None = None  # of its API key; worked out once, by who needs it

    def header(self, name: bytes) -> str | None:
        """A header's value, stripped; names are lower-case."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1").strip()


class Opening:
    """A head as it came, but for the number in Content-Length.

    Clients send the same head with each request on a connection. One that differs in nothing but
    that number means what the one before it meant, and needs no parser.
    """

    __slots__ = ("_after", "_before", "head")

    def __init__(self, head: Head, before: bytes, after: bytes) -> None:
        self.head = head
        self._before = before
        self._after = after

    @classmethod
    def of(cls, data: bytes, head: Head) -> Self | None:
        """How a whole request begins that was parsed to ``head``; None: not worth to remember."""
        end = data.find(b"\r\n\r\n", 0, MAX_REMEMBERED_BYTES) + 4
        found = _LENGTH.search(data, 0, max(0, end))
        if end < 4 or found is None or len(data) - end != int(found[1]):
            return None
        return cls(head, data[: found.start(1)], data[found.end(1) : end])

    def body_of(self, data: bytes) -> bytes | None:
        """The body of a whole request that begins like this; None for anything else."""
        before, after = self._before, self._after
        if not data.startswith(before):
            return None
        at = len(before)
        end = data.find(after, at, at + _LONGEST_NUMBER + len(after))
        number = data[at : max(at, end)]
        start = end + len(after)
        if not number.isdigit() or len(data) - start != int(number):
            return None
        return data[start:]
