"""Checks that the address of a media URL is public, so that no fetch reaches the cluster's own network."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

Resolver = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host name and port; raises OSError."""

_SPECIAL = tuple(map(ip_network, (
    "192.0.0.0/24", "192.88.99.0/24", "::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48",
    "2002::/16", "2001::/32",
)))  # fmt: skip
"""Networks for protocols, and those whose IPv6 addresses wrap IPv4 ones: compatible, mapped, translated,
NAT64, 6to4, Teredo."""


def is_public(address: str) -> bool:
    """Return whether an address belongs to the public Internet and to one machine."""
    found: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    if any(found in network for network in _SPECIAL) or (isinstance(found, IPv6Address) and found.is_site_local):
        return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)
