"""Shared memory of a node's ranks on one host: heartbeats, buffers of collective operations and the KV pool."""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch

from kvferry.engine.ranks.shared_group import NUM_BUFFERS, ROOM

_HEARTBEAT_BYTES = 4096


def make_memory(ranks: int) -> tuple[int, int]:
    """Return file descriptors of the ranks' memory and of the pool's memory, which has no size yet.

    Both are anonymous and freed with the last process that has them open. Raises OSError."""
    memory, pool = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("ranks", "kv"))
    os.ftruncate(memory, _HEARTBEAT_BYTES + 4 * NUM_BUFFERS * ranks * ROOM)
    return memory, pool


class RankMemory:
    """View of the ranks' shared memory in one process.

    heartbeats: int64 [ranks], heartbeat counters of the other ranks. places: see
    `engine.ranks.shared_group.SharedGroup`."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        pages = mmap.mmap(descriptor, 0)
        self.heartbeats: np.ndarray = np.frombuffer(pages, np.int64, ranks)
        numbers = torch.frombuffer(pages, dtype=torch.float32, offset=_HEARTBEAT_BYTES)
        self.places = numbers.view(NUM_BUFFERS, ranks, ROOM)


def shared_pool(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map zeros, shared by all ranks; a page takes memory once written. Raises OSError."""
    os.ftruncate(descriptor, num_bytes)
    return mmap.mmap(descriptor, num_bytes)
