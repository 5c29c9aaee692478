"""Memory of the KV pool: its size, and its blocks as the link addresses them."""

from __future__ import annotations

import contextlib
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
from kvferry.runtime.limits import available_memory
from kvferry.worker.device_copies import DeviceCopies

GIB = 1024**3
GPU_POOL_SHARE = 0.8
"""Share of a GPU's free memory that the pool takes."""
MEMORY_MARGIN = 0.95
"""Share of the available memory that the pool may take."""


class PoolMemory(BlockMemory):
    """The KV pool as the link sees it."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._bytes = kv.view(torch.uint8).flatten(1)
        self._on_cpu = kv.device.type == "cpu"
        self._array: np.ndarray = self._bytes.numpy() if self._on_cpu else np.empty(0)
        self._stream: torch.cuda.Stream | None = None

    def block(self, block_id: int) -> Any:
        """Writable contiguous bytes of the block: numpy on a CPU, the CUDA array interface on a GPU."""
        return self._array[block_id] if self._on_cpu else self._bytes[block_id]

    def copies(self) -> DeviceCopies | None:
        """Return the copies by which tiers reach the blocks; None: they are host bytes."""
        return None if self._on_cpu else DeviceCopies(self._bytes.device, self._bytes.shape[1])

    def checksums(self, submit: Callable[[Callable[[], None]], None], prepare: Callable[[], None]) -> Checksums:
        """Return the checksums of these blocks.

        submit, prepare: as ThreadedChecksums has them. submit, prepare: as ThreadedChecksums has them."""
        return InlineChecksums() if self._on_cpu else ThreadedChecksums(submit, prepare, self._device_digests)

    def _device_digests(self, blocks: Sequence[Any]) -> list[int]:
        """By the GPU's kernels, on a stream beside that of the engine. On one thread."""
        from kvferry.kernels.triton.checksum import digests

        self._stream = self._stream or torch.cuda.Stream(self._bytes.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            return digests(blocks)


def available_bytes(device: torch.device) -> int:
    """Memory that the pool could take on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def pool_blocks(
    settings: WorkerSettings, block_bytes: int, device: torch.device, available: float | None = None
) -> int:
    """Blocks of the pool, of which one takes so much, with what the draft model has of the same tokens.

    available: bytes; None: those of the device. Raises ConfigError when they do not fit into memory."""
    available = available_bytes(device) if available is None else available
    if settings.kv_blocks:
        blocks, flag = settings.kv_blocks, "kv_blocks"
    else:
        default = GPU_POOL_SHARE * available if device.type == "cuda" else CPU_POOL_GIB * GIB
        wanted = settings.kv_cache_gib * GIB if settings.kv_cache_gib else default
        blocks, flag = int(wanted // block_bytes), "kv_cache_gib"
    name = flag.replace("_", "-")
    if blocks * block_bytes > MEMORY_MARGIN * available:
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
    layout: KVLayout, num_blocks: int, device: torch.device, mapped: Callable[[int], torch.Tensor] | None = None
) -> torch.Tensor:
    """Zeros [block, layer, plane, kv_head, slot, dim].

    On a CPU a page takes memory once its block is first written. mapped: gives that memory in place of `_mapped`."""
    shape, dtype = (num_blocks, *layout.block_shape), getattr(torch, layout.dtype)
    try:
        if device.type == "cpu":
            return (mapped or _mapped)(num_blocks * layout.block_bytes).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)
    except (OSError, OverflowError, RuntimeError, torch.OutOfMemoryError) as error:
        raise ConfigError("out of memory for the KV pool; lower --kv-cache-gib", param="kv_cache_gib") from error


def _mapped(num_bytes: int) -> torch.Tensor:
    """Zeros uint8 [num_bytes], aligned to a page, on huge pages where the system has some: a first write then faults
    once in 2 MiB, and zeroing what it gets costs far less than computing or receiving it."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
