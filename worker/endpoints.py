"""Link endpoints that both roles share: sender, receiver, prefix fetch, replicas and tiers."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.engine.events import Event
from kvferry.kv_transfer.sender import Sender
from kvferry.worker.fetch_client import PrefixFetcher
from kvferry.worker.fetch_server import PrefixSupplier
from kvferry.worker.grant_dispatch import GrantDispatch
from kvferry.worker.kv_events.publisher import open_kv_events
from kvferry.worker.replica_store import ReplicaStore
from kvferry.worker.service import Base
from kvferry.worker.sessions import NodeSessions
from kvferry.worker.tiers import Tiers


class Endpoints:
    """Link endpoints of a node, created before the dock starts.

    Each role adds its own parts: handlers for its grant requests (`arrivals`), and ships that it offers (`sender`)."""

    def __init__(self, base: Base) -> None:
        self.sender = Sender(base.dock, grant_timeout=base.settings.grant_timeout)
        self.arrivals = GrantDispatch(base)
        self.keeper = ReplicaStore(base, self.arrivals)
        self.fetches = PrefixFetcher(base, self.arrivals)
        self.tiers = Tiers(base, self.fetches)
        self.supplies = PrefixSupplier(base, self.sender)
        self._kv_events = open_kv_events(base)
        base.app.post("/sessions", status_code=202)(NodeSessions(base.engine).post_notes)

    def take(self, events: Sequence[Event]) -> None:
        """Handle engine events for fetches, tiers and KV events, on the engine thread."""
        self.fetches.take(events)
        self.tiers.take(events)
        if self._kv_events is not None:
            self._kv_events.take(events)

    def stop(self) -> None:
        """Stop publishing KV events. The dock and the tiers belong to the node."""
        if self._kv_events is not None:
            self._kv_events.stop()
