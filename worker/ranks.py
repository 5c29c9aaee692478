"""Ranks of a node, seen from rank 0: starts and supervises the other rank processes, which share its KV pool on a CPU.

On a CPU all ranks share the pool of KV blocks. Each rank writes the bytes of its heads, so rank 0, which owns the link,
finds whole blocks in the same layout as on any other node. On GPUs each rank has its own pool: see `device_ranks`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
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
from kvferry.runtime.rank_channel import RankZeroChannels
from kvferry.worker.device_rank_pool import DeviceRankPool
from kvferry.worker.pool_memory import available_bytes, make_pool
from kvferry.worker.rank_memory import RankMemory, make_memory, shared_pool

CALLS, MOVES = "calls", "moves"
"""Purposes of a channel to another rank: calls of the model, and moves of parts of blocks."""
PROFILED = b"profiled"
"""Message that ends the calls of the memory profile."""
MeasureRoom = Callable[[Callable[[], None]], int]
"""Function that runs the largest step and returns the bytes that remain for the KV pool: `MemoryProfiler.room`."""


class Ranks:
    """Other ranks of a node: their processes, channels and heartbeats.

    device: device of rank 0. part: rank 0's shard of the model. pool: the joined pools of all ranks, once they are
    made, if each rank has its own. Raises OSError."""

    pool: DeviceRankPool | None = None

    def __init__(self, settings: WorkerSettings, device: torch.device) -> None:
        ranks = settings.tensor_parallel_size
        memory_fd, self._pool_fd = make_memory(ranks)
        memory = RankMemory(memory_fd, ranks)
        self.device, self._settings, self._heartbeats = device, settings, memory.heartbeats
        self._lines = self._channels(CALLS)
        self.part = RankAssignment(self._group(memory), settings.enable_expert_parallel)
        self._available: list[int] = []
        self._processes = [self._started(rank, memory_fd) for rank in range(1, settings.ranks_per_host)]
        os.close(memory_fd)
        self._lines.close_inherited()
        for rank in range(1, ranks):
            self._lines.send(rank - 1, pickle.dumps(self._settings_of(rank)))

    def wait_loaded(self, model: Model) -> ShardedModel:
        """Return the model that the engine computes with, once all ranks have loaded their shards.

        Raises ConfigError."""
        assert isinstance(model, Decoder)
        for rank in range(1, self._settings.tensor_parallel_size):
            try:
                wrong, available = pickle.loads(self._lines.receive(rank - 1))  # noqa: S301
            except (OSError, EOFError):
                wrong, available = f"rank {rank} exited while it loaded its part of the model", 0
            if wrong:
                raise ConfigError(wrong, param=FLAG)
            self._available.append(available)
        return ShardedModel(model, self.part.group, self._lines.broadcast)

    def available(self, layout: KVLayout, beside: int) -> float:
        """Return the bytes available to whole blocks on this device, after all ranks have loaded.

        beside: additional bytes that each block needs on this rank's device."""
        return available_bytes(self.device)

    def profiled(self, room: MeasureRoom, run: Callable[[], None], layout: KVLayout, beside: int) -> float:
        """Return `available` as measured while all ranks run the largest step; only for ranks on GPUs.

        Raises ConfigError."""
        raise NotImplementedError("ranks that share a pool on a CPU are not profiled")

    def make_pool(self, layout: KVLayout, blocks: int) -> torch.Tensor:
        """Make the pool as `pool_memory.make_pool` does, in memory that all ranks share.

        Raises ConfigError."""
        kv = make_pool(layout, blocks, self.device, partial(shared_pool, self._pool_fd))
        self._broadcast(pickle.dumps((layout, blocks)))
        os.close(self._pool_fd)
        return kv

    def _broadcast(self, message: bytes) -> None:
        try:
            self._lines.broadcast(message)
        except OSError as error:
            raise ConfigError(f"the other ranks ended: {error}", param=FLAG) from error

    @property
    def heartbeats(self) -> list[int]:
        """Return a heartbeat counter of each other rank, from any thread."""
        return [int(count) for count in self._heartbeats[1:]]

    @property
    def ended(self) -> str | None:
        """Describe which rank has ended or failed, from any thread; None if none."""
        for rank, process in enumerate(self._processes, 1):
            if (status := process.poll()) is not None:
                return f"rank {rank} ended ({f'signal {-status}' if status < 0 else f'exit status {status}'})"
        return (self.pool is not None and self.pool.lost) or None

    @property
    def leaving(self) -> bool:
        """Return whether another host was asked to stop, so that the node should drain."""
        return False

    def close(self) -> None:
        """Kill the other ranks' processes."""
        self._lines.close()
        for process in self._processes:
            process.kill()
            process.wait()

    def _channels(self, purpose: str) -> RankZeroChannels:
        """Return channels to all other ranks."""
        return RankZeroChannels(self._settings.tensor_parallel_size - 1)

    def _settings_of(self, rank: int) -> WorkerSettings:
        """Return the settings of another rank."""
        return replace(self._settings, device=str(self.device))

    def _group(self, memory: RankMemory) -> Group:
        return SharedGroup(0, memory.places, self._lines.barrier)

    def _inherited_fds(self, rank: int) -> tuple[int, ...]:
        """Return the descriptors that a rank inherits: its channel, the blocks' memory and related ones."""
        return self._lines.descriptor(rank - 1), self._pool_fd

    def _started(self, rank: int, memory_fd: int) -> subprocess.Popen[bytes]:
        """Start a rank's process, in a process group of its own.

        A terminal's signals to the foreground group thus reach only this process."""
        line, *others = self._inherited_fds(rank)
        descriptors = (line, memory_fd, *others)
        command = (sys.executable, "-m", "kvferry.worker.rank", str(rank), *map(str, descriptors))
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors, process_group=0)
