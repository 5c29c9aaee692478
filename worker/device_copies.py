"""Copies between a GPU's KV pool and host memory, on CUDA streams beside the engine's; used by tiers and ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch


class CopyStream:
    """Context manager that runs copies on a CUDA stream of the calling thread, beside the engine's stream.

    It does not wait for other streams. On a CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter the thread's copy stream; on exit, wait until its copies are done."""
        if self._device.type != "cuda":
            yield
            return
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(self._own.stream):
                yield
        finally:
            self._own.stream.synchronize()


class DeviceCopies:
    """Copies between blocks of a pool on a device and rows of host memory.

    Implements `kv_transfer.tiers.staging.Copies`. A block is a uint8 tensor [bytes of a block] on the device.

    Copies need not wait for engine steps: the steps that computed a source block have ended, and no step uses a target
    block yet."""

    def __init__(self, device: torch.device, block_bytes: int) -> None:
        self._device, self._block_bytes = device, block_bytes
        self._copy_stream = CopyStream(device)

    def room(self, blocks: int) -> Sequence[np.ndarray]:
        """Allocate host memory for `blocks` blocks. Raises MemoryError.

        It is page-locked for a GPU, so that the GPU copies by DMA."""
        pinned = self._device.type == "cuda"
        try:
            rows = torch.empty((blocks, self._block_bytes), dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        return list(rows.numpy())

    def to_host(self, blocks: Sequence[Any], rows: Sequence[np.ndarray]) -> None:
        self._copy(blocks, [torch.from_numpy(row) for row in rows])

    def to_device(self, rows: Sequence[np.ndarray], blocks: Sequence[Any]) -> None:
        self._copy([torch.from_numpy(row) for row in rows], blocks)

    def _copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        with self._copy_stream():
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
