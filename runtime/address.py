"""Parsing and formatting of host:port addresses, with IPv6 brackets; checks and asynchronous lookup of host names."""

from __future__ import annotations

import asyncio
import ipaddress
import socket


def host_port(host: str, port: int) -> str:
    """Return `host:port` for use in a URL; an IPv6 host gets brackets unless it has them."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def parse_host_port(address: str) -> tuple[str, int]:
    """Split `host:port` or `[host]:port` into the host without brackets and the port. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    if not colon or not name or (":" in name and not bracketed) or not (port.isascii() and port.isdigit()):
        raise ValueError(f"an address must be host:port or [host]:port, got {address!r}")
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"a port must be 1 to 65535, got {address!r}")
    return name, int(port)


def family_of(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the socket family for `host`, and the host without brackets, as `bind` takes it.

    `::` listens on every address of both families, and on all IPv4 addresses if the machine has no IPv6."""
    address = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if address == "::" and not knows_ipv6():
        return socket.AF_INET, "0.0.0.0"  # noqa: S104 - what the operator chose, without IPv6
    return (socket.AF_INET6 if ":" in address else socket.AF_INET), address


def knows_ipv6() -> bool:
    """Return whether this machine can bind a socket to an IPv6 address."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def loopback() -> str:
    """Return an address that reaches this machine only: 127.0.0.1, or ::1 on a machine without IPv4."""
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError:
        return "::1"
    return "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Return whether a host name or address names this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def dialable(host: str) -> str:
    """Return the address at which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - binds nothing


async def resolve(host: str, port: int) -> list[str]:
    """Return all addresses of a host. Raises OSError, and UnicodeError for a name that cannot be one."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
