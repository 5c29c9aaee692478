"""Memory of a node's KV pool: its size in blocks, its allocation, and access to its blocks for the link and tiers."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvferry.kv_transfer.checksum import Checksums, InlineChecksums, ThreadedChecksums
from kvferry.kv_transfer.ports import BlockMemory
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.settings import CPU_POOL_GIB, WorkerSettings
from kvferry.runtime.huge_pages import map_zeros
from kvferry.runtime.limits import available_memory
from kvferry.worker.device_copies import DeviceCopies

GIB = 1024**3
GPU_POOL_SHARE = 0.8
"""Share of a GPU's free memory that the pool takes where no profile measured what the largest step needs."""
MEMORY_MARGIN = 0.95
"""Share of the available memory that the pool may take."""


class PoolMemory(BlockMemory):
    """Bytes of the KV pool's blocks, as the link sends and receives them."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._bytes = kv.view(torch.uint8).flatten(1)
        self._on_cpu = kv.device.type == "cpu"
        self._array: np.ndarray = self._bytes.numpy() if self._on_cpu else np.empty(0)
        self._stream: torch.cuda.Stream | None = None

    def block(self, block_id: int) -> Any:
        """Return the block's bytes, writable and contiguous: a numpy array on a CPU, a CUDA tensor on a GPU."""
        return self._array[block_id] if self._on_cpu else self._bytes[block_id]

    def copies(self) -> DeviceCopies | None:
        """Return the copies through which tiers reach blocks on a GPU; None on a CPU, whose blocks are host bytes."""
        return None if self._on_cpu else DeviceCopies(self._bytes.device, self._bytes.shape[1])

    def checksums(self, submit: Callable[[Callable[[], None]], None], prepare: Callable[[], None]) -> Checksums:
        """Return checksums of these blocks: inline on a CPU, on a thread of their own for a GPU.

        submit, prepare: see ThreadedChecksums."""
        return InlineChecksums() if self._on_cpu else ThreadedChecksums(submit, prepare, self._device_digests)

    def _device_digests(self, blocks: Sequence[Any]) -> list[int]:
        """Compute digests with GPU kernels, on a CUDA stream beside the engine's. One thread only."""
        from kvferry.kernels.triton.checksum import digests

        self._stream = self._stream or torch.cuda.Stream(self._bytes.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            return digests(blocks)


def available_bytes(device: torch.device) -> int:
    """Return the bytes of memory that are free on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def pool_blocks(
    settings: WorkerSettings,
    block_bytes: int,
    device: torch.device,
    available: float | None = None,
    *,
    measured: bool = False,
) -> int:
    """Return the number of blocks of the pool.

    block_bytes: size of one block, including the draft model's part of the same tokens. available: free bytes; None:
    ask the device. measured: a memory profile left `available` to the pool, which takes all of it. Raises ConfigError
    when the blocks do not fit in memory."""
    available = available_bytes(device) if available is None else available
    if settings.kv_blocks:
        blocks, flag = settings.kv_blocks, "kv_blocks"
    else:
        share = 1.0 if measured else GPU_POOL_SHARE
        default = share * available if measured or device.type == "cuda" else CPU_POOL_GIB * GIB
        wanted = settings.kv_cache_gib * GIB if settings.kv_cache_gib else default
        blocks, flag = int(wanted // block_bytes), "kv_cache_gib"
    name = flag.replace("_", "-")
    if not measured and blocks * block_bytes > MEMORY_MARGIN * available:
        needed = blocks * block_bytes / GIB
        raise ConfigError(
            f"the KV pool would take {needed:.2f} GiB but {available / GIB:.2f} GiB are available; lower --{name}",
            param=flag,
        )
    if blocks < 2:
        raise ConfigError(
            f"the KV pool has room for {blocks} blocks of {block_bytes} bytes; raise --{name}", param=flag
        )
    return blocks


def make_pool(
    layout: KVLayout, num_blocks: int, device: torch.device, mapped: Callable[[int], mmap.mmap] | None = None
) -> torch.Tensor:
    """Allocate the pool as zeros [block, layer, plane, kv_head, slot, dim]. Raises ConfigError.

    On a CPU a page takes memory only once its block is first written. mapped: allocates that memory instead of
    `map_zeros`."""
    shape, dtype = (num_blocks, *layout.block_shape), getattr(torch, layout.dtype)
    try:
        if device.type == "cpu":
            pages = (mapped or map_zeros)(num_blocks * layout.block_bytes)
            return torch.frombuffer(pages, dtype=dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)
    except (OSError, OverflowError, RuntimeError, torch.OutOfMemoryError) as error:
        raise ConfigError("out of memory for the KV pool; lower --kv-cache-gib", param="kv_cache_gib") from error
