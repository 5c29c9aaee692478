"""Sessions of clients: their names on the wire, and what routers tell nodes about them."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from kvferry.protocol.wire import message

NAME_BYTES = 12
"""Bytes of a session's name on the wire, written as hexadecimal digits."""
MAX_NOTES = 1024
"""Most requests and most sessions in one message."""


def session_name(tenant: str, given: str) -> str:
    """Return the name on the wire of a tenant's session that its client calls `given`; empty for none.

    It has a fixed length, and differs between tenants."""
    return blake2b(f"{len(tenant)}:{tenant}{given}".encode(), digest_size=NAME_BYTES).hexdigest() if given else ""


@message(69, checked=True)
@dataclass(frozen=True, slots=True)
class SessionNotes:
    """Router → any node, `POST /sessions`: what the router knows of sessions whose blocks the node may have.

    tools: ids of ended requests whose output calls tools; closed: names of sessions that their clients closed."""

    tools: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
