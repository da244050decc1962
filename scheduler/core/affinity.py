"""P3: the backend that a cache key belongs to.

Weighted rendezvous hashing: every backend draws a number from the key and its own address, the
highest wins. Adding or removing a backend moves only the keys that it wins or had won.
"""

from __future__ import annotations

import hashlib
import math

_SPAN = float(1 << 64)


def rendezvous(cache_key: str, address: str, weight: float) -> float:
    """The number that ``address`` draws for ``cache_key``, above 0; the highest is the key's home.

    ``weight`` is the backend's slots: of two backends the one with twice the slots wins twice as
    many keys. Source: weighted rendezvous hashing, −weight/ln(u) with u uniform in (0, 1).
    """
    digest = hashlib.blake2b(f"{cache_key}:{address}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / _SPAN
    if uniform >= 1.0:  # the largest digest rounds up
        uniform = 1.0 - 2.0**-53
    return weight / -math.log(uniform)
