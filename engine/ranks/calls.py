"""Messages from rank 0 to the other ranks (forward, logits, copy, adapters) as bytes, and the loop that runs them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.engine.models.base import ForwardAbandoned, KeepGoing, SuspendedPass
from kvferry.engine.ranks.adapters import Numbers, joined_layers
from kvferry.engine.ranks.rank_worker import RankWorker
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_step import always
from kvferry.kernels.lora import Adapter, Layers

Receive = Callable[[], bytes | bytearray]
"""Callable that returns the next message of rank 0; it raises OSError or EOFError once rank 0 is gone."""
CONTINUE, STOP = b"1", b"0"
"""Answers that rank 0 sends between two layers to ranks that ask whether to continue."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Message: run `Decoder.forward`.

    polls: ranks ask between layers whether to continue; draws: logits of all tokens are computed as well.
    """

    token_ids: torch.Tensor
    plan: BatchPlan
    halfway: SuspendedPass | None
    polls: bool
    draws: bool

    def run(self, part: RankWorker, kv: torch.Tensor, receive: Receive) -> None:
        """Run the forward pass on this rank."""
        keep_going: KeepGoing = (lambda: receive() == CONTINUE) if self.polls else always
        token_ids, plan = part.inputs(self.token_ids, self.plan)
        hidden = part.decoder.forward(token_ids, kv, plan, keep_going, self.halfway and part.brought(self.halfway))
        if self.draws:
            part.decoder.logits(hidden)


@dataclass(frozen=True, slots=True)
class Logits:
    """Message: run `Decoder.logits`."""

    hidden: torch.Tensor

    def run(self, part: RankWorker, kv: torch.Tensor, receive: Receive) -> None:
        """Compute this rank's logits."""
        part.decoder.logits(self.hidden.to(part.decoder.device))


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Message: run `Decoder.copy_block`."""

    source: int
    target: int

    def run(self, part: RankWorker, kv: torch.Tensor, receive: Receive) -> None:
        """Copy the block in this rank's pool."""
        part.decoder.copy_block(kv, self.source, self.target)


@dataclass(frozen=True, slots=True)
class TakeAdapter:
    """Message: store an adapter under a number that later calls name. others: the layers of each rank but the first."""

    number: int
    id: str
    others: tuple[Layers, ...]

    def run(self, part: RankWorker, kv: torch.Tensor, receive: Receive) -> None:
        """Store this rank's part of the adapter."""
        own = joined_layers(self.others[part.group.rank - 1], part.group, part.decoder.device)
        part.adapters[self.number] = Adapter(self.id, own)


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Message: free this adapter."""

    number: int

    def run(self, part: RankWorker, kv: torch.Tensor, receive: Receive) -> None:
        """Free the adapter."""
        part.adapters.pop(self.number).release()


Call = Forward | Logits | CopyBlock | TakeAdapter | DropAdapter


def packed(call: Call, numbers: Numbers | None = None) -> bytes:
    """Encode a call as bytes.

    numbers: numbers of the adapters that the call names."""
    out = io.BytesIO()
    _Pickler(out, numbers).dump(call)
    return out.getvalue()


@torch.inference_mode()
def follow(part: RankWorker, kv: torch.Tensor, receive: Receive) -> None:
    """Execute the calls of rank 0 on the pool `kv` until `receive` raises.

    `kv` is the whole pool where the ranks share it, else this rank's own."""
    kv = part.of_pool(kv)
    while True:
        call: Call = _Unpickler(io.BytesIO(receive()), part.adapters).load()
        try:
            call.run(part, kv, receive)
        except ForwardAbandoned:
            continue


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, numbers: Numbers | None) -> None:
        super().__init__(out, pickle.HIGHEST_PROTOCOL)
        self._numbers = numbers

    def persistent_id(self, each: object) -> int | None:
        return self._numbers[each] if isinstance(each, Adapter) and self._numbers is not None else None

    def reducer_override(self, each: object) -> Any:
        if not isinstance(each, torch.Tensor):
            return NotImplemented
        return _tensor, (
            each.cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy(),
            each.dtype,
            tuple(each.shape),
        )


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: io.BytesIO, adapters: Mapping[int, Adapter]) -> None:
        super().__init__(message)
        self._adapters = adapters

    def persistent_load(self, number: int) -> Adapter:
        return self._adapters[number]


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)
