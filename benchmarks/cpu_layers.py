"""Dense layers and attention of CPU kernels, timed against the machine's limits and PyTorch (cpu_kernels.py)."""

from __future__ import annotations

import itertools

from benchmarks.limits import Limits, interleaved
from kvferry.protocol.layout import KVLayout, blocks_for

ROWS = (1, 4, 8, 16, 32, 64, 128, 512)
"""Rows that dense layers are multiplied with."""
HEADS = ((9, 3, 64), (32, 8, 64), (32, 8, 128))
"""Query heads, K/V heads and head dim of attention: SmolLM2-135M's, then those of Llama models of 1 and 8 billion."""
DECODES = ((1, 128), (1, 2048), (8, 384), (32, 384), (1, 8192))
"""Sequences and positions of each."""
PREFILLS = (128, 512, 2048, 8192)
"""Tokens of a prompt."""
ATTENTION = [(seqs, 1, total_len) for seqs, total_len in DECODES] + [(1, length, length) for length in PREFILLS]
"""Sequences, query tokens and positions of each."""


def report(title: str, limits: Limits, times: list[float], moved: float, work: float, unit: str = "") -> None:
    """Print a row. times: median seconds of ours, the peer if any, reading and multiplying."""
    ours, *peer, read, multiply = times
    gbs, gflops = limits.shares(read, multiply)
    line = f"{title:34} {ours * 1e3:9.3f} ms"
    line += f" {peer[0] / ours:6.2f} x reference" if peer else " " * 19
    line += f" {moved / ours / 1e9:7.1f} GB/s ({100 * moved / ours / 1e9 / gbs:3.0f} % of {gbs:.0f})"
    line += f" {work / ours / 1e9:7.0f} GFLOP/s ({100 * work / ours / 1e9 / gflops:3.0f} % of {gflops:.0f})"
    print(line + unit, flush=True)


def bench_dense(ops, limits: Limits, runs: int) -> None:  # type: ignore[no-untyped-def]
    """Time the dense layers of SmolLM2-135M, with enough copies to exceed the caches."""
    import torch
    import torch.nn.functional as F

    for out, inputs in ((3072, 576), (576, 1536), (49152, 576)):
        copies = max(1, (96 << 20) // (2 * out * inputs))
        weights = [torch.randn(out, inputs).bfloat16() for _ in range(copies)]
        packed = [ops.linear(weight) for weight in weights]
        for rows in ROWS:
            x = torch.randn(rows, inputs).bfloat16()
            torch.testing.assert_close(packed[0](x), F.linear(x, weights[0]), atol=0.5, rtol=2e-2)
            y = torch.empty(rows, out, dtype=torch.bfloat16)  # as in a step, whose memory is its own
            forms = [
                lambda packed=packed, x=x, y=y: [ops.kernels.dense(layer.weights, x, y) for layer in packed],
                lambda weights=weights, x=x: [F.linear(x, weight) for weight in weights],
                limits.read,
                limits.multiply,
            ]
            times = interleaved(forms, max(3, runs // (1 + rows // 64)))
            size = copies * out * inputs
            report(f"dense {inputs} -> {out}, {rows} rows", limits, times, 2.0 * size, 2.0 * size * rows)


def shuffled_plan(query_len: int, total_len: int, seqs: int):  # type: ignore[no-untyped-def]
    """Return a plan of equal sequences whose blocks lie in shuffled order, and the blocks of its pool."""
    import torch

    from kvferry.kernels.batch_plan import BatchPlan

    per = blocks_for(total_len, 16)
    table = torch.randperm(seqs * per, generator=torch.Generator().manual_seed(0)).int().view(seqs, per)
    positions = torch.arange(total_len - query_len, total_len).repeat(seqs)
    rows = torch.arange(seqs).repeat_interleave(query_len)
    slots = table[rows, positions // 16].long() * 16 + positions % 16
    starts = torch.arange(seqs + 1, dtype=torch.int32) * query_len
    total = torch.full((seqs,), total_len, dtype=torch.int32)
    decodes = seqs if query_len == 1 else 0
    lens = ((query_len,) * seqs, (total_len,) * seqs)
    return BatchPlan(positions, slots, table, starts, total, *lens, decodes, 16), seqs * per


def random_pool(blocks: int, layers: int, heads: int, dim: int, planes: int = 2):  # type: ignore[no-untyped-def]
    """Return random K/V in a node's kind of memory; on small pages, page-table walks would dominate."""
    import torch

    from kvferry.worker.pool_memory import make_pool

    pool = make_pool(KVLayout(layers, heads, dim, "bfloat16", 16, planes), blocks, torch.device("cpu"))
    return pool.copy_(torch.randn(pool.shape))


def bench_attention(ops, limits: Limits, runs: int) -> None:  # type: ignore[no-untyped-def]
    import torch

    from kvferry.kernels.reference import ReferenceOps

    reference = ReferenceOps()
    for (heads, kv_heads, dim), (seqs, query_len, total_len) in itertools.product(HEADS, ATTENTION):
        plan, blocks = shuffled_plan(query_len, total_len, seqs)
        pairs = query_len * (query_len + 1) / 2 + query_len * (total_len - query_len)
        work = 4.0 * seqs * pairs * heads * dim
        layers = 6 if work < 1e10 else 1
        pool = random_pool(blocks, layers, kv_heads, dim)
        q = torch.randn(seqs * query_len, heads, dim).bfloat16()
        found = torch.empty_like(q)

        def ours(pool=pool, q=q, plan=plan, layers=layers, found=found):  # type: ignore[no-untyped-def]
            for layer in range(layers):
                if plan.num_decodes:
                    table, lens = plan.block_table, plan.total_len
                    ops.kernels.decode(q, pool[:, layer], table, lens, len(q), 0.125, 0, 0.0, None, False, found)
                else:
                    blocks, total_len = plan.block_table[0], plan.total_lens[0]
                    ops.kernels.prefill(q, pool[:, layer], blocks, total_len, 0.125, 0, 0.0, None, None, found)

        def theirs(pool=pool, q=q, plan=plan, layers=layers):  # type: ignore[no-untyped-def]
            return [reference.paged_attention(q, pool[:, layer], plan, 0.125) for layer in range(layers)]

        forms = [ours, limits.read, limits.multiply]
        if work < 2e10:
            ours()
            torch.testing.assert_close(found, theirs()[-1], atol=3e-2, rtol=3e-2)
            forms.insert(1, theirs)
        times = interleaved(forms, max(3, runs // (1 + query_len // 256)))
        kind = f"decode {seqs} x {total_len}" if query_len == 1 else f"prefill {query_len}"
        moved = 4.0 * layers * seqs * total_len * kv_heads * dim
        report(f"{kind}, {heads}/{kv_heads} heads of {dim}", limits, times, moved, layers * work)
