"""Base of the GPU kernel benchmark: one operation at one size (`Subject`), in two forms that must agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.protocol.layout import blocks_for

COLD_BYTES = 256 << 20
MAX_LAYERS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Subject:
    """One operation at one size.

    Forms take a layer number below `layers` and return what must agree between them; moved and work are bytes and
    floating point operations of one layer."""

    title: str
    ours: Callable[[int], torch.Tensor]
    peer: Callable[[int], torch.Tensor]
    layers: int
    moved: int
    work: int = 0


def layers_for(moved: int) -> int:
    """Return how many layers exceed any L2 cache of today together, MAX_LAYERS at most."""
    return max(1, min(MAX_LAYERS, -(-COLD_BYTES // moved)))


def paged_plan(query_lens: list[int], total_lens: list[int], shape: Shape) -> tuple[BatchPlan, int]:
    """Return a plan with the sequences' blocks in shuffled order, and the blocks in the pool."""
    counts = [blocks_for(total, shape.block_size) for total in total_lens]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, blocks in enumerate(order.split(counts)):
        table[row, : len(blocks)] = blocks
    spans = list(zip(query_lens, total_lens, strict=True))
    positions = torch.cat([torch.arange(total - query_len, total) for query_len, total in spans])
    seqs = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(query_lens))
    slots = table[seqs, positions // shape.block_size].long() * shape.block_size + positions % shape.block_size
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    tensors: Any = (t.to(shape.device) for t in (positions, slots, table, starts, torch.tensor(total_lens).int()))
    decodes = sum(query_len == 1 for query_len in query_lens)
    lens: Any = (tuple(query_lens), tuple(total_lens), decodes, shape.block_size)
    return BatchPlan(*tensors, *lens), sum(counts)
