"""The small arrays of a step, brought to the device by one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNED = 16
_LEAST = 1 << 16
_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class Staging:
    """One buffer on the host, pinned where the device is a GPU, and one on the device, both kept and grown as needed.
    Of one stream. direct: arrays are handed out as they are, as suits a CPU and only a CPU."""

    def __init__(self, device: torch.device, *, direct: bool | None = None) -> None:
        self._device = device
        self.direct = device.type == "cpu" if direct is None else direct
        self._host = self._there = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def put(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """The arrays (int32, int64, float32) on the device, good until the next call: what was given to the stream
        before that still finds the old ones. The host does not wait, but for the copy before."""
        if self.direct:
            return [torch.from_numpy(array) for array in arrays]
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // _ALIGNED) * _ALIGNED
        if self._copied is not None:
            self._copied.synchronize()
        self._grow(end)
        host = self._host.numpy()
        for start, array in zip(starts, arrays, strict=True):
            host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._there[:end].copy_(self._host[:end], non_blocking=True)
        if self._device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return [self._view(start, array) for start, array in zip(starts, arrays, strict=True)]

    def _grow(self, size: int) -> None:
        if size <= len(self._host):
            return
        room = max(_LEAST, 1 << (size - 1).bit_length())
        self._host = torch.empty(room, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._there = torch.empty(room, dtype=torch.uint8, device=self._device)

    def _view(self, start: int, array: np.ndarray) -> torch.Tensor:
        flat = self._there[start : start + array.nbytes].view(_DTYPES[array.dtype.name])
        return flat.view(array.shape)
