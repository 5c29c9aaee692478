"""Measures checksums of KV blocks in the memory of this machine's CUDA device, against a device copy and the CPU.

    python -m benchmarks.gpu_checksums [--runs 15 --rows FILE]

Each line is one call of `digests`, as the link makes it: from a list of blocks to their numbers on the host, including
the wait for the device and the last mixing in Python. `device us` is the device's part. The CPU's row is XXH3 of the
xxhash library on the same bytes in host memory, on one thread. All forms run in turn, `--runs` times, and the median is
printed; a line's blocks exceed any cache. GB/s counts each byte once, and the share is of a device copy, which reads
and writes. Every number is compared before anything is timed. --tiny: does nothing, as these kernels need a GPU."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from benchmarks.gpu_rows import Rows
from kvferry.kernels.triton.checksum import accumulated, digests

KIB, MIB = 1 << 10, 1 << 20
COLD_BYTES = 512 * MIB
BATCHES = [(1, 2 * MIB), (8, 2 * MIB), (64, 2 * MIB), (64, 5 * MIB), (512, 48 * KIB)]
"""(blocks, bytes of each): 16 tokens of models of 8, 70 and 0.1 billion parameters."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks of one size on the device, uint8.

    blocks: all of them, of which `count` are summed at once; host: the same bytes in host memory."""

    blocks: Sequence[torch.Tensor]
    host: Sequence[Any]
    count: int

    @property
    def title(self) -> str:
        return f"checksums of {self.count} x {self.size / KIB:g} KiB"

    @property
    def size(self) -> int:
        return self.blocks[0].numel()

    def parts(self) -> Iterator[int]:
        """Yield the index at which each call's blocks begin."""
        return iter(range(0, len(self.blocks), self.count))


def batch(count: int, size: int, device: torch.device, cold: int = COLD_BYTES) -> Batch:
    """Return random bytes; `cold` bytes are read before any is read again."""
    calls = max(1, -(-cold // (count * size)))
    pool = torch.randint(0, 256, (calls * count, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Batch(list(pool.to(device)), list(pool.numpy()), count)


def check(given: Batch) -> None:
    """Warm up; raise AssertionError when a number is not the library's."""
    own = digests(given.blocks[: given.count])
    assert own == [xxh3_64_intdigest(block.data) for block in given.host[: given.count]], given.title


def on_device(given: Batch) -> float:
    """Return the device's seconds of a call, by its own clock, from the list of blocks to their accumulators."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    spent = 0.0
    for start in given.parts():
        begin.record()
        accumulated(given.blocks[start : start + given.count])
        end.record()
        end.synchronize()
        spent += begin.elapsed_time(end) / 1e3
    return spent / (len(given.blocks) // given.count)


def whole(given: Batch) -> float:
    """Return the seconds of a call by the host's clock."""
    began = time.perf_counter()
    for start in given.parts():
        digests(given.blocks[start : start + given.count])
    return (time.perf_counter() - began) / (len(given.blocks) // given.count)


def on_host(given: Batch) -> float:
    """Return the seconds in which one CPU thread computes one call's blocks."""
    began = time.perf_counter()
    for block in given.host:
        xxh3_64_intdigest(block.data)
    return (time.perf_counter() - began) / (len(given.blocks) // given.count)


def copied(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the bytes per second of a device copy."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    target.copy_(source)
    torch.cuda.synchronize()
    return 2 * source.nbytes / (time.perf_counter() - began)


def line(
    given: Batch,
    forms: Sequence[Callable[[Batch], float]],
    copy: Callable[[], float],
    runs: int,
    rows: Rows | None = None,
) -> str:
    """Return a line of the table. forms: whole, on_device, on_host."""
    check(given)
    rounds = [[*(form(given) for form in forms), copy()] for _ in range(runs + 2)][2:]
    call, device, host, moved = (statistics.median(column) for column in zip(*rounds, strict=True))
    size = given.count * given.size
    if rows is not None:
        rows.put(given.title, f"{call * 1e6:.1f} us", size / call / moved, "a copy's bytes/s", host / call)
    return (
        f"{given.title:30}{call * 1e6:10.1f}{device * 1e6:12.1f}{host * 1e6:10.1f}{host / call:8.2f}"
        f"{size / call / 1e9:10.1f}{size / call / moved:9.0%}{size / host / 1e9:10.1f}{moved / 1e9:11.0f}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="checksums on a GPU against a device copy and XXH3 on the CPU")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=Path)
    options = parser.parse_args(arguments)
    runs, rows = options.runs, Rows("checksums", options.rows)
    if options.tiny:
        print("checksums on a GPU have no small form")
        return
    if not torch.cuda.is_available():
        sys.exit("gpu_checksums needs a CUDA device, but PyTorch finds none; nothing was measured.")
    device = torch.device("cuda")
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {runs} runs")
    print(f"{'':30}{'us/call':>10}{'device us':>12}{'CPU us':>10}{'ratio':>8}", end="")
    print(f"{'GB/s':>10}{'of copy':>9}{'CPU GB/s':>10}{'copy GB/s':>11}")
    for count, size in BATCHES:
        given = batch(count, size, device)
        print(line(given, (whole, on_device, on_host), lambda: copied(source, target), runs, rows), flush=True)


if __name__ == "__main__":
    main()
