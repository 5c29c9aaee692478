"""Delta rules and scans of extreme decays and magnitudes, in batches of any lengths, against the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.reference import ReferenceOps
from tests.kernels.recurrent_batch import ROWS, Layer, plan_of

SETS = instruction_sets()
CHUNK = 32
"""Tokens of a chunk (chunk_memory.h)."""
SCALES = (1e-30, 1e-10, 1.0, 1e4, 1e12)
"""What vectors are multiplied with, a head at a time."""
KEPT = (0.0, 1e-38, 1e-30, 1e-7, 0.5, 0.999, 1.0)
"""What a token keeps of a state."""
ROUNDED = 5e-6
"""Error allowed as a share of a head's largest value: outputs are sums of terms as large, which may cancel."""
LENGTHS = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 8, 31, 32, 33]), min_size=1, max_size=5)

pytestmark = pytest.mark.skipif(not SETS, reason="installed without the CPU extension")


@functools.cache
def made(name: str, batch_invariant: bool) -> CpuOps:
    return CpuOps(2, name, batch_invariant=batch_invariant)


def drawn(numbers: torch.Generator, values: tuple[float, ...], *shape: int) -> torch.Tensor:
    return torch.tensor(values)[torch.randint(0, len(values), shape, generator=numbers)]


def delta_rule(tokens: int, seed: int) -> Layer:
    """Return a delta rule; each head has values of one magnitude, so that a small one's errors show."""
    numbers, (heads, k_dim, v_dim) = torch.Generator().manual_seed(seed), (4, 19, 21)
    q, k = (
        torch.randn(tokens, heads, k_dim, generator=numbers) * drawn(numbers, SCALES, tokens, 1, 1) for _ in range(2)
    )
    v = torch.randn(tokens, heads, v_dim, generator=numbers) * drawn(numbers, SCALES, 1, heads, 1)
    decay = drawn(numbers, KEPT, tokens, heads).log()
    beta = drawn(numbers, (0.0, 1e-30, 0.3, 1.0), tokens, heads)
    return Layer("gated_delta_rule", (q, k, v, decay, beta), (0, 1, 2, 3, 4), (heads, k_dim, v_dim))


def scan(tokens: int, seed: int) -> Layer:
    """Return a scan of Mamba 2, with steps from 0 to far beyond those that forget everything."""
    numbers, (heads, dim, groups, n) = torch.Generator().manual_seed(seed), (4, 21, 2, 19)
    x = torch.randn(tokens, heads, dim, generator=numbers) * drawn(numbers, SCALES, 1, heads, 1)
    b, c = (torch.randn(tokens, groups, n, generator=numbers) * drawn(numbers, (1e-4, 1.0, 1e3), 1, 1, 1) for _ in "bc")
    dt = drawn(numbers, (0.0, 1e-30, 1e-4, 0.1, 1.0, 1e3, 1e8), tokens, heads)
    a = drawn(numbers, (-1e-30, -1e-3, -1.0, -1e4), heads)
    return Layer("state_space_scan", (x, dt, a, b, c, torch.ones(heads)), (0, 1, 3, 4), (heads, dim, n))


def channels(tokens: int, seed: int) -> Layer:
    """Return a scan of Mamba 1, each number of whose states decays at a rate of its own."""
    numbers, (heads, n) = torch.Generator().manual_seed(seed), (37, 16)
    x = torch.randn(tokens, heads, 1, generator=numbers) * drawn(numbers, SCALES, 1, heads, 1)
    b, c = (torch.randn(tokens, 1, n, generator=numbers) for _ in "bc")
    dt = drawn(numbers, (0.0, 1e-30, 1e-4, 0.1, 1.0, 1e3, 1e8), tokens, heads)
    a = drawn(numbers, (-1e-30, -1e-3, -1.0, -1e4), heads, n)
    return Layer("state_space_scan", (x, dt, a, b, c, torch.ones(heads)), (0, 1, 3, 4), (heads, 1, n))


def near(found: torch.Tensor, wanted: torch.Tensor, largest: float, place: str) -> None:
    """Hold a head's numbers to the reference's within a share of the largest. largest: of its values."""
    bound = ROUNDED * largest + (2e-5 * float(wanted.abs().max()) if wanted.numel() else 0.0)
    torch.testing.assert_close(found, wanted, atol=bound, rtol=0.0, msg=lambda text: f"{place}: {text}")


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("make", [delta_rule, scan, channels])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(lens=LENGTHS, seed=st.integers(0, 2**31), fresh=st.booleans())
def test_any_decays_and_magnitudes(
    name: str, batch_invariant: bool, make: Callable[[int, int], Layer], lens: list[int], seed: int, fresh: bool
) -> None:
    """Sequences of no token keep their state; each head is compared by itself."""
    layer, count = make(sum(lens), seed), len(lens)
    before = (-1,) * count if fresh else tuple(range(count))
    after = tuple(range(count, 2 * count))
    wanted_rows = layer.rows(2 * count)
    found_rows = wanted_rows.clone()
    wanted = layer.run(ReferenceOps(), plan_of(tuple(lens), wanted_rows, before, after))
    found = layer.run(made(name, batch_invariant), plan_of(tuple(lens), found_rows, before, after))
    assert 2 * count <= ROWS
    assert found.isfinite().all() == wanted.isfinite().all()
    values = layer.inputs[2 if make is delta_rule else 0]
    assert values is not None
    for head in range(wanted.shape[1]):
        at, largest = 0, max([0.0 if fresh and make is delta_rule else 1.0, *values[:, head].abs().flatten().tolist()])
        for seq, length in enumerate(lens):
            near(
                found[at : at + length, head], wanted[at : at + length, head], largest, f"outputs of {seq}, head {head}"
            )
            at += length
            mine, theirs = (layer.states(rows)[count + seq, head] for rows in (found_rows, wanted_rows))
            near(mine, theirs, largest, f"state of {seq}, head {head}")
