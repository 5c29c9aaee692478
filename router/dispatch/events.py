"""Events that an attempt posts to its dispatch: tokens, failure, draining node, suspected node."""

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
