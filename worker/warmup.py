"""Warm-up steps that compile every GPU kernel and capture every batch size before requests arrive."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.engine.request import Request
from kvferry.engine.step_slices import Slice
from kvferry.kernels.cuda_graphs import CAPTURED_ROWS

LONGEST_TILE = 8192
"""Tokens of a chunk from which on all longer ones use the same tiles (kernels/triton/tile_sizes.py).

Models with few heads need so many tokens to fill a device."""


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
