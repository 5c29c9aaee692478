"""Warm-up: compiles every GPU kernel and captures every batch size before requests arrive."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.engine.request import Request
from kvferry.engine.step_slices import Slice
from kvferry.kernels.cuda_graphs import LADDER

LONGEST_TILE = 8192
"""Tokens of a chunk from which on all longer ones run in the same tiles (kernels/triton/tile_sizes.py): those of a
model of few heads need so many to fill a device."""


def first_steps(stream: Request, prompt: Request, longest: int, most: int) -> Iterator[list[Slice]]:
    """Slices of each step, of requests that have blocks for `longest` tokens.

    They sample nothing. Chunks in each size of tile; a decode beside a chunk; and decodes alone in each size of batch
    that is captured, for `most` rows: the largest first, whose memory then serves all smaller ones."""
    last, chunk = min(LONGEST_TILE, longest), 2
    while chunk < last:
        yield [Slice(prompt, 0, chunk)]
        chunk *= 2
    if last > 1:
        yield [Slice(prompt, 0, last)]
    if longest > 2:
        yield [Slice(stream, 0, 1), Slice(prompt, 0, 2)]
    sizes = [size for below, size in zip((0, *LADDER), LADDER, strict=False) if below < most]
    for size in reversed(sizes):
        yield [Slice(stream, 0, 1)] * size
