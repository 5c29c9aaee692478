"""Interface of a decoder step that a backend replays as one call (Step), and its results (NextLogits, Halted)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvferry.kernels.batch_plan import BatchPlan


@dataclass(frozen=True, slots=True)
class NextLogits:
    """Logits after a step, and perhaps the best token of each row.

    values: float32 [T, vocab], may be overwritten. best: index of each row's maximum, the first of equals (NO_TOKEN for
    a row with a NaN or whose maximum is not finite); None if it was not computed."""

    values: torch.Tensor
    best: Sequence[int] | None = None


OneByOne = Callable[[torch.Tensor, torch.Tensor, BatchPlan], torch.Tensor]
"""Runs a decoder's layers through the backend's operations: (token ids, kv, plan), as in `Step`, to hidden states."""


class Halted(Exception):
    """A step was abandoned between two layers.

    layer: the next one. residual: [T, hidden], to which it adds."""

    def __init__(self, layer: int, residual: torch.Tensor) -> None:
        super().__init__(f"aborted before layer {layer}")
        self.layer, self.residual = layer, residual


def always() -> bool:
    """Return True: the pass is never abandoned."""
    return True


class Step(Protocol):
    """Decoder recorded once. Not thread-safe."""

    def takes(self, plan: BatchPlan, kv: torch.Tensor) -> bool:
        """Return whether it runs batches like this one over the pool `kv` [block, layer, plane, kv_head, slot, dim]."""

    def __call__(
        self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan, keep_going: Callable[[], bool] = always
    ) -> torch.Tensor:
        """Return hidden states [T, hidden] after the final norm, valid until the next call; write K/V.

        Equal to the layers run one by one through the backend's operations. Raises Halted if `keep_going` returns False
        between two layers of a batch of prompts alone."""

    def logits(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> NextLogits:
        """Return the head's logits instead."""
