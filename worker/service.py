"""Interface between a node and its role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastapi import FastAPI

from kvferry.engine.events import Event
from kvferry.engine.loop import EngineLoop
from kvferry.kv_transfer.dock import Dock
from kvferry.kv_transfer.ports import ShipStats
from kvferry.protocol.errors import BlocksCorrupt, Cancelled, DeadlineExceeded, KvferryError
from kvferry.protocol.messages import CancelRequest
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.worker.engine_parts import EngineParts
from kvferry.worker.rates import RateMeter
from kvferry.worker.roles import Roles
from kvferry.worker.streams import RouterStreams
from kvferry.worker.tier_opening import OpenTiers
from kvferry.worker.transfer_stats import TransferStats


class Service(Protocol):
    """The role's half of a node.

    Both get all news of a turn of the engine, in order; what is no news to them is among it."""

    def to_link(self, events: Sequence[Event]) -> None:
        """On the engine thread: blocks, grants and hand-overs go to the link. Must not block."""

    def to_routers(self, events: Sequence[Event]) -> None:
        """On the asyncio loop: tokens and ends of attempts go to their routers."""

    def cancel(self, cancel: CancelRequest) -> None:
        """All attempts of a request up to the given one are dropped; the engine has been told. On the asyncio loop."""

    def busy(self) -> bool:
        """Return whether attempts are under way (a draining node waits for them)."""

    def router_lost(self, router_id: str) -> None:
        """The router was given up: so is all that runs for it. On the asyncio loop."""

    def stop(self) -> None:
        """Close every open response. The link is closed next."""


@dataclass(frozen=True, slots=True)
class Base:
    """Foundation of a role: a node whose model is loaded and whose threads have not started.

    The service mounts its endpoints on the dock, which is started next.

    require_ready   raises Draining unless new work may begin; from any thread
    roles           which of them the node has
    call_soon       runs a call on the asyncio loop; from any thread, ignored once the loop is closed
    """

    settings: WorkerSettings
    epoch: int
    app: FastAPI
    metrics: WorkerMetrics
    parts: EngineParts
    engine: EngineLoop
    dock: Dock
    rates: RateMeter
    outflow: TransferStats
    streams: RouterStreams
    tiers: OpenTiers
    require_ready: Callable[[], None]
    roles: Roles
    call_soon: Callable[[Callable[[], None]], None]

    def require(self, role: str) -> None:
        """Raise Draining unless new work of this role may begin.

        On the asyncio loop, with nothing awaited between this and its beginning."""
        self.require_ready()
        self.roles.require(role)

    def shipped(self, stats: ShipStats) -> None:
        """A ship from this node was acknowledged: count it and learn from it. On the asyncio loop."""
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


MakeService = Callable[[Base], Service]
