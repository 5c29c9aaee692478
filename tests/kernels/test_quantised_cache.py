"""K and V in 8 bits: the compiled kernels write what the reference writes, and read it as dense attention does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.ops import Ops
from kvferry.kernels.quantised_cache import FP8, PEAKS, dequantise, quantise
from kvferry.kernels.reference import ReferenceOps
from tests.kernels.paged_batch import LAYER, close, dense_attention, make_case, rope_table

DTYPES = [torch.float32, torch.bfloat16]
ROWS = ["reference", *instruction_sets()]


@functools.cache
def made(name: str) -> Ops:
    return ReferenceOps() if name == "reference" else CpuOps(2, name)


@pytest.fixture(params=ROWS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return made(request.param)


@given(
    st.integers(0, 1000),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
    st.sampled_from([8, 64, 80]),
    st.sampled_from([*PEAKS]),
)
def test_numbers_come_back_within_half_a_step(seed: int, spread: float, dim: int, cache: torch.dtype) -> None:
    """In fp8 a step is an eighth of the power of two below, down to 2^-6 times the scale."""
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(seed)) * spread
    stored = quantise(x, cache)
    assert (stored.shape, stored.dtype) == ((3, dim + 4), cache)
    step = x.abs().amax(-1, keepdim=True) / PEAKS[cache]
    if cache == FP8:
        step = torch.maximum(x.abs() / 8, step * 2**-9)
    assert bool(((dequantise(stored, torch.float32) - x).abs() <= 0.5001 * step).all())


@pytest.mark.parametrize("cache", PEAKS)
def test_zeros_stay_zeros(cache: torch.dtype) -> None:
    assert not dequantise(quantise(torch.zeros(2, 16), cache), torch.bfloat16).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_written_and_read_on_every_row(ops: Ops, dtype: torch.dtype) -> None:
    """Byte for byte what the reference writes."""
    shape: dict[str, Any] = {"heads": 6, "kv_heads": 2, "dim": 64, "dtype": dtype, "cache": FP8}
    case = make_case([1, 1, 19], [18, 33, 50], 2, **shape)
    qkv = torch.randn(case.plan.num_tokens, 10, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    pools = []
    for row in (ops, ReferenceOps()):
        pool = case.pool.clone()
        row.rope_and_cache(qkv[:, :6], qkv[:, 6:8], qkv[:, 8:], *rope_table(64, 64), pool[:, LAYER], case.plan)
        pools.append(pool.view(torch.int8))
    assert torch.equal(*pools)
    assert not torch.equal(pools[0], case.pool.view(torch.int8))
    got = ops.paged_attention(case.q, case.kv_layer, case.plan, 0.125)
    close(got, dense_attention(case, 0.125), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(16, 16), (24, 8), (64, 64), (64, 0), (80, 32)])
def test_the_cache_is_written_as_by_the_reference(ops: Ops, dtype: torch.dtype, dim: int, rotary_dim: int) -> None:
    case = make_case([1, 1, 19], [18, 33, 50], 2, heads=6, kv_heads=2, dim=dim, dtype=dtype, cache=torch.int8)
    qkv = torch.randn(case.plan.num_tokens, 10, dim, generator=torch.Generator().manual_seed(5)).to(dtype)
    qkv[3] = 0
    cos, sin = rope_table(64, rotary_dim) if rotary_dim else (None, None)
    pools = []
    for row in (ops, ReferenceOps()):
        pool = case.pool.clone()
        row.rope_and_cache(qkv[:, :6], qkv[:, 6:8], qkv[:, 8:], cos, sin, pool[:, LAYER], case.plan)
        pools.append(pool)
    for slot in case.plan.slots.tolist():
        got, expected = (pool[slot // 16, LAYER, :, :, slot % 16] for pool in pools)
        values = [dequantise(part, torch.float32) for part in (got, expected)]
        step = values[1].abs().amax() / 127
        assert bool(((values[0] - values[1]).abs() <= 1.01 * step).all())
        assert torch.equal(got[1], expected[1]), "V is not turned: every bit is the same"
        case.pool[slot // 16, LAYER, :, :, slot % 16] = got
    assert torch.equal(pools[0], case.pool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (14, 2), (5, 1)])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("window", [0, 50, -40])
def test_mixed_batch_equals_dense_attention(
    ops: Ops, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int
) -> None:
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": dtype}
    case = make_case([1, 1, 1, 1, 1, 5], [1, 15, 16, 64, 200, 30], 5, cache=torch.int8, **shape)
    got = ops.paged_attention(case.q, case.kv_layer, case.plan, 0.125, window)
    close(got, dense_attention(case, 0.125, window), dtype)


@pytest.mark.parametrize("dim", [32, 64, 96])
@pytest.mark.parametrize("window", [0, 40, 150, -40])
def test_prefill_equals_dense_attention(ops: Ops, dim: int, window: int) -> None:
    case = make_case([1, 70, 1, 33], [40, 70, 300, 293], 1, heads=6, dim=dim, dtype=torch.bfloat16, cache=torch.int8)
    got = ops.paged_attention(case.q, case.kv_layer, case.plan, 0.125, window)
    close(got, dense_attention(case, 0.125, window), torch.bfloat16)


@settings(max_examples=25, deadline=None)
@given(
    decodes=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    chunks=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), max_size=2),
    block_size=st.sampled_from([1, 4, 16]),
    name=st.sampled_from(ROWS),
    seed=st.integers(0, 1000),
)
def test_any_batch_equals_dense_attention(
    decodes: list[int], chunks: list[tuple[int, int]], block_size: int, name: str, seed: int
) -> None:
    query_lens = [1] * len(decodes) + [query_len for query_len, _ in chunks]
    total_lens = decodes + [query_len + computed_len for query_len, computed_len in chunks]
    case = make_case(query_lens, total_lens, len(decodes), cache=torch.int8, block_size=block_size, seed=seed)
    got = made(name).paged_attention(case.q, case.kv_layer, case.plan, 0.25)
    close(got, dense_attention(case, 0.25), torch.float32)
