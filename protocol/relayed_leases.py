"""Message by which a node passes leases of the registry to routers that cannot reach it (`RelayedLeases`)."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.wire import message


@message(79, checked=True)
@dataclass(frozen=True, slots=True)
class RelayedLeases:
    """Node → router, answer to `GET /leases`: leases as they are written in the registry, with their seals.

    They are those of all nodes that the node reads there, and its own."""

    records: tuple[bytes, ...]
