"""Processes of a node's ranks with one GPU each, seen from rank 0: every rank's pool holds only its own KV heads."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable

import torch

from kvferry.engine.models.base import Model
from kvferry.engine.ranks.device_group import DeviceGroup
from kvferry.engine.ranks.group import Group
from kvferry.engine.ranks.rendezvous import FileRendezvous, Rendezvous
from kvferry.engine.ranks.sharded_model import ShardedModel
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.block_parts import RankPart, Segments
from kvferry.worker.device_rank_pool import DeviceRankPool
from kvferry.worker.hosts.remote_parts import RemotePart
from kvferry.worker.pool_memory import available_bytes, make_pool
from kvferry.worker.rank_memory import RankMemory
from kvferry.worker.ranks import MOVES, PROFILED, MeasureRoom, Ranks
from kvferry.worker.shared_rows import SharedRows


class DeviceRanks(Ranks):
    """Other ranks of a node, each with its own device and its own KV pool.

    device: rank 0's; the other ranks use the devices after it. Raises OSError, ConfigError."""

    def __init__(self, settings: WorkerSettings, device: torch.device) -> None:
        super().__init__(settings, device)
        self._moves.close_inherited()

    def wait_loaded(self, model: Model) -> ShardedModel:
        """Wait for all ranks to load their shards, then connect the device group. Raises ConfigError."""
        sharded = super().wait_loaded(model)
        # All have loaded: connect has a deadline that loading could exceed.
        self._broadcast(self._rendezvous.where)
        self._joined.connect(self._rendezvous.where)
        return sharded

    def available(self, layout: KVLayout, beside: int) -> float:
        """Return the bytes available to whole blocks, limited by the rank with the least memory.

        beside: additional bytes that each rank stores with its part of a block."""
        return self._of_whole_blocks(min(available_bytes(self.device), *self._available), layout, beside)

    def profiled(self, room: MeasureRoom, run: Callable[[], None], layout: KVLayout, beside: int) -> float:
        """Measure on all ranks while they compute on pools of one block; the rank with the least room counts."""
        self._broadcast(pickle.dumps((layout, 1)))
        rooms = [room(run)]
        self._broadcast(PROFILED)
        for rank in range(1, self._joined.ranks):
            try:
                wrong, own = pickle.loads(self._lines.receive(rank - 1))  # noqa: S301 - from a rank of this node
            except (OSError, EOFError):
                wrong, own = f"rank {rank} exited in the largest step; see its log", 0
            if wrong:
                raise ConfigError(wrong, param="gpu_memory_utilization")
            rooms.append(own)
        return self._of_whole_blocks(min(rooms), layout, beside)

    def _of_whole_blocks(self, least: float, layout: KVLayout, beside: int) -> float:
        """Return the bytes of whole blocks whose parts take `least` bytes on one rank."""
        own = layout.of_rank(self._joined.ranks).block_bytes + beside
        return least * (layout.block_bytes + beside) / own

    def make_pool(self, layout: KVLayout, blocks: int) -> torch.Tensor:
        """Make this rank's own pool, and let the other ranks make theirs. Raises ConfigError."""
        ranks = self._joined.ranks
        kv = make_pool(layout.of_rank(ranks), blocks, self.device)
        self._broadcast(pickle.dumps((layout, blocks)))
        rows = SharedRows(self._pool_fd, layout.block_bytes)
        own, first = Segments(kv, layout, 0, ranks), self._settings.ranks_per_host
        remote = [RemotePart(RankPart.of(layout, rank, ranks), self._moves, rank - 1) for rank in range(first, ranks)]
        self.pool = DeviceRankPool(own, rows, self._moves, ranks - 1, layout.block_bytes, remote)
        return kv

    def close(self) -> None:
        """Kill the other ranks and close the channels to them."""
        super().close()
        self._moves.close()
        self._joined.close()

    def _group(self, memory: RankMemory) -> Group:
        self._moves = self._channels(MOVES)
        self._rendezvous = self._make_rendezvous()
        self._joined = DeviceGroup(0, self._settings.tensor_parallel_size, self.device, self._rendezvous)
        return self._joined

    def _make_rendezvous(self) -> Rendezvous:
        """Return the rendezvous of the device groups of all ranks."""
        return FileRendezvous(os.memfd_create("meeting", os.MFD_CLOEXEC))

    def _inherited_fds(self, rank: int) -> tuple[int, ...]:
        return (*super()._inherited_fds(rank), self._moves.descriptor(rank - 1), *self._rendezvous.inherited)
