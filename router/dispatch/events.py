"""Events from an attempt to its dispatch."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.messages import TokenDelta
from kvferry.router.dispatch.failures import Failure


@dataclass(frozen=True, slots=True)
class Drains:
    """The node where an attempt streams takes nothing new, and will end."""

    attempt: int


Event = TokenDelta | Failure | Drains
