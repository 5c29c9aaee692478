"""What nodes of either role mount on their dock: one sender and one receiver, and what both roles do with them."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.engine.events import Event
from kvferry.kv_transfer.sender import Sender
from kvferry.node.arrivals import Arrivals
from kvferry.node.copies import Keeper
from kvferry.node.fetches import Fetches
from kvferry.node.service import Base
from kvferry.node.supplies import Supplies
from kvferry.node.tiers import Tiers


class Endpoints:
    """Before the dock starts. A role adds what is its own: whom its jobs' grants go to (`arrivals`), what it offers
    (`sender`)."""

    def __init__(self, base: Base) -> None:
        self.sender = Sender(base.dock, grant_timeout=base.settings.grant_timeout)
        self.arrivals = Arrivals(base)
        self.keeper = Keeper(base, self.arrivals)
        self.fetches = Fetches(base, self.arrivals)
        self.tiers = Tiers(base, self.fetches)
        self.supplies = Supplies(base, self.sender)

    def take(self, events: Sequence[Event]) -> None:
        """On the engine thread."""
        self.fetches.take(events)
        self.tiers.take(events)
