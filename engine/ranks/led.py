"""The decoder whose parts the ranks have, to the engine of the first one: a model like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from engine.apart import DeviceLost
from engine.models.base import Halfway, Model, Unwanted, Wanted, always
from engine.models.decoder import Decoder
from engine.ranks.calls import GO_ON, STOP, Forward, Logits, packed
from engine.ranks.group import Group
from kernels.plan import BatchPlan
from kernels.step import NextLogits
from protocol.errors import reason


def own_heads(kv: torch.Tensor, decoder: Decoder, rank: int) -> torch.Tensor:
    """A rank's part of the pool `kv` [block, layer, plane, kv_head, slot, dim]: of each block its heads' bytes; all of
    it where the heads share what is cached."""
    config = decoder.config
    return kv if config.latent is not None else kv.narrow(3, rank * config.num_kv_heads, config.num_kv_heads)


class Led(Model):
    """A `Model`. Whatever it computes, it tells the other ranks before, and returns once their K/V is in the pool, too,
    which all of them share. tell: brings them a message, in order. Raises DeviceLost for whatever goes wrong on the
    way, and ever after: the ranks compute no longer the same."""

    resumable = True

    def __init__(self, decoder: Decoder, group: Group, tell: Callable[[bytes], None]) -> None:
        self.info, self.dtype, self.device, self.ops = decoder.info, decoder.dtype, decoder.device, decoder.ops
        self.ranks = group.ranks
        self._decoder, self._tell, self._lost = decoder, tell, ""

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        wanted: Wanted = always,
        halfway: Halfway | None = None,
    ) -> torch.Tensor:
        with self._together():
            asks = wanted is not always
            self._tell(packed(Forward(token_ids, plan, halfway, asks, draws=False)))
            kv = own_heads(kv, self._decoder, 0)
            return self._decoder.forward(token_ids, kv, plan, self._agreed(wanted) if asks else wanted, halfway)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with self._together():
            self._tell(packed(Logits(hidden)))
            return self._decoder.logits(hidden)

    def next_logits(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> NextLogits:
        with self._together():
            self._tell(packed(Forward(token_ids, plan, None, asks=False, draws=True)))
            hidden = self._decoder.forward(token_ids, own_heads(kv, self._decoder, 0), plan)
            return NextLogits(self._decoder.logits(hidden))

    def _agreed(self, wanted: Wanted) -> Wanted:
        """All stop before the same layer."""

        def asked() -> bool:
            found = wanted()
            self._tell(GO_ON if found else STOP)
            return found

        return asked

    @contextmanager
    def _together(self) -> Iterator[None]:
        if self._lost:
            raise DeviceLost(self._lost)
        try:
            yield
        except Unwanted:
            raise
        except Exception as error:
            self._lost = f"the {self.ranks} ranks do not compute together any more: {reason(error)}"
            raise DeviceLost(self._lost) from error
