"""Bit masks over a vocabulary, applied to logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def keep_only(logits: torch.Tensor, rows: Sequence[int], masks: Sequence[np.ndarray]) -> None:
    """Set to minus infinity what is not in masks[i] in row rows[i] of float32 logits [n, vocab]. A mask is int32
    [words]: bit t % 32 of word t // 32 stands for token t."""
    if logits.device.type == "cpu":
        _on_cpu(logits.numpy(), rows, masks)
    else:
        on_device(logits, rows, masks)


def on_device(logits: torch.Tensor, rows: Sequence[int], masks: Sequence[np.ndarray]) -> None:
    """`keep_only` in a handful of operations, on any device; the masks travel packed."""
    bits = torch.from_numpy(np.stack(masks)).to(logits.device, non_blocking=True)
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = ((bits[:, :, None] >> places) & 1).eq(0).view(len(masks), -1)[:, : logits.shape[1]]
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, -torch.inf)
        return
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)


def _on_cpu(logits: np.ndarray, rows: Sequence[int], masks: Sequence[np.ndarray]) -> None:
    """Row by row, on one thread: what is written is in its cache for what reads it next."""
    for row, mask in zip(rows, masks, strict=True):
        forbidden = np.unpackbits(np.invert(mask).view(np.uint8), count=logits.shape[1], bitorder="little")
        np.copyto(logits[row], np.float32(-np.inf), where=forbidden.view(bool))
