"""Ways in which the same bytes may come."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator


def ways_to_cut(data: bytes) -> Iterator[list[bytes]]:
    """All at once, byte by byte, and twice at places that follow from the bytes."""
    yield [data] if data else []
    yield [data[i : i + 1] for i in range(len(data))]
    chance = random.Random(zlib.crc32(data))
    for longest in (17, 200):
        reads, at = [], 0
        while at < len(data):
            size = chance.randint(1, longest)
            reads.append(data[at : at + size])
            at += size
        yield reads
