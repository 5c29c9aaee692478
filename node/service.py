"""The seam between a node and its role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastapi import FastAPI

from engine.events import Event
from engine.loop import EngineLoop
from kv_transfer.link import Link
from node.assembly import Assembled
from node.rates import RateMeter
from protocol.metrics import WorkerMetrics
from protocol.settings import WorkerSettings


class Service(Protocol):
    """The role's half of a node. Both get all news of a turn of the engine, in order; what is no news to them is among
    it."""

    def to_link(self, events: Sequence[Event]) -> None:
        """On the engine thread: blocks, grants and hand-overs go to the link. Must not block."""

    def to_routers(self, events: Sequence[Event]) -> None:
        """On the asyncio loop: tokens and ends of attempts go to their routers."""

    def busy(self) -> bool:
        """Whether attempts are under way (a draining node waits for them)."""

    def stop(self) -> None:
        """Close the link and every open response."""


@dataclass(frozen=True, slots=True)
class Base:
    """What a role is built on: a loaded node whose threads have not started. The service starts the link.

    require_ready   raises Draining unless new work may begin; from any thread
    call_soon       runs a call on the asyncio loop; from any thread, ignored once the loop is closed
    """

    settings: WorkerSettings
    epoch: int
    app: FastAPI
    metrics: WorkerMetrics
    parts: Assembled
    engine: EngineLoop
    link: Link
    rates: RateMeter
    require_ready: Callable[[], None]
    call_soon: Callable[[Callable[[], None]], None]

    @property
    def verify_checksums(self) -> float:
        """Share of blocks to checksum: CRC32 is taken on the CPU, so blocks in a GPU's memory are not checksummed."""
        return self.settings.verify_checksums if self.parts.kv.device.type == "cpu" else 0.0

    def shipped(self, num_bytes: int, seconds: float) -> None:
        """A ship from this node ended: count it and learn from it. On the asyncio loop."""
        self.metrics.ship_bytes.inc(num_bytes)
        self.metrics.ship_seconds.inc(seconds)
        self.rates.shipped(num_bytes, seconds)


MakeService = Callable[[Base], Service]
