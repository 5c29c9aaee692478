"""Memory figures of a GPU, from the driver and from torch's allocator, for the profile that sizes the KV pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """Memory of one device; sizes in bytes.

    total: all of it, used or free."""

    @property
    def total(self) -> int:
        """Return the size of the device's memory."""

    def free(self) -> int:
        """Return what no process uses; memory that torch has cached and not in use counts as free."""

    def peak_of(self, run: Callable[[], object]) -> int:
        """Run `run`; return by how much its largest use of memory exceeds the use before it."""


class CudaMemory:
    """Implements `DeviceMemory` for GPUs of NVIDIA and AMD."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        self._settle()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak_of(self, run: Callable[[], object]) -> int:
        """Measure memory in use and memory reserved, and return the larger: fragments take memory, too."""
        self._settle()
        used, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            run()
            torch.cuda.synchronize(self._device)
            return max(
                torch.cuda.max_memory_allocated(self._device) - used,
                torch.cuda.max_memory_reserved(self._device) - reserved,
            )
        finally:
            torch.cuda.empty_cache()

    def _settle(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a GPU; None for a CPU, whose pool takes memory only as blocks are written."""
    return CudaMemory(device) if device.type == "cuda" else None
