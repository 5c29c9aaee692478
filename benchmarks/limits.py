"""Measures the machine's memory bandwidth and bfloat16 arithmetic, as limits for other benchmarks.

With a model's memory needs (`model_files.memory_needs`) they give ceilings in tokens/s."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.kernels.cpu import CpuOps

READ_BYTES = 256 << 20
ROUNDS = 400_000
READ, PRODUCTS = "memory read, GB/s", "bf16 products, GFLOP/s"


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured forms of the machine's limits: they run beside each subject, so that both see the same machine."""

    read: Callable[[], object]
    multiply: Callable[[], object]
    work: int

    def shares(self, read: float, multiply: float) -> tuple[float, float]:
        """Convert measured seconds to (GB/s, GFLOP/s)."""
        return READ_BYTES / read / 1e9, self.work / multiply / 1e9


def machine_limits(ops: CpuOps) -> Limits:
    """Return the limits of the threads that run the kernels: reading memory once, multiplying bfloat16 in registers."""
    import torch

    kernels, data = ops.kernels, torch.ones(READ_BYTES, dtype=torch.uint8)
    work = kernels.multiply(1) * ROUNDS
    return Limits(lambda: kernels.read(data), lambda: kernels.multiply(ROUNDS), work)


def interleaved(forms: Sequence[Callable[[], object]], runs: int) -> list[float]:
    """Return median seconds of each form; they run in turn, after one unmeasured turn."""
    times: list[list[float]] = [[] for _ in forms]
    for form in forms:
        form()
    for _ in range(runs):
        for form, taken in zip(forms, times, strict=True):
            begun = time.perf_counter()
            form()
            taken.append(time.perf_counter() - begun)
    return [statistics.median(taken) for taken in times]


class Meter:
    """Samples the limits between rounds of the measurements that they bound."""

    def __init__(self, threads: int) -> None:
        """Raises RuntimeError without the extension."""
        import torch

        from kvferry.kernels.cpu import CpuOps

        torch.set_num_threads(threads)
        self._limits = machine_limits(CpuOps(threads))

    def sample(self) -> dict[str, float]:
        """Return values by READ and PRODUCTS, each the median of three."""
        read, multiply = interleaved([self._limits.read, self._limits.multiply], 3)
        return dict(zip((READ, PRODUCTS), self._limits.shares(read, multiply), strict=True))
