"""The ranks of a node on a CPU: this process is the first one, and starts the others.

They share the pool of KV blocks. Each writes its heads' bytes of a block, so this process, which has the link, finds
blocks that are whole and lie as those of any other node do.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from functools import partial

import torch

from engine.models.base import Model
from engine.models.decoder import Decoder
from engine.ranks.led import Led
from engine.ranks.part import Part
from engine.ranks.shard import BY_EXPERT, FLAG
from engine.ranks.shared_group import SharedGroup
from node.pool_memory import make_pool
from node.rank_memory import RankMemory, make_memory, shared_pool
from process.lines import Lines
from protocol.errors import ConfigError
from protocol.layout import KVLayout
from protocol.settings import WorkerSettings


def start_ranks(settings: WorkerSettings, device: torch.device) -> Ranks | None:
    """The others begin to load their parts; None: there are no others. Raises ConfigError: they cannot be had."""
    if settings.tensor_parallel_size == 1:
        if settings.enable_expert_parallel:
            raise ConfigError("--enable-expert-parallel needs --tensor-parallel-size 2 or more", param=BY_EXPERT)
        return None
    asked = f"--tensor-parallel-size {settings.tensor_parallel_size}"
    if device.type != "cpu":
        raise ConfigError(f"{asked} is for CPUs; on {device} use 1", param=FLAG)
    for flag, refused in (
        ("batch-invariant", settings.batch_invariant),
        ("lora", bool(settings.lora)),
        ("quantization int8", settings.quantization == "int8"),
    ):
        if refused:
            raise ConfigError(f"{asked} does not go with --{flag}", param=FLAG)
    try:
        return Ranks(settings)
    except (OSError, AttributeError) as error:
        raise ConfigError(f"{asked}: the other ranks cannot be started: {error}", param=FLAG) from error


class Ranks:
    """The other ranks. part: what this one has of the model. Raises OSError."""

    def __init__(self, settings: WorkerSettings) -> None:
        ranks = settings.tensor_parallel_size
        memory_fd, self._pool_fd = make_memory(ranks)
        memory, self._lines = RankMemory(memory_fd, ranks), Lines(ranks - 1)
        self.part = Part(SharedGroup(0, memory.places, self._lines.meet), settings.enable_expert_parallel)
        self._signs = memory.signs
        self._processes = [self._started(rank, memory_fd) for rank in range(1, ranks)]
        os.close(memory_fd)
        self._lines.given()
        self._lines.tell(pickle.dumps(settings))

    def lead(self, model: Model) -> Led:
        """What the engine computes with, once all have loaded their parts; model: this rank's. Raises ConfigError."""
        assert isinstance(model, Decoder)
        for rank, _ in enumerate(self._processes, 1):
            try:
                wrong = self._lines.hear(rank - 1).decode()
            except (OSError, EOFError):
                wrong = f"rank {rank} ended while it loaded its part of the model"
            if wrong:
                raise ConfigError(wrong, param=FLAG)
        return Led(model, self.part.group, self._lines.tell)

    def make_pool(self, layout: KVLayout, blocks: int) -> torch.Tensor:
        """As `pool_memory.make_pool`, of memory that all ranks have; once. Raises ConfigError."""
        kv = make_pool(layout, blocks, torch.device("cpu"), partial(shared_pool, self._pool_fd))
        try:
            self._lines.tell(pickle.dumps((layout, blocks)))
        except OSError as error:
            raise ConfigError(f"the other ranks ended: {error}", param=FLAG) from error
        os.close(self._pool_fd)
        return kv

    @property
    def signs(self) -> list[int]:
        """Of each other rank a number that grows while it lives. From any thread."""
        return [int(sign) for sign in self._signs[1:]]

    @property
    def ended(self) -> str | None:
        """Which has ended, in words. From any thread."""
        for rank, process in enumerate(self._processes, 1):
            if (status := process.poll()) is not None:
                return f"rank {rank} ended ({f'signal {-status}' if status < 0 else f'exit status {status}'})"
        return None

    def close(self) -> None:
        """End them, whatever they do: as when this process ends, however it does."""
        self._lines.close()
        for process in self._processes:
            process.kill()
            process.wait()

    def _started(self, rank: int, memory_fd: int) -> subprocess.Popen[bytes]:
        """In a process group of its own: what a terminal sends to all at once is for this process."""
        descriptors = (self._lines.give(rank - 1), memory_fd, self._pool_fd)
        command = (sys.executable, "-m", "node.rank", str(rank), *map(str, descriptors))
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors, process_group=0)
