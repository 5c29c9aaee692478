"""With batch invariance a token's attention has the same bits in every batch, chunk and team of threads."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.ops import select
from kvferry.protocol.errors import ConfigError
from tests.kernels.paged_batch import Case, close, dense_attention, make_case, sinks_of

SETS = instruction_sets()
CPU = torch.device("cpu")
needs_extension = pytest.mark.skipif(not SETS, reason="installed without the CPU extension")

PLACES = {"alone": ([0], []), "among others": ([1, 2, 0, 3, 4, 5, 6], []), "beside a chunk": ([3, 0], [40])}
"""Batches by the indices of their decodes, and the last tokens of sequence 0 that are computed as a chunk."""
CHUNKS = (1, 2, 17, 100, 300)


@functools.cache
def made(name: str, threads: int) -> CpuOps:
    return CpuOps(threads, name, batch_invariant=True)


def part_of(case: Case, parts: list[tuple[int, int]], num_decodes: int) -> tuple[BatchPlan, torch.Tensor]:
    """Plan and queries of the last `count` tokens of each (sequence, count). Every sequence of the case is a chunk."""
    ends = [int(end) for end in case.plan.query_start[1:]]
    rows = torch.cat([torch.arange(ends[s] - count, ends[s]) for s, count in parts])
    counts = [count for _, count in parts]
    plan = replace(
        case.plan,
        positions=case.plan.positions[rows],
        slots=case.plan.slots[rows],
        block_table=case.plan.block_table[[s for s, _ in parts]],
        query_start=torch.tensor([0, *counts]).cumsum(0).int(),
        total_len=case.plan.total_len[[s for s, _ in parts]],
        query_lens=tuple(counts),
        total_lens=tuple(case.plan.total_lens[s] for s, _ in parts),
        num_decodes=num_decodes,
    )
    return plan, case.q[rows]


@needs_extension
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 6, 2), (32, 4, 4), (96, 7, 1)])
@pytest.mark.parametrize(
    ("window", "cap", "sunk"), [(0, 0.0, False), (150, 0.0, False), (150, 0.7, True), (-150, 0.0, False)]
)
def test_a_token_has_the_same_bits_wherever_it_is_computed(
    name: str, int8: bool, dim: int, heads: int, kv_heads: int, window: int, cap: float, sunk: bool
) -> None:
    totals = [700, 9, 128, 333, 64, 1025, 50]
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim}
    case = make_case(totals, totals, 0, dtype=torch.bfloat16, cache=torch.int8 if int8 else None, **shape)
    how = (0.125, window, cap, sinks_of(case) if sunk else None)
    expected: torch.Tensor | None = None
    for threads in (1, 2, 3):
        for decodes, chunks in PLACES.values():
            parts = [(s, 1) for s in decodes] + [(2, count) for count in chunks]
            plan, q = part_of(case, parts, len(decodes))
            row = made(name, threads).paged_attention(q, case.kv_layer, plan, *how)[decodes.index(0)]
            expected = row if expected is None else expected
            assert torch.equal(row, expected)
        for count in CHUNKS:
            plan, q = part_of(case, [(0, count)], 0)
            got = made(name, threads).paged_attention(q, case.kv_layer, plan, *how)
            assert torch.equal(got[-1], expected), f"the last token of a chunk of {count}"
    plan, q = part_of(case, [(s, 1) for s in range(7)], 7)
    batch = replace(case, plan=plan, q=q)
    close(
        made(name, 2).paged_attention(q, case.kv_layer, plan, *how),
        dense_attention(batch, *how),
        torch.bfloat16,
    )


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_other_rows_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--kernels cpu") as raised:
        select(name, CPU, batch_invariant=True)
    assert raised.value.param == "batch_invariant"
