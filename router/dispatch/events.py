"""Events that end or interrupt an attempt (NodeDrains, NodeSuspected), and the union of all that a node sends."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.messages import TokenDelta
from kvferry.router.dispatch.failures import Failure


@dataclass(frozen=True, slots=True)
class NodeDrains:
    """The node of a streaming attempt drains: it accepts no new work and will exit."""

    attempt: int


@dataclass(frozen=True, slots=True)
class NodeSuspected:
    """A node of a running attempt may hang."""

    attempt: int


Event = TokenDelta | Failure | NodeDrains | NodeSuspected
