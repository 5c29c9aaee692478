"""Asynchronous copies between a GPU's KV pool and host memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch


class Beside:
    """A thread that copies has a stream of its own, where the device is a GPU. It waits for no other one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """All that was begun within has ended at its end."""
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
    """Implements kv_transfer.tiers.staging.Copies; blocks are uint8 tensors [bytes of a block] of the device.

    Those that a tier is told of were computed by steps that have ended, and those that it fills no step has yet."""

    def __init__(self, device: torch.device, block_bytes: int) -> None:
        self._device, self._block_bytes = device, block_bytes
        self._beside = Beside(device)

    def room(self, blocks: int) -> Sequence[np.ndarray]:
        """Allocate host memory, page-locked where the device is a GPU, which copies by itself."""
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
        with self._beside():
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
