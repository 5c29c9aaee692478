"""Ranks of a node with a GPU each, whose pools hold their own heads."""

from __future__ import annotations

import os
import pickle

import torch

from kvferry.engine.models.base import Model
from kvferry.engine.ranks.device_group import DeviceGroup
from kvferry.engine.ranks.group import Group
from kvferry.engine.ranks.sharded_model import ShardedModel
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.rank_channel import RankChannels
from kvferry.worker.device_rank_pool import DeviceRankPool
from kvferry.worker.pool_memory import available_bytes, make_pool
from kvferry.worker.rank_memory import RankMemory
from kvferry.worker.ranks import Ranks
from kvferry.worker.segments import Segments
from kvferry.worker.shared_rows import SharedRows


class DeviceRanks(Ranks):
    """device: of the first one; the others have those behind it. Raises OSError, ConfigError."""

    def __init__(self, settings: WorkerSettings, device: torch.device) -> None:
        ranks = settings.tensor_parallel_size
        self._moves = RankChannels(ranks - 1)
        self._meeting_fd = os.memfd_create("meeting", os.MFD_CLOEXEC)
        self._joined = DeviceGroup(0, ranks, device, self._meeting_fd)
        super().__init__(settings, device)
        os.close(self._meeting_fd)
        self._moves.given()

    def lead(self, model: Model) -> ShardedModel:
        led = super().lead(model)
        self._told(b"")  # all are there: none is waited for with a deadline while it loads
        self._joined.connect()
        return led

    def available(self, layout: KVLayout, beside: int) -> float:
        own = layout.of_rank(self._joined.ranks).block_bytes + beside
        least = min(available_bytes(self.device), *self._available)
        return least * (layout.block_bytes + beside) / own

    def make_pool(self, layout: KVLayout, blocks: int) -> torch.Tensor:
        """This rank's own."""
        ranks = self._joined.ranks
        kv = make_pool(layout.of_rank(ranks), blocks, self.device)
        self._told(pickle.dumps((layout, blocks)))
        rows = SharedRows(self._pool_fd, layout.block_bytes)
        own = Segments(kv, layout, 0, ranks, rows)
        self.pool = DeviceRankPool(own, rows, self._moves, ranks - 1, layout.block_bytes)
        return kv

    def close(self) -> None:
        super().close()
        self._moves.close()
        self._joined.close()

    def _group(self, memory: RankMemory) -> Group:
        return self._joined

    def _given(self, rank: int) -> tuple[int, ...]:
        return (*super()._given(rank), self._moves.give(rank - 1), self._meeting_fd)
