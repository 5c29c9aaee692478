"""Times alternative tiles of attention and of products on the CUDA device of this machine.

    python -m benchmarks.gpu_sweep [--rows FILE]

For each shape it tries the tile that `kernels.triton.tile_sizes` chooses, and tiles that differ in keys per step,
warps, pipeline stages, or parts of a sequence. The row names the fastest tile; its last column is the speed-up over the
chosen one. Products are also compared with cuBLAS over the same weights in bfloat16. Several processes first run each
try once, so that compiling does not take most of the time."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_products import stored
from benchmarks.gpu_rows import Rows
from benchmarks.gpu_subject import Shape, paged_plan
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.quantised_cache import FP8, PEAKS, quantise
from kvferry.kernels.triton import TritonOps, coded_product, tile_sizes
from kvferry.kernels.triton.coded_linear import CodedLinear
from kvferry.kernels.triton.decode import decode
from kvferry.kernels.triton.prefill import prefill
from kvferry.kernels.triton.split_kv import Division
from kvferry.kernels.triton.tile_sizes import Tile, decode_tile, prefill_tile

HEADS, KV_HEADS, DIM, PROCESSORS = 32, 8, 128, 132
CACHES: tuple[tuple[str, torch.dtype | None], ...] = (("bf16", None), ("fp8", FP8))
DECODES = ((1, 16384), (24, 4096), (64, 2048))
LONG_AMONG_SHORT = (100_000, *[2048] * 63)
CHUNKS = ((2048, 0), (8192, 0), (2048, 14336))
FORMS = ("int8", "int4", "fp8", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4")
OUTPUTS, INPUTS = 65536, 4096
Try = tuple[str, Callable[[], object]]
TODAY = "today's tile"
CUBLAS = "cuBLAS in bf16"
COMPILERS = 12
"""Processes that compile."""
_share: int | None = None
"""In a compiling process: its share of each shape's tries."""


def fastest(title: str, tries: Sequence[Try], rows: Rows, moved: int = 0, work: int = 0) -> None:
    """Print the microseconds of each try and write the row of the fastest.

    A compiling process only runs its share once."""
    from triton.testing import do_bench_cudagraph

    taken: dict[str, float] = {}
    if _share is not None:
        for _, run in tries[_share::COMPILERS]:
            with suppress(Exception):
                run()
        return
    for name, run in tries:
        try:
            taken[name] = do_bench_cudagraph(run, rep=30, return_mode="median") * 1e3
        except Exception as error:
            rows.wrong(f"{title}, {name}", error)
            torch.cuda.synchronize()
    for name, us in sorted(taken.items(), key=lambda each: each[1]):
        print(
            f"{title:34} {name:50} {us:9.1f} us {moved / us / 1e6:6.2f} TB/s {work / us / 1e6:7.1f} TFLOP/s", flush=True
        )
    if TODAY in taken:
        best = min((name for name in taken if name != CUBLAS), key=taken.__getitem__)
        beside = f", cuBLAS in bf16 {taken[CUBLAS]:.1f} us" if CUBLAS in taken else ""
        rows.put(
            title, f"{taken[TODAY]:.1f} us, {best} {taken[best]:.1f} us{beside}", None, "", taken[TODAY] / taken[best]
        )


def named(tile: Tile) -> str:
    return f"rows {tile.rows} keys {tile.keys} warps {tile.warps} stages {tile.stages}"


