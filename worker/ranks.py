"""Ranks of a node: this process is rank 0 and supervises the others.

On a CPU they share the pool of KV blocks. Each writes its heads' bytes of a block, so this process, which has the link,
finds blocks that are whole and lie as those of any other node do. On GPUs each has its own: see `device_ranks`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial

import torch

from kvferry.engine.models.base import Model
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.ranks.group import Group
from kvferry.engine.ranks.rank_assignment import RankAssignment
from kvferry.engine.ranks.shard import FLAG
from kvferry.engine.ranks.sharded_model import ShardedModel
from kvferry.engine.ranks.shared_group import SharedGroup
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.rank_channel import RankChannels
from kvferry.worker.device_rank_pool import DeviceRankPool
from kvferry.worker.pool_memory import available_bytes, make_pool
from kvferry.worker.rank_memory import RankMemory, make_memory, shared_pool


class Ranks:
    """The other ranks.

    device: this one's; part: what it has of the model; pool: all ranks' pools as one, once they are made, where each
    has its own. Raises OSError."""

    pool: DeviceRankPool | None = None

    def __init__(self, settings: WorkerSettings, device: torch.device) -> None:
        ranks = settings.tensor_parallel_size
        memory_fd, self._pool_fd = make_memory(ranks)
        memory, self._lines = RankMemory(memory_fd, ranks), RankChannels(ranks - 1)
        self.device, self.part = device, RankAssignment(self._group(memory), settings.enable_expert_parallel)
        self._available: list[int] = []
        self._signs = memory.signs
        self._processes = [self._started(rank, memory_fd) for rank in range(1, ranks)]
        os.close(memory_fd)
        self._lines.given()
        self._lines.tell(pickle.dumps(replace(settings, device=str(device))))

    def lead(self, model: Model) -> ShardedModel:
        """Return the model that the engine computes with, once all ranks have loaded their shards.

        Raises ConfigError."""
        assert isinstance(model, Decoder)
        for rank, _ in enumerate(self._processes, 1):
            try:
                wrong, available = pickle.loads(self._lines.hear(rank - 1))
            except (OSError, EOFError):
                wrong, available = f"rank {rank} ended while it loaded its part of the model", 0
            if wrong:
                raise ConfigError(wrong, param=FLAG)
            self._available.append(available)
        return ShardedModel(model, self.part.group, self._lines.tell)

    def available(self, layout: KVLayout, beside: int) -> float:
        """Bytes that blocks of the layout, with so many beside each on this rank's device, could take if all of them
        lay there. Once all ranks have loaded their parts."""
        return available_bytes(self.device)

    def make_pool(self, layout: KVLayout, blocks: int) -> torch.Tensor:
        """Make this rank's pool as `pool_memory.make_pool` does, in memory that all ranks share.

        Raises ConfigError."""
        kv = make_pool(layout, blocks, self.device, partial(shared_pool, self._pool_fd))
        self._told(pickle.dumps((layout, blocks)))
        os.close(self._pool_fd)
        return kv

    def _told(self, message: bytes) -> None:
        try:
            self._lines.tell(message)
        except OSError as error:
            raise ConfigError(f"the other ranks ended: {error}", param=FLAG) from error

    @property
    def signs(self) -> list[int]:
        """Return a heartbeat counter of each other rank, from any thread.

        From any thread."""
        return [int(sign) for sign in self._signs[1:]]

    @property
    def ended(self) -> str | None:
        """Return which rank has ended or failed, in words, from any thread.

        From any thread."""
        for rank, process in enumerate(self._processes, 1):
            if (status := process.poll()) is not None:
                return f"rank {rank} ended ({f'signal {-status}' if status < 0 else f'exit status {status}'})"
        return (self.pool is not None and self.pool.lost) or None

    def close(self) -> None:
        """End them, whatever they do: as when this process ends, however it does."""
        self._lines.close()
        for process in self._processes:
            process.kill()
            process.wait()

    def _group(self, memory: RankMemory) -> Group:
        return SharedGroup(0, memory.places, self._lines.meet)

    def _given(self, rank: int) -> tuple[int, ...]:
        """Descriptors that it inherits: of its line, of the memory of blocks, and what else it needs of that."""
        return self._lines.give(rank - 1), self._pool_fd

    def _started(self, rank: int, memory_fd: int) -> subprocess.Popen[bytes]:
        """In a process group of its own: what a terminal sends to all at once is for this process."""
        line, *others = self._given(rank)
        descriptors = (line, memory_fd, *others)
        command = (sys.executable, "-m", "kvferry.worker.rank", str(rank), *map(str, descriptors))
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors, process_group=0)
