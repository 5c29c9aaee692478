"""Step shapes of a GPU's warm-up: each chunk tile and batch size, so that kernels are compiled before requests."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.engine.request import Request
from kvferry.engine.step_slices import Slice
from kvferry.kernels.cuda_graphs import CAPTURED_ROWS

LONGEST_TILE = 8192
"""Number of tokens of a chunk beyond which all chunks use the same tiles (kernels/triton/tile_sizes.py).

Models with few heads need this many tokens to occupy a device."""


def first_steps(stream: Request, prompt: Request, longest: int, most: int) -> Iterator[list[Slice]]:
    """Yield the slices of each warm-up step; the steps sample nothing.

    The steps are: chunks in each tile size, a decode beside a chunk, and decodes alone in each captured batch size up
    to `most` rows. The largest batch comes first, so that smaller ones reuse its memory. The requests have blocks for
    `longest` tokens."""
    last, chunk = min(LONGEST_TILE, longest), 2
    while chunk < last:
        yield [Slice(prompt, 0, chunk)]
        chunk *= 2
    if last > 1:
        yield [Slice(prompt, 0, last)]
    if longest > 2:
        yield [Slice(stream, 0, 1), Slice(prompt, 0, 2)]
    sizes = [size for below, size in zip((0, *CAPTURED_ROWS), CAPTURED_ROWS, strict=False) if below < most]
    for size in reversed(sizes):
        yield [Slice(stream, 0, 1)] * size
