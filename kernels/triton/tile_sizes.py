"""Tile sizes and launch parameters as pure functions of shapes, without Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_SPLITS = 64
"""Maximum number of parts of a product's inputs."""
MIN_TILES_PER_SPLIT = 2
"""Minimum number of tiles of inputs in a part."""
PROGRAMS_PER_PROCESSOR = 2
"""Programs of a split product per multiprocessor."""
MIN_TILES_PER_PART = 2
"""Minimum number of tiles of K/V in a part of a sequence."""
DECODE_PARTS, LATENT_PARTS = 8, 4
"""Extra parts per multiprocessor, besides the one of each sequence and K/V head (or tile of heads)."""


TALLEST_ROWS = 256
"""Query rows of the tallest tile."""
AHEAD = 5
"""Pipeline stages that read K/V ahead.

Addresses come from the block table, an indirect load, and Triton runs each of the two levels (stages - 1) / 2 steps
ahead: with fewer than five stages, K/V is not read ahead."""
AMD_KEYS, AMD_BYTES = 64, 32 << 10
"""Maximum positions per loop step on AMD GPUs, and bytes of their K and V: half the shared memory of gfx942."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a tile, powers of two of at least 16, as tensor cores need.

    rows: query rows of a program (query tokens times the heads that share a K/V head). keys: positions per step of its
    loop. dim: head dim padded to a power of two."""

    rows: int
    keys: int
    dim: int
    warps: int
    stages: int


def power_of_two(n: int, minimum: int = 1) -> int:
    """Return the smallest power of two not below n and `minimum` (itself a power of two)."""
    return max(minimum, 1 << max(0, n - 1).bit_length())


def product_splits(programs: int, keys: int, processors: int) -> int:
    """Return the number of parts, a power of two, into which to split the inputs of a product.

    Enough that `programs` tiles of outputs fill the device's `processors`, while each part keeps MIN_TILES_PER_SPLIT of
    the `keys` tiles of inputs."""
    target = processors * PROGRAMS_PER_PROCESSOR // max(1, programs)
    limit = max(1, min(target, keys // MIN_TILES_PER_SPLIT, MAX_SPLITS))
    return 1 << (limit.bit_length() - 1)


def spare_parts(heads: int, processors: int, each: int = DECODE_PARTS) -> int:
    """Return the number of parts of a batch's sequences beyond one per sequence.

    Each part runs one program per K/V head or tile of heads (`heads`); each of the device's `processors` gets `each`
    programs."""
    return max(1, processors * each // heads)


def decode_tile(group: int, head_dim: int, element_bytes: int) -> Tile:
    """Return the tile of a decode program: the heads that share a K/V head by `keys` positions.

    Several programs on a multiprocessor overlap their reads. On an H100, stages that read ahead are slower, since fewer
    programs fit."""
    rows, dim = power_of_two(group, 16), power_of_two(head_dim, 16)
    if element_bytes == 4:
        return _float32_tile(rows, dim)
    return Tile(rows, 128 if dim <= 128 else 32, dim, warps=4, stages=3 if dim <= 256 else 2)


def amd_tile(tile: Tile, element_bytes: int) -> Tile:
    """Adapt an attention tile (not the tallest) to AMD GPUs.

    There Triton keeps data that it reads ahead in registers, which do not overflow with two stages, AMD_KEYS and four
    warps of 64 threads. Where the fewest keys of float32 take more than AMD_BYTES, nothing is read ahead."""
    limit = AMD_BYTES // (2 * tile.dim * element_bytes)
    keys, stages = min(tile.keys, AMD_KEYS, max(16, limit)), 2 if limit >= 16 else 1
    return replace(tile, keys=keys, warps=4, stages=stages)


def latent_tile(rank: int, element_bytes: int) -> Tile:
    """Return the tile of a program of heads on cached latents: each head's accumulator is as wide as a latent."""
    dim = power_of_two(rank, 16)
    return _float32_tile(16, dim) if element_bytes == 4 else Tile(16, 32, dim, warps=4, stages=2)


def fills(rows: int, heads: int, processors: int) -> bool:
    """Return whether the tallest tiles occupy every multiprocessor for a chunk of `rows` rows.

    Only a step's longest chunk counts. A longer chunk never has a shorter tile, so warming up the longest compiles
    every tile that shorter chunks may need."""
    return rows * heads >= TALLEST_ROWS * PROGRAMS_PER_PROCESSOR * processors


def prefill_tile(rows: int, head_dim: int, element_bytes: int, *, coded: bool = False, tall: bool = False) -> Tile:
    """Return the tile of a prefill program when the longest chunk has `rows` rows.

    coded: K/V is in 8 bits, which takes registers. tall: see `fills`."""
    dim = power_of_two(head_dim, 16)
    if element_bytes == 4:
        return _float32_tile(min(32, power_of_two(rows, 16)), dim)
    limit = (TALLEST_ROWS if tall and not coded else 128) if dim <= 128 else 128 if dim <= 256 else 64
    size = min(limit, power_of_two(rows, 16))
    keys, stages = (128, 3) if coded and dim <= 128 else (64, AHEAD) if dim <= 128 else (32, 3 if dim <= 256 else 2)
    return Tile(size, keys, dim, warps=8 if size >= 128 else 4, stages=stages)


def product_tile(rows: int, inputs: int, element_bytes: int, amd: bool = False) -> Tile:
    """Return the tile of a product with quantised weights: rows by outputs (`keys`), with `inputs` per loop step.

    Both heights sum in the same order. amd: on a GPU of AMD, see `amd_tile`."""
    if element_bytes == 4:
        return Tile(16, 32, inputs, warps=4, stages=2)
    return Tile(16 if rows <= 16 else 32, 64, inputs, warps=4, stages=2 if amd else 4)


def _float32_tile(rows: int, dim: int) -> Tile:
    """Return a small tile: float32 products run without tensor cores, where larger tiles spill registers."""
    return Tile(rows, 32 if dim <= 64 else 16, dim, warps=4 if dim <= 64 else 8, stages=2)
