"""What the first rank has the others do: messages with tensors of the host in them, as bytes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.models.base import Halfway, Unwanted, Wanted, always
from engine.models.decoder import Decoder
from kernels.plan import BatchPlan

Hear = Callable[[], bytes]
"""The first rank's next message. Raises OSError or EOFError once it is gone."""
GO_ON, STOP = b"1", b"0"
"""Said between two layers to those who ask."""


@dataclass(frozen=True, slots=True)
class Forward:
    """`Decoder.forward`; asks: between layers whether it is still wanted; draws: with the logits of all tokens."""

    token_ids: torch.Tensor
    plan: BatchPlan
    halfway: Halfway | None
    asks: bool
    draws: bool

    def run(self, decoder: Decoder, kv: torch.Tensor, hear: Hear) -> None:
        wanted: Wanted = (lambda: hear() == GO_ON) if self.asks else always
        plan = self.plan
        if decoder.config.latent is not None:  # the first rank writes for all
            plan = replace(plan, slots=torch.full_like(plan.slots, -1))
        hidden = decoder.forward(self.token_ids, kv, plan, wanted, self.halfway)
        if self.draws:
            decoder.logits(hidden)


@dataclass(frozen=True, slots=True)
class Logits:
    """`Decoder.logits`."""

    hidden: torch.Tensor

    def run(self, decoder: Decoder, kv: torch.Tensor, hear: Hear) -> None:
        decoder.logits(self.hidden)


def packed(call: Forward | Logits) -> bytes:
    out = io.BytesIO()
    _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(call)
    return out.getvalue()


@torch.inference_mode()
def follow(decoder: Decoder, kv: torch.Tensor, hear: Hear) -> None:
    """Do what the first rank says, to this rank's part `kv` of the pool. Ends by what `hear` raises."""
    while True:
        call: Forward | Logits = pickle.loads(hear())
        try:
            call.run(decoder, kv, hear)
        except Unwanted:
            continue


class _Pickler(pickle.Pickler):
    def reducer_override(self, each: object) -> Any:
        if not isinstance(each, torch.Tensor):
            return NotImplemented
        return _tensor, (
            each.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy(),
            each.dtype,
            tuple(each.shape),
        )


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)
