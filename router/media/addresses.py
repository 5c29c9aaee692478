"""Resolves host names of clients' URLs, and checks that an address is public, so that no fetch reaches the cluster."""

from __future__ import annotations

import asyncio
import socket
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


async def resolve(host: str, port: int) -> list[str]:
    """Return all addresses of a host. Raises OSError, and UnicodeError for a name that cannot be one."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
