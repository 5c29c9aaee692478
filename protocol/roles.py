"""Message by which a router changes the role of an elastic node."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.wire import message


@message(59, checked=True)
@dataclass(frozen=True, slots=True)
class ChangeRole:
    """Router → node with --elastic, `POST /role`: take this role.

    Answered once the change has begun, or if the node has the role; the lease shows when it is done. Refused
    (RoleChangeRefused) if a node of the same model changed its role less than `rest_s` seconds ago or is about to, or
    if this is the last ready node of its role."""

    role: str
    rest_s: float = 0.0
