"""Message that changes the role of an elastic node."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.wire import message


@message(59, checked=True)
@dataclass(frozen=True, slots=True)
class ChangeRole:
    """Router → a node that runs with --elastic, `POST /role`: take this role.

    Answered once it has begun to, or has it already; the lease tells when it is done. It is refused (RoleKept) where a
    node of the same model changed its role less than `rest_s` seconds ago, one is about to, or this is the last ready
    one of its role."""

    role: str
    rest_s: float = 0.0