def pool_of(blocks: int, cache: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """Return one layer of a pool [blocks, 2, kv_heads, 16, dim]."""
    pool = torch.randn(blocks, 1, 2, KV_HEADS, 16, DIM, dtype=torch.bfloat16, device=device)
    return (quantise(pool, cache) if cache else pool)[:, 0]


def decode_tries(q: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> Iterator[Try]:
    out, now = torch.empty_like(q), decode_tile(HEADS // KV_HEADS, DIM, 2)
    spare = tile_sizes.spare_parts(KV_HEADS, PROCESSORS)
    tiles = [
        now,
        replace(now, stages=4),
        replace(now, keys=64),
        replace(now, keys=256, stages=2),
        replace(now, warps=8),
    ]
    for tile, times in itertools.product(tiles, (0.25, 0.5, 1, 2)):
        division = Division(plan.total_len, tile.keys, max(1, int(spare * times)))
        name = TODAY if tile == now and times == 1 else f"{named(tile)} parts x {times:g}"
        yield name, partial(decode, q, kv, out, plan, 0.1, 0, 0.0, None, division, tile)


def prefill_tries(q: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> Iterator[Try]:
    out, now = torch.empty_like(q), prefill_tile(10_000, DIM, 2, coded=kv.dtype in PEAKS, tall=True)
    tiles = [now, *(Tile(256, 64, DIM, 8, stages) for stages in (3, 5, 7)), Tile(256, 128, DIM, 8, 3)]
    tiles += [
        Tile(256, 64, DIM, 16, 5),
        Tile(128, 128, DIM, 8, 3),
        Tile(128, 128, DIM, 8, 5),
        Tile(128, 256, DIM, 8, 3),
    ]
    tiles += [Tile(128, 64, DIM, 8, 5), Tile(256, 32, DIM, 8, 7)]
    for tile in tiles:
        name = TODAY if tile is now else named(tile)
        rows = len(q) * (HEADS // KV_HEADS)
        yield name, partial(prefill, q, kv, out, plan, 0.1, 0, 0.0, None, rows, tile)


def sweep_attention(device: torch.device, rows: Rows) -> None:
    shape = Shape(HEADS, KV_HEADS, DIM, torch.bfloat16, device)
    batches = [(f"{seqs} x {length}", [length] * seqs) for seqs, length in DECODES]
    for (name, cache), (what, lengths) in itertools.product(CACHES, [*batches, ("one long", [*LONG_AMONG_SHORT])]):
        plan, blocks = paged_plan([1] * len(lengths), lengths, shape)
        kv, q = (
            pool_of(blocks, cache, device),
            torch.randn(len(lengths), HEADS, DIM, dtype=torch.bfloat16, device=device),
        )
        fastest(f"decode {what} {name}", list(decode_tries(q, kv, plan)), rows, moved=kv.nbytes)
    for (name, cache), (new, before) in itertools.product(CACHES, CHUNKS):
        plan, blocks = paged_plan([new], [new + before], shape)
        kv, q = pool_of(blocks, cache, device), torch.randn(new, HEADS, DIM, dtype=torch.bfloat16, device=device)
        work = 4 * HEADS * DIM * (new * before + new * (new + 1) // 2)
        fastest(f"prefill {new} at {before} {name}", list(prefill_tries(q, kv, plan)), rows, work=work)


def sweep_products(device: torch.device, rows: Rows) -> None:
    weight = torch.randn(OUTPUTS, INPUTS, dtype=torch.bfloat16, device=device)
    for form, count in itertools.product(FORMS, (1, 64)):
        linear = TritonOps(PROCESSORS).packed([stored(form, OUTPUTS, INPUTS, device)], INPUTS)
        assert linear is not None
        x = torch.randn(count, INPUTS, dtype=torch.bfloat16, device=device)
        tries: list[Try] = [(TODAY, partial(linear, x)), (CUBLAS, partial(F.linear, x, weight))]
        changes: list[dict[str, int]] = [
            {"programs": 1},
            {"programs": 4},
            {"inputs": 32},
            {"inputs": 256},
        ]
        for outputs, warps, stages in ((128, 4, 4), (32, 4, 4), (64, 4, 3), (64, 4, 6)):
            changes.append({"keys": outputs, "warps": warps, "stages": stages})
        if count > 16:
            for height, outputs, warps in ((64, 64, 2), (64, 32, 2), (128, 32, 2), (64, 64, 4)):
                changes.append({"rows": height, "keys": outputs, "warps": warps})
        tries += [(str(change), partial(changed, change, linear, x)) for change in changes]
        fastest(f"product {count} x {OUTPUTS} {form}", tries, rows, linear.memory, 2 * count * OUTPUTS * INPUTS)


def changed(change: dict[str, int], linear: CodedLinear, x: torch.Tensor) -> None:
    """Compute the product with other constants: fields of its tile, programs per processor, inputs per loop step."""
    tile: dict[str, Any] = {name: value for name, value in change.items() if name not in ("programs", "inputs")}
    choose = tile_sizes.product_tile
    kept = tile_sizes.PROGRAMS_PER_PROCESSOR, coded_product._UNROLLED_INPUTS
    vars(coded_product)["product_tile"] = lambda *given: replace(choose(*given), **tile)
    tile_sizes.PROGRAMS_PER_PROCESSOR = change.get("programs", kept[0])
    coded_product._UNROLLED_INPUTS = change.get("inputs", kept[1])
    try:
        linear(x)
    finally:
        vars(coded_product)["product_tile"] = choose
        tile_sizes.PROGRAMS_PER_PROCESSOR, coded_product._UNROLLED_INPUTS = kept


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="alternative tiles of attention and products on this machine's GPU")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--compile", type=int, metavar="SHARE", help="compile this share of the tries, measure nothing")
    options = parser.parse_args(arguments)
    if options.tiny:
        print("a sweep has no small form")
        return
    if not torch.cuda.is_available():
        sys.exit("gpu_sweep needs a CUDA device, but PyTorch finds none; nothing was measured.")
    global _share
    _share = options.compile
    if _share is None:
        command = (sys.executable, "-m", "benchmarks.gpu_sweep", "--compile")
        for each in [subprocess.Popen([*command, str(share)]) for share in range(COMPILERS)]:
            each.wait()
    device, rows = torch.device("cuda"), Rows("sweep", options.rows)
    with torch.inference_mode():
        sweep_products(device, rows)
        sweep_attention(device, rows)


if __name__ == "__main__":
    main()
