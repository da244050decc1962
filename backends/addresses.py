"""Which network addresses may be asked at all. Pure."""

from __future__ import annotations

import ipaddress
import socket

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

#: Where clouds serve their machines' credentials, beside the link-local addresses.
METADATA_ADDRESSES = frozenset({"100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254"})
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def objection(host: str) -> str | None:
    """Why the server at an IP address must not be asked; None for any other and for a name.

    Private and loopback addresses are fine, that is where backends live; link-local ones are not,
    since cloud metadata services answer there.
    """
    address = read_address(host)
    if address is None:
        return None
    if str(address) in METADATA_ADDRESSES:
        return "Metadata services are not backends."
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return "Link-local, multicast and unspecified addresses are not backends."
    return None


def read_address(host: str) -> Ip | None:
    """The IP address that ``host`` spells, if it is one and not a name."""
    try:
        # The C library also takes 2852039166, 0xA9FEA9FE and 169.254.43518 for 169.254.169.254.
        return ipaddress.IPv4Address(socket.inet_aton(host.rstrip(".")))
    except OSError:
        pass
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return None
    if address in _NAT64:  # translated on the way to the IPv4 address that it ends with
        return ipaddress.IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour or address
