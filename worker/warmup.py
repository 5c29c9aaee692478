"""Step shapes of a GPU's warm-up: each chunk tile and captured size, so that kernels are compiled before requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.engine.request import Request
from kvferry.engine.step_slices import Slice
from kvferry.kernels.graph_inputs import CAPTURED_ROWS, CHUNK_DECODES, CHUNK_TOKENS, MAX_CHUNKS

LONGEST_TILE = 8192
"""Number of tokens of a chunk beyond which all chunks use the same tiles (kernels/triton/tile_sizes.py).

Models with few heads need this many tokens to occupy a device."""


def first_steps(stream: Request, prompt: Request, longest: int, most: int) -> Iterator[list[Slice]]:
    """Yield the slices of each warm-up step; the steps sample nothing.

    The steps are: chunks in each tile size, a decode beside chunks, and each captured size: decodes beside a chunk, and
    decodes alone up to `most` rows. The largest batch comes first, so that smaller ones reuse its memory. Short chunks
    come in numbers that are not captured, because their tiles differ from those of a captured step. The requests have
    blocks for `longest` tokens."""
    last, chunk, several = min(LONGEST_TILE, longest), 2, MAX_CHUNKS + 1
    while chunk < last:
        yield [Slice(prompt, 0, chunk)] * (several if chunk <= CHUNK_TOKENS[-1] else 1)
        chunk *= 2
    if last > 1:
        yield [Slice(prompt, 0, last)] * (several if last <= CHUNK_TOKENS[-1] else 1)
    if longest > 2:
        yield [Slice(stream, 0, 1), *[Slice(prompt, 0, 2)] * several]
    for tokens in reversed(_up_to(CHUNK_TOKENS, longest) if longest > 1 else ()):
        for decodes in reversed(_up_to(CHUNK_DECODES, most)):
            yield [Slice(stream, 0, 1)] * decodes + [Slice(prompt, 0, min(tokens, longest))]
    for size in reversed(_up_to(CAPTURED_ROWS, most)):
        yield [Slice(stream, 0, 1)] * size


def _up_to(sizes: Sequence[int], most: int) -> list[int]:
    """Return the sizes that batches of up to `most` are padded to."""
    return [size for below, size in zip((-1, *sizes), sizes, strict=False) if below < most]
