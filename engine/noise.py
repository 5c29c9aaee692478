"""Noise as a pure function of (seed, position, vocabulary index): the same token is drawn on every node and attempt.

The 64-bit key of a row is splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014) over
seed and position. A keyed permutation of the vocabulary index (xor, multiply, shift, with low-bias multipliers from
Wellons' hash-prospector search) gives 32 bits, which become standard Gumbel noise.

The integers are identical on every device: int32 arithmetic wraps. The two logarithms may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0x21F0AAAD, 0x735A2D97)
_SLACK = np.float32(1e-3)
"""More than the rounding of a logit and its noise."""


def gumbel(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device | str) -> torch.Tensor:
    """Standard Gumbel noise, float32 [n, vocab_size], for row i's (seeds[i], positions[i])."""
    index = torch.arange(vocab_size, dtype=torch.int32, device=device).expand(len(seeds), vocab_size)
    return gumbel_at(seeds, positions, index)


def gumbel_at(seeds: Sequence[int], positions: Sequence[int], index: torch.Tensor) -> torch.Tensor:
    """The same noise at chosen vocabulary indices: float32 like `index`, an integer tensor [n, k]."""
    bits = random_bits(seeds, positions, index.to(torch.int32))
    # 31 bits keep full relative precision near zero, the end that becomes large noise and makes rare tokens win.
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def host_uniform(seed: int, position: int, index: np.ndarray) -> np.ndarray:
    """What NumPy makes on the calling thread of one row's bits at vocabulary indices, uint32 [k]: float32 like them,
    from 2 ** -32 to 1 - 2 ** -24. Small ones make large noise."""
    key = row_key(seed, position)
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    first, second = map(np.uint32, _MULTIPLIERS)
    bits = index ^ low
    bits ^= bits >> 16
    bits *= first
    bits ^= bits >> 15
    bits += high
    bits *= second
    bits ^= bits >> 15
    bits ^= high
    bits *= first
    bits ^= bits >> 16
    bits &= np.uint32(0x7FFFFFFF)
    uniform = bits.astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(2.0**-31)
    return np.minimum(uniform, np.float32(1 - 2.0**-24), out=uniform)


def host_gumbel(uniform: np.ndarray) -> np.ndarray:
    """The noise of `gumbel` from such numbers."""
    noise: np.ndarray = -np.log(-np.log1p(-uniform))
    return noise


def host_winner(seed: int, position: int, ids: np.ndarray, values: np.ndarray) -> int:
    """Which of `ids` (uint32 [k]) has the largest of `values` (float32 [k]) plus noise. The exact noise is computed for
    those alone that could win: -log(u) is never below it, and nearly equals it where it is large."""
    uniform = host_uniform(seed, position, ids)
    most = values - np.log(uniform)
    favourite = most.argmax(keepdims=True)
    least = values[favourite] + host_gumbel(uniform[favourite])
    able = np.flatnonzero(most >= least - _SLACK)
    if len(able) == 0:
        return int(ids[favourite[0]])
    return int(ids[able[(values[able] + host_gumbel(uniform[able])).argmax()]])


def random_bits(seeds: Sequence[int], positions: Sequence[int], index: torch.Tensor) -> torch.Tensor:
    """32 random bits, int32 [n, k], of int32 vocabulary indices [n, k]. A row's indices all get different bits."""
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
    """64-bit key of a row; seed is any 64-bit integer, position counts from 0."""
    return _splitmix64(_splitmix64(seed & _MASK64) + position)


def _splitmix64(state: int) -> int:
    z = (state + _GOLDEN) & _MASK64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK64
    return z ^ (z >> 31)


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift of int32."""
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)


def _int32(value: int) -> int:
    """The low 32 bits as a signed number."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
