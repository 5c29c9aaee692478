"""Staging: copies a step's small input arrays to the device in one transfer, from reused pinned buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNED = 16
_MIN_BYTES = 1 << 16
_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class _Host:
    """Buffer on the host, and the event of its last copy."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.copied: torch.cuda.Event | None = None


class Staging:
    """Two buffers on the host (pinned if the device is a GPU) and one on the device, reused and grown as needed.

    Serves one stream. direct: hand out the arrays themselves, for a CPU only."""

    def __init__(self, device: torch.device, *, direct: bool | None = None) -> None:
        self._device = device
        self.direct = device.type == "cpu" if direct is None else direct
        self._hosts = [_Host(), _Host()]
        self._there = torch.empty(0, dtype=torch.uint8)

    def put(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Return the arrays (int32, int64, float32) on the device, valid until the next call.

        Work queued before that call still reads the old arrays. The host waits only for the copy before the
        last one: the last one may be queued behind a running step."""
        if self.direct:
            return [torch.from_numpy(array) for array in arrays]
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // _ALIGNED) * _ALIGNED
        host = self._hosts[0]
        self._hosts.reverse()
        if host.copied is not None:
            host.copied.synchronize()
        self._grow(host, end)
        buffer = host.bytes.numpy()
        for start, array in zip(starts, arrays, strict=True):
            buffer[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._there[:end].copy_(host.bytes[:end], non_blocking=True)
        if self._device.type == "cuda":
            host.copied = host.copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            host.copied.record()
        return [self._view(start, array) for start, array in zip(starts, arrays, strict=True)]

    def _grow(self, host: _Host, size: int) -> None:
        room = max(_MIN_BYTES, 1 << (size - 1).bit_length())
        if size > len(host.bytes):
            host.bytes = torch.empty(room, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        if size > len(self._there):
            self._there = torch.empty(room, dtype=torch.uint8, device=self._device)

    def _view(self, start: int, array: np.ndarray) -> torch.Tensor:
        flat = self._there[start : start + array.nbytes].view(_DTYPES[array.dtype.name])
        return flat.view(array.shape)
