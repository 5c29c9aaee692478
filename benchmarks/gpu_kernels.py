"""Measures the Triton operations on the CUDA device of this machine, against a device copy and against PyTorch.

    python -m benchmarks.gpu_kernels [--heads 32 --kv-heads 8 --dim 128 --dtype bfloat16 --runs 15 --rows FILE]

Each line is one operation at one size. Every form of it (ours, then PyTorch's: SDPA on contiguous K/V, the plain
operations of `kernels/reference.py`, a product in 16 bits) is captured into a CUDA graph over up to 32 layers, as many
as exceed the device's L2 cache: host time does not count, and only the smallest sizes read from cache. The graphs run
in turn, `--runs` times, and the median is printed. GB/s counts each byte an operation must move once; the share is of a
device-to-device copy measured in the same rounds. Outputs are compared before anything is timed; a wrong one writes a
row that says so, and the others continue. --tiny: small sizes on a CPU, with the reference's operations and without
graphs, to try the benchmark itself."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu_latent import latent_attention
from benchmarks.gpu_products import FORMS, product
from benchmarks.gpu_recurrent import KINDS, PROMPTS, recurrent_layer
from benchmarks.gpu_rows import Rows
from benchmarks.gpu_subject import Shape, Subject, layers_for, paged_plan
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.ops import Ops, select
from kvferry.kernels.quantised_cache import FP8, PEAKS, dequantise, quantise
from kvferry.kernels.reference import ReferenceOps
from kvferry.protocol.layout import SCALE_BYTES


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the subjects.

    decodes: (sequences, length); chunks: (sequences, tokens, tokens before them); tokens: of operations other than
    attention; copied: bytes of the copy; rows: of products with codes; prompts: (sequences, tokens) of recurrent
    layers."""

    decodes: tuple[tuple[int, int], ...]
    chunks: tuple[tuple[int, int, int], ...]
    tokens: tuple[int, ...]
    copied: int
    rows: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]


FULL = Sizes(
    decodes=((1, 4096), (1, 32768), (8, 4096), (32, 2048), (128, 1024)),
    chunks=((1, 2048, 0), (1, 8192, 0), (1, 512, 7680), (8, 512, 0)),
    tokens=(1, 64, 8192),
    copied=1 << 30,
    rows=(1, 16, 64, 128, 2048),
    prompts=PROMPTS,
)
CACHES = {None: "", torch.int8: ", int8", FP8: ", fp8"}
"""Number formats of the pool, and their names in titles."""
SMALL = Sizes(((2, 64),), ((1, 32, 16),), (4,), 1 << 20, (3,), ((2, 5),))


def attention(
    ops: Ops, shape: Shape, seqs: int, query_len: int, computed_len: int, cache: torch.dtype | None = None
) -> Subject:
    """Return attention of equal sequences; the peer reads the same K/V, contiguous and in the queries' format."""
    total, itemsize = computed_len + query_len, shape.dtype.itemsize
    vector = shape.dim * itemsize if cache is None else shape.dim + SCALE_BYTES
    moved = 2 * seqs * total * shape.kv_heads * vector + 2 * seqs * query_len * shape.heads * shape.dim * itemsize
    layers = layers_for(moved)
    plan, blocks = paged_plan([query_len] * seqs, [total] * seqs, shape)
    random: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
    pool = torch.randn(blocks, layers, 2, shape.kv_heads, shape.block_size, shape.dim, **random)
    if cache is not None:
        pool = quantise(pool, cache)
    q = torch.randn(seqs * query_len, shape.heads, shape.dim, **random)
    scale = shape.dim**-0.5
    peer = sdpa_decode if query_len == 1 else sdpa_prefill
    pairs = query_len * computed_len + query_len * (query_len + 1) // 2
    return Subject(
        title=f"{'decode' if query_len == 1 else 'prefill'} {seqs} x {query_len} at {computed_len}{CACHES[cache]}",
        ours=lambda layer: ops.paged_attention(q, pool[:, layer], plan, scale),
        peer=peer(q, [contiguous(pool[:, layer], plan, total, q.dtype) for layer in range(layers)], shape, scale),
        layers=layers,
        moved=moved,
        work=4 * seqs * shape.heads * shape.dim * pairs,
    )


def contiguous(kv_layer: torch.Tensor, plan: BatchPlan, total: int, dtype: torch.dtype) -> torch.Tensor:
    """Copy K/V [2, seqs, kv_heads, total, dim] from the pool."""
    if kv_layer.dtype in PEAKS:
        kv_layer = dequantise(kv_layer, dtype)
    pages = kv_layer[plan.block_table.long()].permute(2, 0, 3, 1, 4, 5)
    return pages.flatten(3, 4)[:, :, :, :total].contiguous()


