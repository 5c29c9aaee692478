"""What the first rank has the others do: messages with tensors of the host in them, as bytes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.models.base import Halfway, Unwanted, Wanted, always
from engine.ranks.own import Own
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

    def run(self, part: Own, kv: torch.Tensor, hear: Hear) -> None:
        wanted: Wanted = (lambda: hear() == GO_ON) if self.asks else always
        token_ids, plan = part.inputs(self.token_ids, self.plan)
        hidden = part.decoder.forward(token_ids, kv, plan, wanted, self.halfway and part.brought(self.halfway))
        if self.draws:
            part.decoder.logits(hidden)


@dataclass(frozen=True, slots=True)
class Logits:
    """`Decoder.logits`."""

    hidden: torch.Tensor

    def run(self, part: Own, kv: torch.Tensor, hear: Hear) -> None:
        part.decoder.logits(self.hidden.to(part.decoder.device))


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """`Decoder.copy_block`."""

    source: int
    target: int

    def run(self, part: Own, kv: torch.Tensor, hear: Hear) -> None:
        part.decoder.copy_block(kv, self.source, self.target)


Call = Forward | Logits | CopyBlock


def packed(call: Call) -> bytes:
    out = io.BytesIO()
    _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(call)
    return out.getvalue()


@torch.inference_mode()
def follow(part: Own, kv: torch.Tensor, hear: Hear) -> None:
    """Do what the first rank says, to the pool `kv`: all of it where it is shared, or this rank's own. Ends by what
    `hear` raises."""
    kv = part.of_pool(kv)
    while True:
        call: Call = pickle.loads(hear())
        try:
            call.run(part, kv, hear)
        except Unwanted:
            continue


class _Pickler(pickle.Pickler):
    def reducer_override(self, each: object) -> Any:
        if not isinstance(each, torch.Tensor):
            return NotImplemented
        return _tensor, (
            each.cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy(),
            each.dtype,
            tuple(each.shape),
        )


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)
