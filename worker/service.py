"""Service, the interface of a role's half of a node, which gets all engine events; NodeParts, the parts it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import FastAPI

from kvferry.engine.events import Event
from kvferry.engine.loop import EngineLoop
from kvferry.kv_transfer.dock import Dock
from kvferry.kv_transfer.ports import ShipStats
from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.errors import BlocksCorrupt, Cancelled, DeadlineExceeded, KvferryError
from kvferry.protocol.messages import CancelRequest, DecodeTarget
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.worker.engine_parts import EngineParts
from kvferry.worker.rates import RateMeter
from kvferry.worker.roles import Roles
from kvferry.worker.streams import RouterStreams
from kvferry.worker.tier_factory import OpenTiers
from kvferry.worker.transfer_stats import TransferStats


class Service(Protocol):
    """Role-specific half of a node.

    Both event methods get all events of each engine turn, in order, including events that the role ignores."""

    def to_link(self, events: Sequence[Event]) -> None:
        """Pass blocks, grants and migrations to the link, on the engine thread. Must not block."""

    def to_routers(self, events: Sequence[Event]) -> None:
        """Send tokens and ends of attempts to their routers, on the asyncio loop."""

    def cancel(self, cancel: CancelRequest) -> None:
        """Drop all attempts of a request up to the given one, on the asyncio loop.

        The engine has already dropped them."""

    def busy(self) -> bool:
        """Return whether attempts are running; a draining node waits for them."""

    def router_lost(self, router_id: str) -> None:
        """Cancel everything that runs for a lost router, on the asyncio loop."""

    def stop(self) -> None:
        """Close every open response; the link is closed next."""


@dataclass(frozen=True, slots=True)
class NodeParts:
    """Parts of a node that a role builds on: model loaded, threads not started.

    The service mounts its endpoints on the dock, which starts next.

    require_ready   raises Draining unless new work may begin; from any thread
    roles           current role of the node
    call_soon       runs a call on the asyncio loop; from any thread, ignored once the loop is closed
    keyed           paths that check an API key instead of the cluster secret
    adapters        returns the LoRA adapters that the node currently holds"""

    settings: WorkerSettings
    epoch: int
    app: FastAPI
    metrics: WorkerMetrics
    parts: EngineParts
    engine: EngineLoop
    dock: Dock
    rates: RateMeter
    transfer_stats: TransferStats
    streams: RouterStreams
    tiers: OpenTiers
    require_ready: Callable[[], None]
    roles: Roles
    call_soon: Callable[[Callable[[], None]], None]
    keyed: set[str] = field(default_factory=set)
    adapters: Callable[[], Sequence[AdapterName]] = tuple

    @property
    def target(self) -> DecodeTarget:
        """Return this node as the target of a grant."""
        return DecodeTarget(self.dock.name[0], self.epoch, self.dock.link.address, self.parts.fingerprint)

    def require(self, role: str) -> None:
        """Raise Draining unless new work of this role may begin.

        On the asyncio loop; the caller must begin the work before it awaits anything."""
        self.require_ready()
        self.roles.require(role)

    def shipped(self, stats: ShipStats) -> None:
        """Count an acknowledged ship of this node and learn its rate, on the asyncio loop."""
        self.metrics.ships["done"].inc()
        self.metrics.ship_bytes.inc(stats.bytes)
        self.metrics.ship_seconds.inc(stats.ship_s)
        self.metrics.ship_exposed.inc(stats.exposed_s)
        self.rates.shipped(stats.bytes, stats.sending_s)


def ship_outcome(error: KvferryError) -> str:
    """Return the metric label of a ship that ended with this error."""
    if isinstance(error, BlocksCorrupt):
        return "corrupt"
    return "aborted" if isinstance(error, Cancelled | DeadlineExceeded) else "failed"


MakeService = Callable[[NodeParts], Service]