def sdpa_decode(q: torch.Tensor, kv: list[torch.Tensor], shape: Shape, scale: float) -> Callable[[int], torch.Tensor]:
    """Return SDPA with query heads that share a K/V head as its queries, so that each K/V is read once."""
    folded = q.view(len(q), shape.kv_heads, -1, shape.dim)
    return lambda layer: F.scaled_dot_product_attention(folded, *kv[layer], scale=scale).reshape(q.shape)


def sdpa_prefill(q: torch.Tensor, kv: list[torch.Tensor], shape: Shape, scale: float) -> Callable[[int], torch.Tensor]:
    """Return SDPA with repeated K/V heads, which lets it choose its fastest kernel."""
    group, seqs = shape.heads // shape.kv_heads, kv[0].shape[1]
    repeated = [layer.repeat_interleave(group, 2) for layer in kv]
    laid = q.view(seqs, -1, shape.heads, shape.dim).transpose(1, 2).contiguous()
    mask = causal_lower_right(laid.shape[2], repeated[0].shape[3])

    def run(layer: int) -> torch.Tensor:
        out = F.scaled_dot_product_attention(laid, *repeated[layer], attn_mask=mask, scale=scale)
        return out.transpose(1, 2).reshape(q.shape)

    return run


def pointwise(ops: Ops, shape: Shape, tokens: int) -> Iterator[Subject]:
    """Yield norm, activation and rope with cache write of `tokens` tokens."""
    plain, hidden, bytes_each = ReferenceOps(), shape.heads * shape.dim, shape.dtype.itemsize
    random: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
    moved = 4 * tokens * hidden * bytes_each
    layers = layers_for(moved)
    x, weight = torch.randn(layers, 2, tokens, hidden, **random), torch.randn(hidden, **random)
    yield Subject(
        f"add_rms_norm {tokens} x {hidden}",
        lambda layer: ops.add_rms_norm(x[layer, 0], x[layer, 1], weight, 1e-5)[0],
        lambda layer: plain.add_rms_norm(x[layer, 0], x[layer, 1], weight, 1e-5)[0],
        layers,
        moved,
    )
    wide = x.view(layers, tokens, 2 * hidden)
    yield Subject(
        f"gate_mul {tokens} x {hidden}",
        lambda layer: ops.gate_mul(wide[layer]),
        lambda layer: plain.gate_mul(wide[layer]),
        layers,
        moved * 3 // 4,
    )
    yield rope(ops, plain, shape, tokens)


