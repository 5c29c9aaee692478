import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.gumbel_noise import gumbel, gumbel_at, random_bits, row_key

EULER = 0.5772156649015329
KOLMOGOROV_99_9 = 1.95
FIXED_KEY = 0xA706DD2F4D197E6F
FIXED_BITS = [3899781022, 877561191, 999474714, 3389047449]
FIXED_NOISE = [-0.5263217687606812, 0.6437078714370728, 0.4679774045944214, 0.1472233533859253]


def _bits(seed: int, position: int, size: int) -> np.ndarray:
    index = torch.arange(size, dtype=torch.int32)[None]
    return random_bits([seed], [position], index)[0].numpy().astype(np.int64) & 0xFFFFFFFF


def _expected_bits(seed: int, position: int, index: int) -> int:
    """The permutation in unbounded Python integers."""
    key, mask = row_key(seed, position), 2**32 - 1
    low, high = key & mask, key >> 32
    x = index ^ low
    x = (x ^ x >> 16) * 0x21F0AAAD & mask
    x = ((x ^ x >> 15) + high & mask) * 0x735A2D97 & mask
    x = (x ^ x >> 15) ^ high
    x = x * 0x21F0AAAD & mask
    return x ^ x >> 16


def test_values_are_fixed_for_ever():
    """A change here changes every seeded text: nodes of different versions would no longer agree."""
    assert row_key(0, 0) == FIXED_KEY
    assert _bits(42, 7, 4).tolist() == FIXED_BITS
    assert gumbel([42], [7], 4, "cpu")[0].tolist() == pytest.approx(FIXED_NOISE, abs=1e-6)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.lists(st.integers(0, 2**31 - 1), min_size=1))
@settings(max_examples=50, deadline=None)
def test_bits_equal_the_plain_integer_formula(seed, position, index):
    got = random_bits([seed], [position], torch.tensor([index], dtype=torch.int32))[0].tolist()
    assert [bits & 0xFFFFFFFF for bits in got] == [_expected_bits(seed, position, i) for i in index]


def test_rows_and_gathered_indices_agree_bit_for_bit():
    seeds, positions = [1, -5, 1], [0, 3, 900]
    whole = gumbel(seeds, positions, 1001, "cpu")
    for row in range(3):
        assert torch.equal(gumbel([seeds[row]], [positions[row]], 1001, "cpu")[0], whole[row])
    index = torch.randint(0, 1001, (3, 17), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel_at(seeds, positions, index), whole.gather(1, index))


def test_gumbel_distribution():
    noise = torch.cat([gumbel([3], [p], 50_000, "cpu")[0] for p in range(20)]).double()
    n = len(noise)
    assert abs(noise.mean() - EULER) < 5 * math.pi / math.sqrt(6 * n)
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    ordered = np.sort(noise.numpy())
    distance = np.abs(np.exp(-np.exp(-ordered)) - (np.arange(n) + 0.5) / n).max()
    assert distance * math.sqrt(n) < KOLMOGOROV_99_9


def test_rare_noise_is_as_frequent_as_it_should_be():
    """Tokens of probability 1e-5 depend on the far right tail."""
    noise = torch.cat([gumbel([9], [p], 500_000, "cpu")[0] for p in range(8)])
    for threshold in (9.0, 11.0):
        expected = len(noise) * -math.expm1(-math.exp(-threshold))
        assert abs((noise > threshold).sum().item() - expected) < 5 * math.sqrt(expected)
    assert torch.isfinite(noise).all()


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(seed, 0) for seed in range(256)], id="seeds"),
        pytest.param([(0, position) for position in range(256)], id="positions"),
        pytest.param([(seed, 255 - seed) for seed in range(256)], id="seed+position constant"),
        pytest.param([(seed << 32, 5) for seed in range(256)], id="high seed bits"),
    ],
)
def test_neighbouring_rows_are_independent(rows):
    size = 2048
    index = torch.arange(size, dtype=torch.int32).expand(len(rows), size)
    bits = random_bits([s for s, _ in rows], [p for _, p in rows], index).numpy().view(np.uint32)
    table = bits.astype(np.float64) / 2**32 - 0.5
    neighbours = (table[1:] * table[:-1]).mean() * 12
    along = (table[:, 1:] * table[:, :-1]).mean() * 12
    limit = 5 / math.sqrt(table.size)
    assert abs(neighbours) < limit
    assert abs(along) < limit
    for axis in (0, 1):  # every index over the rows, and every row over the indices, has mean zero
        means = table.mean(axis=axis) * math.sqrt(12 * table.shape[axis])
        assert abs(means).max() < 5.5
        assert 0.8 < means.var() < 1.25
    flips = np.unpackbits((bits[1:] ^ bits[:-1]).view(np.uint8)).mean()
    assert abs(flips - 0.5) < 5 * 0.5 / math.sqrt(bits[1:].size * 32)


def test_every_bit_and_byte_is_uniform():
    bits = np.concatenate([_bits(1, p, 20_000) for p in range(10)])
    for shift in (0, 8, 16, 24):
        counts = np.bincount(bits >> shift & 0xFF, minlength=256)
        expected = len(bits) / 256
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert 255 - 5 * math.sqrt(510) < chi_square < 255 + 5 * math.sqrt(510)


def test_winner_over_positions_is_uniform():
    winners = gumbel([8] * 20_000, list(range(20_000)), 16, "cpu").argmax(-1).bincount(minlength=16).double()
    chi_square = ((winners - 1250) ** 2 / 1250).sum()
    assert chi_square < 15 + 5 * math.sqrt(30)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_device_does_not_matter():
    index = torch.arange(5000, dtype=torch.int32)[None]
    assert torch.equal(random_bits([4], [9], index.cuda()).cpu(), random_bits([4], [9], index))
    assert torch.allclose(gumbel([4], [9], 5000, "cuda").cpu(), gumbel([4], [9], 5000, "cpu"), atol=1e-5)
