"""Listening sockets of a link, and a Resolver of the host names that the link connects to.

Sockets are bound only to the addresses of the given host. Name resolution may take many seconds, so it runs on threads
of its own, never on the link thread."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from kvferry.protocol.errors import NodeLost, Retryable, reason
from kvferry.runtime.address import knows_ipv6, parse_host_port

BACKLOG = 256
"""Maximum number of connections that wait to be accepted."""
MAX_LOOKUPS = 8
"""Maximum number of concurrent name lookups. A lookup cannot be cancelled, so it occupies its thread until it ends."""
Address = tuple[Any, ...]
"""Address of a socket, as `connect` takes it."""
Found = Callable[[socket.AddressFamily, Address], None]


def listeners(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of the host, all on the same port. Raises OSError.

    A process that was just killed may have held the port. `::` means every address, of both families if the machine
    supports IPv6."""
    unbracketed = host.strip("[]")
    name = None if unbracketed in ("", "::") else unbracketed
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(f"{host} is not an address of this machine: {error}") from error
    if name is None and not knows_ipv6():
        found = [entry for entry in found if entry[0] != socket.AF_INET6]
    made: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            listener = opened.enter_context(socket.socket(family))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], port, *address[2:]))
            listener.listen(BACKLOG)
            listener.setblocking(False)
            port = listener.getsockname()[1]
            made.append(listener)
        opened.pop_all()
    return made


class Resolver:
    """Resolves addresses to socket addresses. submit(call): runs the call on the link thread."""

    def __init__(self, submit: Callable[[Callable[[], None]], None]):
        self._submit = submit
        self._running = 0

    def resolve(self, address: str, found: Found, failed: Callable[[Exception], None]) -> None:
        """Call `found` or `failed` on the link thread; call it immediately for a numeric address.

        Raises ValueError for an invalid address."""
        host, port = parse_host_port(address)
        with contextlib.suppress(ValueError):
            version = ipaddress.ip_address(host.partition("%")[0]).version
            if "%" not in host:
                found(socket.AF_INET if version == 4 else socket.AF_INET6, (host, port))
                return
        if self._running >= MAX_LOOKUPS:
            failed(Retryable(f"{self._running} host names are already being resolved"))
            return
        self._running += 1
        args = (host, port, found, failed)
        threading.Thread(target=self._look_up, args=args, name="kv-link-name", daemon=True).start()

    def _look_up(self, host: str, port: int, found: Found, failed: Callable[[Exception], None]) -> None:
        """Resolve a name. Runs on a thread of its own."""
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            report = partial(found, family, address)
        except Exception as error:
            report = partial(failed, NodeLost(f"{host} cannot be resolved: {reason(error)}"))
        self._submit(lambda: self._done(report))

    def _done(self, report: Callable[[], None]) -> None:
        self._running -= 1
        report()
