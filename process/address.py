"""Addresses as text: host:port, with brackets around an IPv6 host."""

from __future__ import annotations


def host_port(host: str, port: int) -> str:
    """`host:port`, ready to stand in a URL. A host that has its brackets keeps them."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def parse_host_port(address: str) -> tuple[str, int]:
    """Host without brackets, and port, of what `host_port` wrote. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    if not colon or not name or (":" in name and not bracketed) or not (port.isascii() and port.isdigit()):
        raise ValueError(f"an address is host:port or [host]:port, got {address!r}")
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"a port is 1 to 65535, got {address!r}")
    return name, int(port)
