"""Client sessions: their names on the wire, and the message in which routers report tool calls and closed sessions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b

from kvferry.protocol.wire import message

NAME_BYTES = 12
"""Bytes of a session's name on the wire, written as hexadecimal digits."""
TOOL_GROUPS = 64
"""Groups of tools whose pauses a node learns separately, for each tenant."""
MAX_NOTES = 1024
"""Maximum number of requests, and of sessions, in one message."""


def session_name(tenant: str, given: str) -> str:
    """Return the name on the wire of a tenant's session that its client calls `given`; empty for none.

    It has a fixed length, and differs between tenants."""
    return blake2b(f"{len(tenant)}:{tenant}{given}".encode(), digest_size=NAME_BYTES).hexdigest() if given else ""


def tool_group(names: Collection[str]) -> int:
    """Return the group of tools, from 1 to TOOL_GROUPS; 0 if no name is given.

    Different tools may share a group, so that names of clients take no memory on nodes."""
    if not names:
        return 0
    found = blake2b("\0".join(sorted(set(names))).encode(), digest_size=4).digest()
    return 1 + int.from_bytes(found, "big") % TOOL_GROUPS


@message(69, checked=True)
@dataclass(frozen=True, slots=True)
class SessionNotes:
    """Router → any node, `POST /sessions`: what the router knows about sessions whose blocks the node may have.

    tools: ids of ended requests whose output calls tools; groups: of these tools, one for each id; closed: names of
    sessions that their clients closed."""

    tools: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    closed: tuple[str, ...] = ()
