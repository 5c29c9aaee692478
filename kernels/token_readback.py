"""Readback: asynchronous copy of sampled token ids from the device to the host."""

from __future__ import annotations

import torch


class Readback:
    """Copy of an int64 array [n] from the device to the host, queued on the stream at once.

    Work queued later does not delay it. `values`: the array, usable on the device immediately."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self._host = values
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(values.device))

    def wait(self) -> list[int]:
        """Wait for the copy and return the values; work queued on the stream before them is then done."""
        if self._copied is not None:
            self._copied.synchronize()
        found: list[int] = self._host.tolist()
        return found
