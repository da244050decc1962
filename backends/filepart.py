"""A part of a request's body that lies in a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO


@dataclass(frozen=True, slots=True)
class FilePart:
    """``size`` bytes of an open file from ``offset`` on; read only when they are sent."""

    file: IO[bytes]
    offset: int
    size: int

    def __len__(self) -> int:
        return self.size

    def pieces(self, most: int) -> Iterator[memoryview]:
        """The bytes in their order, at most ``most`` at a time. Raises: OSError."""
        at, end = self.offset, self.offset + self.size
        while at < end:
            piece = os.pread(self.file.fileno(), min(most, end - at), at)
            if not piece:
                raise OSError("the file is shorter than it was")
            at += len(piece)
            yield memoryview(piece)
