"""Endpoints that all roles of a node share: ships, fetches, replicas, tiers, KV events and media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvferry.engine.events import Event
from kvferry.kv_transfer.fetch import FetchClient
from kvferry.kv_transfer.sender import Sender
from kvferry.protocol.errors import Draining
from kvferry.protocol.media import MediaItem
from kvferry.worker.embedding_fetch import embedding_fetcher
from kvferry.worker.fetch_client import PrefixFetcher
from kvferry.worker.fetch_server import PrefixSupplier
from kvferry.worker.grant_dispatch import GrantDispatch
from kvferry.worker.kv_events.publisher import open_kv_events
from kvferry.worker.media_rendering import MediaRenderer
from kvferry.worker.media_routes import MediaRoutes
from kvferry.worker.replica_store import ReplicaStore
from kvferry.worker.service import NodeParts
from kvferry.worker.session_notes import NodeSessions
from kvferry.worker.tiers import Tiers


class MediaEndpoints:
    """Media part of a node's endpoints. On the asyncio loop unless stated."""

    def __init__(self, base: NodeParts) -> None:
        self._base, self._media = base, base.parts.media
        self._renderer: MediaRenderer | None = None
        if self._media is not None:
            self._renderer = MediaRenderer(
                self._media.encoder, self._media.limits, lambda: base.metrics.media.renders.inc()
            )
            self._media.embeddings.observe = self._observe
        self._routes = MediaRoutes(base.app, self._renderer, self._adapters)

    def busy(self) -> bool:
        """Return whether prompts with media are being rendered; a draining node waits for them."""
        return self._routes.running > 0

    def stop(self) -> None:
        """End the threads."""
        if self._media is not None and self._renderer is not None:
            self._renderer.stop()
            self._media.embeddings.stop()

    def _adapters(self) -> Mapping[str, str] | None:
        """Return the names of LoRA adapters by their ids; None while the node takes no new work."""
        try:
            self._base.require_ready()
        except Draining:
            return None
        return {each.id: each.name for each in self._base.adapters()}

    def _observe(self, item: MediaItem, outcome: str, seconds: float) -> None:
        """Count an item, and learn the encoder's rate. From any thread."""
        assert self._media is not None
        metrics, embeddings = self._base.metrics.media, self._media.embeddings
        metrics.items[item.modality, outcome].inc()
        metrics.seconds[item.modality].inc(seconds)
        if outcome == "encoded":
            self._base.rates.encoded(item.length, seconds)
        metrics.cache_bytes.set(embeddings.cached_bytes)
        metrics.waiting.set(embeddings.waiting)


class Endpoints:
    """Endpoints of a node that all roles have, created before the dock starts.

    Each role adds its own parts: handlers for its grant requests (`arrivals`), and ships that it offers (`sender`)."""

    def __init__(self, base: NodeParts) -> None:
        self.sender = Sender(base.dock, grant_timeout=base.settings.grant_timeout)
        self.arrivals = GrantDispatch(base)
        self.keeper = ReplicaStore(base, self.arrivals)
        client = FetchClient(base.dock, self.arrivals.receiver.cancel)
        self.fetches = PrefixFetcher(base, self.arrivals, client)
        self.embeddings = embedding_fetcher(base, self.arrivals, client)
        self.tiers = Tiers(base, self.fetches)
        self.supplies = PrefixSupplier(base, self.sender)
        self._kv_events = open_kv_events(base)
        base.app.post("/sessions", status_code=202)(NodeSessions(base.engine).post_notes)
        self.media = MediaEndpoints(base)

    def take(self, events: Sequence[Event]) -> None:
        """Handle engine events for fetches, tiers and KV events, on the engine thread."""
        self.fetches.take(events)
        self.tiers.take(events)
        if self._kv_events is not None:
            self._kv_events.take(events)

    def stop(self) -> None:
        """Stop publishing KV events, and the threads of media. The dock and the tiers belong to the node."""
        self.media.stop()
        if self._kv_events is not None:
            self._kv_events.stop()
