"""Gumbel noise for sampling, a pure function of (seed, position, token id), equal on every node and attempt.

The 64-bit key of a row is splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014) over
seed and position. A keyed permutation of the vocabulary index (xor, multiply, shift, with low-bias multipliers from
Wellons' hash-prospector search) gives 32 bits, which become standard Gumbel noise.

The integers are identical on every device: int32 arithmetic wraps. The two logarithms may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0x21F0AAAD, 0x735A2D97)


def gumbel(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device | str) -> torch.Tensor:
    """Return standard Gumbel noise, float32 [n, vocab_size], for row i's (seeds[i], positions[i])."""
    index = torch.arange(vocab_size, dtype=torch.int32, device=device).expand(len(seeds), vocab_size)
    return gumbel_at(seeds, positions, index)


def gumbel_at(seeds: Sequence[int], positions: Sequence[int], index: torch.Tensor) -> torch.Tensor:
    """Return the same noise at chosen vocabulary indices: float32 like `index`, an integer tensor [n, k]."""
    bits = random_bits(seeds, positions, index.to(torch.int32))
    # 31 bits keep full relative precision near zero, where large noise makes rare tokens win
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def random_bits(seeds: Sequence[int], positions: Sequence[int], index: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits, int32 [n, k], for int32 vocabulary indices [n, k]; unique within a row."""
    keys = [row_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    halves = torch.tensor([(_int32(key), _int32(key >> 32)) for key in keys], dtype=torch.int32).view(-1, 2)
    halves = halves.to(index.device)
    low, high = halves[:, :1], halves[:, 1:]
    bits = index ^ low
    bits.bitwise_xor_(_shifted(bits, 16)).mul_(_MULTIPLIERS[0])
    bits.bitwise_xor_(_shifted(bits, 15)).add_(high).mul_(_MULTIPLIERS[1])
    bits.bitwise_xor_(_shifted(bits, 15)).bitwise_xor_(high)
    bits.mul_(_MULTIPLIERS[0])
    return bits.bitwise_xor_(_shifted(bits, 16))


def row_key(seed: int, position: int) -> int:
    """Return the 64-bit key of a row; seed is any 64-bit integer, position counts from 0."""
    return _splitmix64(_splitmix64(seed & _MASK64) + position)


def _splitmix64(state: int) -> int:
    z = (state + _GOLDEN) & _MASK64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK64
    return z ^ (z >> 31)


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the logical right shift of int32."""
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)


def _int32(value: int) -> int:
    """Return the low 32 bits as a signed number."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
