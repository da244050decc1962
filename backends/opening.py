"""How a message begins that was seen before, so that the next one like it needs no parser."""

from __future__ import annotations

import re
from typing import Generic, Self, TypeVar

_T = TypeVar("_T")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*\r\n", re.IGNORECASE)
_LONGEST_NUMBER = 9
#: A longer one is not remembered: it would be kept for each open connection.
MAX_REMEMBERED_BYTES = 4096


class Opening(Generic[_T]):
    """A head as it came, but for the number in Content-Length, and what it was parsed to.

    Both sides send the same head with each message on a connection. One that differs in nothing
    but that number means what the one before it meant.
    """

    __slots__ = ("_after", "_before", "head")

    def __init__(self, head: _T, before: bytes, after: bytes) -> None:
        self.head = head
        self._before = before
        self._after = after

    @classmethod
    def of(cls, data: bytes, head: _T) -> Self | None:
        """How a whole message begins that was parsed to ``head``; None: not worth to remember."""
        end = data.find(b"\r\n\r\n", 0, MAX_REMEMBERED_BYTES) + 4
        found = _LENGTH.search(data, 0, max(0, end))
        if end < 4 or found is None or len(data) - end != int(found[1]):
            return None
        return cls(head, data[: found.start(1)], data[found.end(1) : end])

    def body_of(self, data: bytes) -> bytes | None:
        """The body of a whole message that begins like this; None for anything else."""
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
