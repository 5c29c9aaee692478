"""Embeddings of a batch, with the rows of images and audio in place of their placeholder tokens."""

from __future__ import annotations

import torch

from kvferry.kernels.linear import Linear
from kvferry.kernels.media_rows import MediaRows


def embedded(table: Linear, token_ids: torch.Tensor, media: MediaRows | None) -> torch.Tensor:
    """Return the input of the first layer, [T, hidden].

    The ids of media's placeholder tokens may lie beyond the table; they are not looked up."""
    if media is None:
        return table.rows(token_ids)
    return media.placed(table.rows(token_ids.index_fill(0, media.tokens, 0)))
