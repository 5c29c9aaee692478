"""Tile sizes and launch parameters as pure functions of shapes, without Triton."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPLITS = 64
MIN_TILES_PER_SPLIT = 2
"""Least tiles of keys that a split handles."""
PROGRAMS_PER_PROCESSOR = 2
"""Programs of a product's split that each multiprocessor is given."""
MIN_TILES_PER_PART = 2
"""Tiles of K/V that a part of a sequence has at least."""
DECODE_PARTS, LATENT_PARTS = 8, 4
"""Parts of sequences, beyond one a sequence and K/V head or tile of heads, that each multiprocessor is given."""


TALLEST_ROWS = 256
"""Query rows of the tallest tile."""
AHEAD = 5
"""Pipeline stages that read K/V ahead. Its addresses come from the block table, an indirect load, and Triton gives each
of the two levels (stages - 1) / 2 steps ahead: with fewer than five stages K/V has none."""


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: query rows of a program (query tokens times the heads that share a K/V head); keys: positions per step of
    its loop; dim: head dim padded to a power of two. All are powers of two of at least 16, as tensor cores need."""

    rows: int
    keys: int
    dim: int
    warps: int
    stages: int


def power_of_two(n: int, least: int = 1) -> int:
    """Return the smallest power of two not below n and `least` (itself a power of two)."""
    return max(least, 1 << max(0, n - 1).bit_length())


def kv_splits(programs: int, keys: int, processors: int) -> int:
    """Into how many parts to split the inputs of a product, a power of two: as many as give each of the device's
    `processors` PROGRAMS_PER_PROCESSOR programs when there are `programs` tiles of outputs, as long as `keys` tiles of
    inputs leave each part MIN_TILES_PER_SPLIT."""
    wanted = processors * PROGRAMS_PER_PROCESSOR // max(1, programs)
    most = max(1, min(wanted, keys // MIN_TILES_PER_SPLIT, MAX_SPLITS))
    return 1 << (most.bit_length() - 1)


def spare_parts(heads: int, processors: int, each: int = DECODE_PARTS) -> int:
    """Parts of a batch's sequences beyond one a sequence, when there is a program for each part and each of `heads`
    K/V heads or tiles of heads: as many as give each of the device's `processors` so many programs."""
    return max(1, processors * each // heads)


def decode_tile(group: int, head_dim: int, element_bytes: int) -> Tile:
    """Tile of a decode program: the heads that share a K/V head by `keys` positions.

    Several programs on a multiprocessor overlap what each reads; on an H100 stages that read ahead are slower, since
    fewer fit."""
    rows, dim = power_of_two(group, 16), power_of_two(head_dim, 16)
    if element_bytes == 4:
        return _float32_tile(rows, dim)
    return Tile(rows, 128 if dim <= 128 else 32, dim, warps=4, stages=3 if dim <= 256 else 2)


def latent_tile(rank: int, element_bytes: int) -> Tile:
    """Tile of a program of heads that attend to cached latents: the sums of a head are as wide as these."""
    dim = power_of_two(rank, 16)
    return _float32_tile(16, dim) if element_bytes == 4 else Tile(16, 32, dim, warps=4, stages=2)


def fills(rows: int, heads: int, processors: int) -> bool:
    """Return the tallest tiles give every multiprocessor some of a chunk of so many rows.

    The longest chunk of a step decides alone: a longer one never has a lower tile, so warming up the longest compiles
    what any other may need."""
    return rows * heads >= TALLEST_ROWS * PROGRAMS_PER_PROCESSOR * processors


def prefill_tile(rows: int, head_dim: int, element_bytes: int, *, coded: bool = False, tall: bool = False) -> Tile:
    """Tile of a prefill program when the longest chunk has `rows` rows.

    coded: K/V is in 8 bits, which registers must have room for; tall: see `fills`."""
    dim = power_of_two(head_dim, 16)
    if element_bytes == 4:
        return _float32_tile(min(32, power_of_two(rows, 16)), dim)
    most = (TALLEST_ROWS if tall and not coded else 128) if dim <= 128 else 128 if dim <= 256 else 64
    size = min(most, power_of_two(rows, 16))
    keys, stages = (128, 3) if coded and dim <= 128 else (64, AHEAD) if dim <= 128 else (32, 3 if dim <= 256 else 2)
    return Tile(size, keys, dim, warps=8 if size >= 128 else 4, stages=stages)


def product_tile(rows: int, inputs: int, element_bytes: int) -> Tile:
    """Tile of a program of a product with codes: rows by outputs (`keys`), with so many inputs at a step of its loop.

    The order of sums is the same in both heights."""
    if element_bytes == 4:
        return Tile(16, 32, inputs, warps=4, stages=2)
    return Tile(16 if rows <= 16 else 32, 64, inputs, warps=4, stages=4)


def _float32_tile(rows: int, dim: int) -> Tile:
    """float32 products run without tensor cores, where larger tiles spill registers."""
    return Tile(rows, 32 if dim <= 64 else 16, dim, warps=4 if dim <= 64 else 8, stages=2)
