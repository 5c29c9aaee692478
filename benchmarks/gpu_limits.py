"""Limits of a device, measured for `gpu_steps`: a copy's bytes and a matrix product's operations per second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a device.

    bandwidth: bytes per second that a device copy reads and writes together; peak: operations per second of a product
    of large matrices."""

    bandwidth: float
    peak: float


def median_seconds(form: Callable[[], object], device: torch.device, runs: int) -> float:
    """Return the median seconds of a call and its device work, by the host's clock, after two warm-up calls."""
    taken = []
    for _ in range(runs + 2):
        synchronize(device)
        began = time.perf_counter()
        form()
        synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def limits(device: torch.device, dtype: torch.dtype, size: int, side: int, runs: int = 7) -> Limits:
    """Measure a copy of `size` bytes, and a product of square matrices of `side` rows."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_seconds(lambda: target.copy_(source), device, runs)
    left, right = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    product_s = median_seconds(lambda: torch.mm(left, right, out=out), device, runs)
    return Limits(2 * size / copy_s, 2 * side**3 / product_s)
