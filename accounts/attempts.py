"""Failed keys, counted by the address that they came from.

A key that is right always passes: behind one address there may be a whole institute, and nobody
there should be locked out by one misconfigured client.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Iterable, Sequence
from functools import cache
from threading import Lock

from django.conf import settings

Headers = Iterable[tuple[bytes, bytes]]
MINUTE = 60.0
#: More than these are not kept apart: the one that was first seen longest ago is forgotten.
MOST_ADDRESSES = 10_000
_IPV6_PREFIX = 64  # what one subscriber has

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class FailedAttempts:
    """How many keys from each address were wrong in the minute that began with the first."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, int]] = {}  # {address: (since when, how many)}
        self._lock = Lock()  # pages are served by several threads

    def note(self, address: str, limit: int, now: float) -> int | None:
        """One more. Returns the seconds that are left of the minute where it is one too many."""
        with self._lock:
            began, count = self._counts.get(address, (now, 0))
            if now - began >= MINUTE:
                del self._counts[address]
                began, count = now, 0
            if count == 0 and len(self._counts) >= MOST_ADDRESSES:
                del self._counts[next(iter(self._counts))]
            self._counts[address] = began, count + 1
        return math.ceil(began + MINUTE - now) if count >= limit else None


#: Of this process: at the gateway, the management API and the metrics together.
failed = FailedAttempts()


def note_failed_key(subscriber: str) -> int | None:
    """One more wrong key. Returns the seconds to wait where it is one too many."""
    return failed.note(subscriber, int(settings.FAILED_KEYS_PER_MINUTE), time.monotonic())


def too_many_failed() -> str:
    """What whoever has to wait is told."""
    limit = settings.FAILED_KEYS_PER_MINUTE
    return f"More than {limit} wrong API keys in a minute came from your address."


def address_of(peer: str, headers: Headers) -> str:
    """Whom a request from ``peer`` comes from: behind trusted proxies, what the outermost of them
    says."""
    return subscriber_of(source_of(peer, headers))


def subscriber_of(address: str) -> str:
    """An IPv6 address is shortened to its network, which is one subscriber's."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if known.version == 6:
        return str(ipaddress.ip_network((known, _IPV6_PREFIX), strict=False))
    return str(known)


def source_of(peer: str, headers: Headers) -> str:
    """The same, whole; what a proxy says need not be an address."""
    return client_of(peer, _forwarded_for(headers)) if settings.TRUSTED_PROXIES else peer


def client_of(peer: str, forwarded: Iterable[str]) -> str:
    """The address that the outermost trusted proxy names in these ``X-Forwarded-For``."""
    address = peer
    told = [one.strip() for value in forwarded for one in value.split(",") if one.strip()]
    while told and is_trusted(address):
        address = told.pop()
    return address


def is_trusted(address: str) -> bool:
    """Whether a proxy at this address is believed."""
    networks = _networks(tuple(settings.TRUSTED_PROXIES))
    return bool(networks) and _is_in(address, networks)


def is_among(address: str, networks: Sequence[str]) -> bool:
    """Whether it is one of the addresses or in one of the networks."""
    return _is_in(address, _networks(tuple(networks)))


def _forwarded_for(headers: Headers) -> list[str]:
    return [value.decode("latin-1") for name, value in headers if name == b"x-forwarded-for"]


@cache
def _networks(networks: tuple[str, ...]) -> list[Network]:
    return [ipaddress.ip_network(one, strict=False) for one in networks]


def _is_in(address: str, networks: list[Network]) -> bool:
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(known in network for network in networks)
