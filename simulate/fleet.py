"""Fleet: all nodes of a simulated cluster, which renew their leases and write their blocks to the index; Shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cluster_state.index import on_tier
from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.cluster_state.registry import RENEWAL_S
from kvferry.protocol.errors import ConfigError
from kvferry.simulate.clock import Clock
from kvferry.simulate.cores import Cores
from kvferry.simulate.encoders import EncodePool
from kvferry.simulate.eviction import EVICTIONS
from kvferry.simulate.machine import LARGE, Machine
from kvferry.simulate.node import Node
from kvferry.simulate.node_lease import lease_of

SLICES = 10
"""Parts of the fleet that renew their leases one after the other."""
FLUSH_S = 0.05
"""Seconds between two writes of a node's changes to the index (cluster_state/index_writer.py)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a cluster: nodes of each role per model, and their machine.

    prefill 0: decode nodes compute prompts. encode 0: the nodes of prompts encode their media. Raises ConfigError."""

    prefill: int
    decode: int
    machine: Machine = LARGE
    models: tuple[str, ...] = ("m",)
    eviction: str = EVICTIONS[0]
    encode: int = 0

    def __post_init__(self) -> None:
        if self.prefill < 0 or self.decode < 1:
            raise ConfigError("a cluster needs at least one decode node and at least 0 prefill nodes", param="decode")


class Fleet:
    """Nodes of a simulated cluster, by name.

    `beat` and `flush` update registry and index as real nodes would."""

    def __init__(self, shape: Shape, clock: Clock) -> None:
        self.shape, self.clock = shape, clock
        self.store = MemoryStore(clock=clock.time, row_ttl_s=math.inf)
        self.nodes: dict[str, Node] = {}
        for model in shape.models:
            for role, count in (("prefill", shape.prefill), ("decode", shape.decode)):
                for number in range(count):
                    name = f"{model}-{role}-{number:04}"
                    self.nodes[name] = Node(name, role, model, shape.machine, clock, shape.eviction)
            if shape.machine.beside < 1:
                self._share(self.of("prefill", model), self.of("decode", model))
        self.encoders = {each: EncodePool(each, shape.encode, shape.machine, clock) for each in shape.models}
        self._turn = 0

    def _share(self, prefills: Sequence[Node], decodes: Sequence[Node]) -> None:
        """Let each decode node share the cores of a prefill node, in turn."""
        cores = [Cores() for _ in prefills]
        for nodes in (prefills, decodes) if cores else ():
            for number, node in enumerate(nodes):
                node.share(cores[number % len(cores)])

    def of(self, role: str, model: str) -> list[Node]:
        """Return the live nodes of a role and model."""
        return [each for each in self.nodes.values() if each.alive and each.role == role and each.model == model]

    async def announce(self, nodes: Sequence[Node]) -> None:
        """Write the leases of live nodes to the registry."""
        for node in nodes:
            if node.alive:
                await self.store.announce(lease_of(node))

    async def beat(self) -> None:
        """Renew the leases of one slice, and plan the next; SLICES calls take RENEWAL_S."""
        await self.announce(list(self.nodes.values())[self._turn :: SLICES])
        self._turn = (self._turn + 1) % SLICES
        self.clock.soon(RENEWAL_S / SLICES, self.beat)

    async def flush(self) -> None:
        """Write stored and evicted blocks of pools and tiers to the index, and plan the next flush."""
        for node in self.nodes.values():
            if node.dirty and node.alive:
                node.dirty = False
                stored, removed = node.memory.changes.drain()
                await self.store.publish(node.name, node.epoch, [*stored.values()], [*removed.values()])
                for tier in node.tiers:
                    await self.store.publish(on_tier(node.name, tier.name), node.epoch, *tier.drain_changes())
        self.clock.soon(FLUSH_S, self.flush)
