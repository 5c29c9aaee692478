"""Batches over a shuffled, poisoned pool, and a dense float64 oracle that never sees the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvferry.kernels.activation import GELU as GELU_BY_ERF
from kvferry.kernels.activation import GELU_TANH, RELU2, Activation
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.gate_spec import GELU, SILU, Gate
from kvferry.kernels.quantised_cache import dequantise, quantise, vector_width
from kvferry.protocol.layout import blocks_for
from tests.device_plans import moved

LAYERS, LAYER = 3, 1
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def make_plan(
    query_lens: Sequence[int], total_lens: Sequence[int], num_decodes: int, block_size: int = 16, seed: int = 0
) -> tuple[BatchPlan, int]:
    """(plan, blocks in the pool): blocks of the sequences lie in shuffled order, three belong to nobody."""
    assert all(n == 1 for n in query_lens[:num_decodes])
    counts = [blocks_for(total, block_size) for total in total_lens]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
    positions, slots, start = [], [], [0]
    for s, (query_len, total, count) in enumerate(zip(query_lens, total_lens, counts, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        table[s, :count] = torch.tensor(blocks)
        for position in range(total - query_len, total):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
        start.append(start[-1] + query_len)
    plan = BatchPlan(
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        block_table=table,
        query_start=torch.tensor(start, dtype=torch.int32),
        total_len=torch.tensor(total_lens, dtype=torch.int32),
        query_lens=tuple(query_lens),
        total_lens=tuple(total_lens),
        num_decodes=num_decodes,
        block_size=block_size,
    )
    return plan, num_blocks


@dataclass(frozen=True)
class Case:
    """pool: every slot that no sequence has written is NaN (in 8 bits: its scale). keys, values: what the pool holds,
    [total_len, kv_heads, dim] by sequence."""

    plan: BatchPlan
    pool: torch.Tensor
    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def kv_layer(self) -> torch.Tensor:
        return self.pool[:, LAYER]

    def to(self, device: str) -> Case:
        return replace(self, plan=moved(self.plan, device), pool=self.pool.to(device), q=self.q.to(device))


def make_case(
    query_lens: Sequence[int],
    total_lens: Sequence[int],
    num_decodes: int,
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    block_size: int = 16,
    seed: int = 0,
) -> Case:
    plan, num_blocks = make_plan(query_lens, total_lens, num_decodes, block_size, seed)
    random = torch.Generator().manual_seed(seed + 1)
    stored_as = cache or dtype
    shape = (num_blocks, LAYERS, 2, kv_heads, block_size, vector_width(dim, stored_as))
    if cache is None:
        pool = torch.full(shape, float("nan"), dtype=dtype)
    else:
        pool = torch.full(shape, -1, dtype=torch.int8).view(cache)
    keys, values = [], []
    for s, total in enumerate(total_lens):
        pair = torch.randn(2, total, kv_heads, dim, generator=random).to(dtype)
        stored = pair if cache is None else quantise(pair, cache)
        for position in range(total):
            block = int(plan.block_table[s, position // block_size])
            pool[block, LAYER, :, :, position % block_size] = stored[:, position]
        held = pair if cache is None else dequantise(stored, torch.float32)
        keys.append(held[0])
        values.append(held[1])
    q = torch.randn(sum(query_lens), heads, dim, generator=random).to(dtype)
    return Case(plan, pool, q, keys, values)


def seeing_ahead(case: Case, images: Sequence[tuple[int, int]]) -> Case:
    """The case where each token of an image, a range of query tokens of one sequence, sees all of the image."""
    until = case.plan.positions.int()
    for start, end in images:
        until[start:end] = until[end - 1].clone()
    return replace(case, plan=replace(case.plan, see_until=until))


GATES: dict[Gate, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: torch.nn.functional.silu,
    GELU: partial(torch.nn.functional.gelu, approximate="tanh"),
    Gate(1.702, limit=0.9, offset=1.0): lambda g: g * torch.sigmoid(1.702 * g),
}
"""The gates of families, and what they are of a gate that is within its limit."""


def gated(gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    """float64 of gate and up [T, 2 * d]."""
    g, up = gate_up.double().chunk(2, -1)
    return GATES[gate](g.clamp(max=gate.limit)) * (up.clamp(-gate.limit, gate.limit) + gate.offset)


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    RELU2: lambda x: x.clamp(min=0).square(),
    GELU_TANH: partial(torch.nn.functional.gelu, approximate="tanh"),
    GELU_BY_ERF: torch.nn.functional.gelu,
    Activation("xielu", 1.2, 0.9, 0.5, -1e-6): lambda x: torch.where(
        x > 0, 1.2 * x * x + 0.5 * x, 0.9 * (x.clamp(max=-1e-6).expm1() - x) + 0.5 * x
    ),
}
"""The activations of MLPs without a gate, and what they are in any dtype."""


def activation_inputs(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return numbers [T, d] with some far from 0, and some near it on both sides."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(6)) * 3
    x[0, :8] = torch.tensor([0.0, -1e-7, 1e-7, -1e-3, -0.39, -0.41, 40.0, -90.0])
    return x.to(dtype)


def sinks_of(case: Case) -> torch.Tensor:
    """float32 [heads]: some that take next to all, some that take next to nothing."""
    return torch.linspace(-3.0, 4.0, case.q.shape[1])


def dense_attention(
    case: Case, scale: float, window: int = 0, cap: float = 0.0, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """float64 [T, heads, dim]: the whole matrix of scores of each sequence, and what a token may not see is masked."""
    out, heads = [], case.q.shape[1]
    queries = case.q.double().split(case.plan.query_lens)
    lasts = (case.plan.positions if case.plan.see_until is None else case.plan.see_until).split(case.plan.query_lens)
    for q, keys, values, last in zip(queries, case.keys, case.values, lasts, strict=True):
        total, kv_heads, _ = keys.shape
        position = torch.arange(total - len(q), total)[:, None]
        seen = torch.arange(total) <= last[:, None]
        if window > 0:
            seen &= torch.arange(total) > position - window
        elif window < 0:
            seen &= torch.arange(total) // -window == position // -window
        kv_head = torch.arange(heads) * kv_heads // heads
        scores = q.transpose(0, 1) @ keys[:, kv_head].double().permute(1, 2, 0) * scale
        scores = cap * (scores / cap).tanh() if cap else scores
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(heads, len(q), 1)), -1)
        weights = scores.softmax(-1)[..., :total]
        out.append((weights @ values[:, kv_head].double().transpose(0, 1)).transpose(0, 1))
    return torch.cat(out)


def rope_table(max_len: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) float32 [max_len, rotary_dim / 2] with base 10,000."""
    frequency = 10_000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angle = torch.arange(max_len)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate_complex(x: torch.Tensor, positions: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """The rotation as a product of complex numbers in float64: dimension i and i + rotary_dim / 2 are one number."""
    half = rotary_dim // 2
    frequency = 10_000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    turn = torch.polar(torch.ones(len(positions), half, dtype=torch.float64), positions[:, None] * frequency)
    number = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double()) * turn[:, None]
    return torch.cat((number.real, number.imag, x[..., rotary_dim:].double()), -1)
