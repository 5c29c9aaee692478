"""Prefault: a thread that makes pages of the KV pool and of recurrent states resident before requests write to them.

The first write to 2 MiB that a process never used costs 0.1 ms, and several milliseconds in a virtual machine whose
host has to find the memory. A checkpoint of a recurrent state takes tens of MiB at once."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.runtime.huge_pages import HUGE_PAGE, populate

AHEAD_BYTES = 128 << 20
"""Memory that is resident beyond the part in use, in bytes: the rows and checkpoints of a few large states."""
PAUSE_S = 0.1
"""Pause between two checks of how much is in use, in seconds."""


@dataclass(slots=True)
class Region:
    """Memory of a tensor that is used from its beginning on.

    used: returns the share in use now; it may be called from any thread. resident: leading bytes made resident."""

    tensor: torch.Tensor
    used: Callable[[], float]
    resident: int = 0

    def target_bytes(self) -> int:
        """Return how many leading bytes are to be resident."""
        return min(self.tensor.nbytes, int(self.used() * self.tensor.nbytes) + AHEAD_BYTES)

    def advance(self) -> bool:
        """Make the next piece resident; False if the system cannot."""
        address = self.tensor.data_ptr() + self.resident
        end = min(-(-(address + 1) // HUGE_PAGE) * HUGE_PAGE, self.tensor.data_ptr() + self.tensor.nbytes)
        begin = address // mmap.PAGESIZE * mmap.PAGESIZE
        self.resident += end - address
        return populate(begin, end - begin)


class Prefault:
    """Makes regions resident ahead of their use, on a thread of its own that takes at most half of a core."""

    def __init__(self, *regions: Region) -> None:
        self._regions = list(regions)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)

    def start(self) -> None:
        """Start the thread. It ends by itself when all memory is resident."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the regions are not used after."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._regions and not self._stop.wait(PAUSE_S):
            for region in list(self._regions):
                if not self._follow(region) or region.resident >= region.tensor.nbytes:
                    self._regions.remove(region)

    def _follow(self, region: Region) -> bool:
        """Make a region resident up to its target, with a pause after each piece; False if the system cannot."""
        while region.resident < region.target_bytes():
            began = time.perf_counter()
            if not region.advance():
                return False
            if self._stop.wait(time.perf_counter() - began):
                break
        return True
