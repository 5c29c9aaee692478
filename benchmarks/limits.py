"""What this machine can do at most and what a model needs at least: together, a ceiling in tokens per second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from model_files.gguf import read_gguf

if TYPE_CHECKING:
    from kernels.cpu import CpuOps

READ_BYTES = 256 << 20
ROUNDS = 400_000
READ, PRODUCTS = "memory read, GB/s", "bf16 products, GFLOP/s"


@dataclass(frozen=True, slots=True)
class Limits:
    """Forms that show the machine's limits: run beside each subject, so that both see the same machine."""

    read: Callable[[], object]
    multiply: Callable[[], object]
    work: int

    def shares(self, read: float, multiply: float) -> tuple[float, float]:
        """(GB/s, GFLOP/s) of measured seconds."""
        return READ_BYTES / read / 1e9, self.work / multiply / 1e9


def machine_limits(ops: CpuOps) -> Limits:
    """Measured by the threads that run the kernels: reading memory once, multiplying bfloat16 in registers."""
    import torch

    kernels, data = ops._kernels, torch.ones(READ_BYTES, dtype=torch.uint8)
    work = kernels.multiply(1) * ROUNDS
    return Limits(lambda: kernels.read(data), lambda: kernels.multiply(ROUNDS), work)


def interleaved(forms: Sequence[Callable[[], object]], runs: int) -> list[float]:
    """Median seconds of each form; they run in turn, once unmeasured."""
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
    """Takes samples of the limits, between the rounds of what is held against them."""

    def __init__(self, threads: int) -> None:
        """Raises RuntimeError without the extension."""
        import torch

        from kernels.cpu import CpuOps

        torch.set_num_threads(threads)
        self._limits = machine_limits(CpuOps(threads))

    def sample(self) -> dict[str, float]:
        """Values by READ and PRODUCTS, each the median of three."""
        read, multiply = interleaved([self._limits.read, self._limits.multiply], 3)
        return dict(zip((READ, PRODUCTS), self._limits.shares(read, multiply), strict=True))


@dataclass(frozen=True, slots=True)
class Cost:
    """What a Llama-like model needs. The embedding is read as the vocabulary projection where the two are tied, and
    not at all where they are not.

    dense, head    weights of all layers, of the vocabulary projection
    bytes          of the file's tensors that one token reads
    attention      multiplications for each pair of a query and a key, all layers
    """

    dense: int
    head: int
    bytes: int
    attention: int

    def decode_ceiling(self, read: float, bytes_per_weight: float | None = None) -> float:
        """Tokens per second of one stream that reads GB/s `read`; weights as in the file, or of another size."""
        size = self.bytes if bytes_per_weight is None else (self.dense + self.head) * bytes_per_weight
        return read * 1e9 / size

    def prefill_ceiling(self, gflops: float, length: int) -> float:
        """Prompt tokens per second: dense layers, causal attention, and one row of the vocabulary projection."""
        pairs = length * (length + 1) / 2
        work = 2 * self.dense * length + 4 * self.attention * pairs + 2 * self.head
        return gflops * 1e9 / (work / length)


def model_cost(path: Path) -> Cost:
    """Of a GGUF file. Raises ConfigError."""
    import gguf

    file, dense, head, size = read_gguf(path), 0, 0, 0
    projection = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    for tensor in file.tensors.values():
        if tensor.name in ("output.weight", "token_embd.weight") and tensor.name != projection:
            continue
        count = 1
        for extent in tensor.shape:
            count *= extent
        per, stored = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type)]
        size += count // per * stored
        if tensor.name == projection:
            head = count
        elif len(tensor.shape) == 2:
            dense += count
    heads = int(file.get("attention.head_count", 1))
    dim = int(file.get("attention.key_length", 0)) or int(file.get("embedding_length", 0)) // heads
    return Cost(dense, head, size, int(file.get("block_count", 0)) * heads * dim)
