"""Bit masks over the vocabulary, applied to logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

Masks = Sequence[np.ndarray | None]
"""Of each row of logits, what may be drawn: int32 [words], bit t % 32 of word t // 32 stands for token t; None: all
may. Empty: no row has one."""


def keep_only(logits: torch.Tensor, masks: Masks) -> None:
    """Set to minus infinity what is not in a row's mask in float32 logits [n, vocab].

    A handful of operations on any device; the masks travel packed."""
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
