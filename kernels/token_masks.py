"""Bit masks over the vocabulary (tokens that a grammar allows), and their application to logits in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

Masks = Sequence[np.ndarray | None]
"""Allowed tokens of each row of logits: int32 [words], bit t % 32 of word t // 32 for token t.

None allows all tokens; an empty sequence has no masks at all."""


def keep_only(logits: torch.Tensor, masks: Masks) -> None:
    """Set logits [n, vocab] (float32) outside each row's mask to minus infinity.

    It takes a few operations on any device; the masks are copied to it packed."""
    rows = [i for i, mask in enumerate(masks) if mask is not None]
    if not rows:
        return
    bits = torch.from_numpy(np.stack([mask for mask in masks if mask is not None]))
    bits = bits.to(logits.device, non_blocking=True)
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = ((bits[:, :, None] >> places) & 1).eq(0).view(len(rows), -1)[:, : logits.shape[1]]
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, -torch.inf)
        return
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)