def rope(ops: Ops, plain: Ops, shape: Shape, tokens: int) -> Subject:
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    moved = 2 * tokens * sum(heads) * shape.dim * shape.dtype.itemsize
    layers = layers_for(moved)
    plan, blocks = paged_plan([tokens], [tokens], shape)
    random: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
    pool = torch.zeros(blocks, layers, 2, shape.kv_heads, shape.block_size, shape.dim, **random)
    qkv = torch.randn(layers, tokens, sum(heads), shape.dim, **random)
    angle = torch.randn(tokens, shape.dim // 2, device=shape.device)
    cos, sin = angle.cos(), angle.sin()

    def form(of: Ops) -> Callable[[int], torch.Tensor]:
        def run(layer: int) -> torch.Tensor:
            q, k, v = qkv[layer].split(heads, 1)
            return of.rope_and_cache(q, k, v, cos, sin, pool[:, layer], plan)

        return run

    return Subject(f"rope_and_cache {tokens} x {sum(heads)} heads", form(ops), form(plain), layers, moved)


def subjects(ops: Ops, shape: Shape, sizes: Sizes) -> Iterator[tuple[str, Callable[[], Iterable[Subject]]]]:
    """Yield names of subjects with functions that build them: one at a time, as each may hold gigabytes."""
    for seqs, length in sizes.decodes:
        for cache, name in CACHES.items():
            made = partial(attention, ops, shape, seqs, 1, length - 1, cache)
            yield f"decode {seqs} x {length}{name}", partial(_one, made)
    for seqs, query_len, computed_len in sizes.chunks:
        for cache, name in CACHES.items():
            made = partial(attention, ops, shape, seqs, query_len, computed_len, cache)
            yield f"prefill {seqs} x {query_len} at {computed_len}{name}", partial(_one, made)
    for seqs, length in sizes.decodes:
        for cache in (None, FP8):
            made = partial(latent_attention, ops, shape, seqs, 1, length - 1, cache)
            yield f"latent decode {seqs} x {length}{CACHES[cache]}", partial(_one, made)
    for chunk in sizes.chunks:
        yield f"latent prefill {chunk}", partial(_one, partial(latent_attention, ops, shape, *chunk))
    for kind in KINDS:
        for seqs, tokens in (*((seqs, 1) for seqs in sorted({seqs for seqs, _ in sizes.decodes})), *sizes.prompts):
            made = partial(recurrent_layer, ops, shape, kind, seqs, tokens)
            yield f"{kind} {seqs} x {tokens}", partial(_one, made)
    for form in FORMS:
        for rows in sizes.rows:
            yield f"product {rows}, {form}", partial(_one, partial(product, ops, shape, form, rows))
    for tokens in sizes.tokens:
        yield f"pointwise {tokens}", partial(pointwise, ops, shape, tokens)


def _one(made: Callable[[], Subject]) -> Iterator[Subject]:
    yield made()


def check(subject: Subject) -> None:
    """Warm up both forms; raise AssertionError when they differ by more than rounding."""
    got, expected = subject.ours(0).float(), subject.peer(0).float()
    torch.testing.assert_close(got, expected, atol=3e-2, rtol=3e-2, msg=lambda text: f"{subject.title}: {text}")


def captured(form: Callable[[int], object], layers: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        form(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            form(layer)
    return graph


def timed(form: Callable[[int], object], layers: int, device: torch.device) -> Callable[[], float]:
    """Return a function that runs the form on each layer once and returns the device's seconds."""
    if device.type == "cpu":
        return lambda: on_host(form, layers)
    graph = captured(form, layers)
    return lambda: seconds(graph)


def on_host(form: Callable[[int], object], layers: int) -> float:
    began = time.perf_counter()
    for layer in range(layers):
        form(layer)
    return time.perf_counter() - began


def seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(subject: Subject, source: torch.Tensor, target: torch.Tensor, runs: int, rows: Rows) -> str:
    """Return a line of the table."""
    check(subject)
    forms = [timed(form, subject.layers, source.device) for form in (subject.ours, subject.peer)]
    forms.append(timed(lambda _: target.copy_(source), 1, source.device))
    rounds = [[form() for form in forms] for _ in range(runs + 2)][2:]
    ours, peer, copy = (statistics.median(column) for column in zip(*rounds, strict=True))
    ours, peer = ours / subject.layers, peer / subject.layers
    copied = 2 * source.nbytes / copy
    rate, work = subject.moved / ours, f"{subject.work / ours / 1e12:8.1f}" if subject.work else " " * 8
    figure = f"{ours * 1e6:.1f} us" + (f", {work.strip()} TFLOP/s" if subject.work else "")
    rows.put(subject.title, figure, rate / copied, "a copy's bytes/s", peer / ours)
    return (
        f"{subject.title:34}{ours * 1e6:10.1f}{peer * 1e6:12.1f}{peer / ours:8.2f}"
        f"{rate / 1e9:10.0f}{rate / copied:9.0%}{work}{copied / 1e9:10.0f}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Triton operations against a device copy and against PyTorch")
    for name, default in (("--heads", 32), ("--kv-heads", 8), ("--dim", 128), ("--runs", 15)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=Path)
    chosen = parser.parse_args(arguments)
    if not chosen.tiny and not torch.cuda.is_available():
        sys.exit("gpu_kernels needs a CUDA device, but PyTorch finds none; nothing was measured.")
    if chosen.tiny:
        device, sizes, shape = torch.device("cpu"), SMALL, (4, 2, 64, torch.float32)
        ops: Ops = ReferenceOps()
    else:
        device, sizes = torch.device("cuda"), FULL
        shape = (chosen.heads, chosen.kv_heads, chosen.dim, getattr(torch, chosen.dtype))
        ops = select("triton", device)
    rows = Rows("kernels", chosen.rows)
    source = torch.ones(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    name = "a CPU" if chosen.tiny else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {shape[3]}, median of {chosen.runs} runs")
    print(f"{'':34}{'us/layer':>10}{'PyTorch us':>12}{'ratio':>8}", end="")
    print(f"{'GB/s':>10}{'of copy':>9}{'TFLOP/s':>8}{'copy GB/s':>10}")
    with torch.inference_mode():
        for name, build in subjects(ops, Shape(*shape, device), sizes):
            try:
                for subject in build():
                    print(measure(subject, source, target, chosen.runs, rows), flush=True)
            except Exception as error:
                rows.wrong(name, error)
                print(f"{name:34} wrong: {error}", flush=True)
                _expect_sound(device)
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _expect_sound(device: torch.device) -> None:
    """Raise the device's error if it ended the process's use of the device; later figures would be wrong."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
