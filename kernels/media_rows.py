"""MediaRows: rows of images and audio in a batch, which replace the embeddings of their placeholder tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Rows of some of a batch's query tokens.

    tokens  int64 [n], ascending: which query tokens they are
    rows    [n, hidden * (1 + levels)], in the model's dtype: in place of the token's embedding, scaled as it is when it
            enters the first layer; then for each level the addend of the residual after that layer, counted from 0
            (deepstack of Qwen3-VL)
    """

    tokens: torch.Tensor
    rows: torch.Tensor

    def to(self, device: torch.device) -> MediaRows:
        """Return the rows on another device."""
        return MediaRows(self.tokens.to(device), self.rows.to(device))

    def placed(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, hidden] of a batch's tokens with these rows in place of their tokens'."""
        return embedded.index_copy(0, self.tokens, self.rows[:, : embedded.shape[1]])

    def added(self, residual: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the residual [T, hidden] plus the rows' level for this layer."""
        hidden = residual.shape[1]
        level = self.rows[:, hidden * (layer + 1) : hidden * (layer + 2)]
        return residual.index_add(0, self.tokens, level) if level.shape[1] else residual
