"""K and V in 8 bits by the Triton kernels: written as by the reference, read as by dense attention. Collected by
test_triton_attention.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvferry.kernels.quantised_cache import FP8, PEAKS, dequantise, quantise
from kvferry.kernels.reference import ReferenceOps
from kvferry.kernels.triton import TritonOps
from tests.kernels.interpreted import DEVICE, bfloat16_products  # noqa: F401
from tests.kernels.paged_batch import LAYER, close, dense_attention, make_case, rope_table, sinks_of
from tests.pairwise import pairwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("dtype", "dims", "cache"), pairwise(DTYPES, [(16, 16), (24, 8), (64, 0), (80, 32)], list(PEAKS))
)
def test_the_cache_is_written_as_by_the_reference(
    dtype: torch.dtype, dims: tuple[int, int], cache: torch.dtype
) -> None:
    """dims: of a head, and how many of those are turned."""
    dim, rotary_dim = dims
    case = make_case([1, 1, 4], [18, 33, 50], 2, heads=6, kv_heads=2, dim=dim, dtype=dtype, cache=cache)
    qkv = torch.randn(case.plan.num_tokens, 10, dim, generator=torch.Generator().manual_seed(5)).to(dtype)
    qkv[3] = 0
    table = rope_table(64, rotary_dim) if rotary_dim else (None, None)
    pools = []
    for row, device in ((TritonOps(), DEVICE), (ReferenceOps(), "cpu")):
        moved = case.to(device)
        pool, there = moved.pool.clone(), qkv.to(device)
        cos, sin = (None if each is None else each.to(device) for each in table)
        row.rope_and_cache(there[:, :6], there[:, 6:8], there[:, 8:], cos, sin, pool[:, LAYER], moved.plan)
        pools.append(pool.cpu())
    written = torch.zeros(case.pool.shape[:-1], dtype=torch.bool)
    for slot in case.plan.slots.tolist():
        got, expected = (pool[slot // 16, LAYER, :, :, slot % 16] for pool in pools)
        written[slot // 16, LAYER, :, :, slot % 16] = True
        values = [dequantise(part, torch.float32) for part in (got, expected)]
        step = values[1].abs().amax() / 127 if cache == torch.int8 else values[1].abs() / 8 + 1e-4
        assert bool(((values[0] - values[1]).abs() <= 1.01 * step + values[1].abs() * 2**-7).all())
        got, expected = got.view(torch.int8), expected.view(torch.int8)
        assert torch.equal(got[1], expected[1]), "V is not turned: every bit is the same"
        if dtype == torch.float32 or not rotary_dim:
            assert bool(((got[0].int() - expected[0].int()).abs()[:, :dim] <= 1).all())
    found, before = (each.view(torch.int8)[~written] for each in (pools[0], case.pool))
    assert torch.equal(found, before)


def test_halves_are_rounded_to_the_even_one() -> None:
    case = make_case([1], [1], 1, heads=1, kv_heads=1, cache=torch.int8)
    vector = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0, *[0.0] * 8]).view(1, 1, 16).to(DEVICE)
    moved = case.to(DEVICE)
    TritonOps().rope_and_cache(vector, vector, vector, None, None, moved.kv_layer, moved.plan)
    slot = int(case.plan.slots[0])
    stored = moved.pool.cpu()[slot // 16, LAYER, :, 0, slot % 16]
    assert stored[:, :9].tolist() == [[127, 0, 2, 2, 0, -2, -2, -127, 0]] * 2
    assert stored[:, 16:].contiguous().view(torch.float32).flatten().tolist() == [1.0, 1.0]


def test_every_number_of_fp8_and_what_lies_between_is_rounded_as_by_pytorch() -> None:
    """Halves to the even one, down to the smallest."""
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    between = torch.cat((codes, (codes[1:] + codes[:-1]) / 2, codes * 1.01, codes * 0.97, torch.zeros(5)))
    x = torch.cat((between, -between)).clamp(-448, 448).view(1, 2, 512)
    case = make_case([1], [1], 1, heads=2, kv_heads=2, dim=512, cache=FP8)
    x[..., 0] = 448.0
    moved, there = case.to(DEVICE), x.to(DEVICE)
    TritonOps().rope_and_cache(there, there, there, None, None, moved.kv_layer, moved.plan)
    slot = int(case.plan.slots[0])
    stored = moved.pool.cpu()[slot // 16, LAYER, 0, :, slot % 16]
    assert torch.equal(stored.view(torch.int8), quantise(x, FP8)[0].view(torch.int8))


@pytest.mark.parametrize(("cache", "wrong", "place"), pairwise(list(PEAKS), [torch.nan, torch.inf], [1, 13]))
def test_what_is_no_number_is_none_when_it_is_read(cache: torch.dtype, wrong: float, place: int) -> None:
    """Of its own head alone, in a turned place and in one of the rest."""
    case = make_case([1], [20], 1, heads=2, kv_heads=2, cache=cache)
    moved = case.to(DEVICE)
    x = torch.ones(1, 2, 16, device=DEVICE)
    key = x.clone()
    key[0, 1, place] = wrong
    cos, sin = (each.to(DEVICE) for each in rope_table(64, 8))
    TritonOps().rope_and_cache(x, key, x, cos, sin, moved.kv_layer, moved.plan)
    found = TritonOps(1).paged_attention(moved.q, moved.kv_layer, moved.plan, 0.25).cpu()
    assert found[0, 0].isfinite().all()
    assert found[0, 1].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "read", "masked"),
    pairwise(DTYPES, [(torch.int8, 8), (FP8, 1), (FP8, 8)], [(0, 0.0, False), (16, 0.7, True), (-20, 0.0, False)]),
)
def test_mixed_batch(dtype: torch.dtype, read: tuple[torch.dtype, int], masked: tuple[int, float, bool]) -> None:
    """read: the cache's format and the device's processors. masked: window, cap and whether there are sinks."""
    (cache, processors), (window, cap, sunk) = read, masked
    shape: dict[str, Any] = {"heads": 6, "kv_heads": 2, "dtype": dtype, "cache": cache}
    case = make_case([1, 1, 1, 1, 17, 5], [1, 16, 17, 150, 17, 30], 4, **shape)
    sinks = sinks_of(case) if sunk else None
    moved, there = case.to(DEVICE), None if sinks is None else sinks.to(DEVICE)
    got = TritonOps(processors).paged_attention(moved.q, moved.kv_layer, moved.plan, 0.25, window, cap, there)
    close(got.cpu(), dense_attention(case, 0.25, window, cap, sinks), dtype)


@pytest.mark.parametrize("dim", [24, 80])
@pytest.mark.parametrize(("cache", "block_size"), [(torch.int8, 4), (FP8, 16)])
def test_head_dims_that_are_no_power_of_two(dim: int, cache: torch.dtype, block_size: int) -> None:
    case = make_case([1, 9], [100, 40], 1, heads=3, kv_heads=1, dim=dim, block_size=block_size, cache=cache)
    moved = case.to(DEVICE)
    got = TritonOps(4).paged_attention(moved.q, moved.kv_layer, moved.plan, 0.25)
    close(got.cpu(), dense_attention(case, 0.25), torch.float32)
