"""Sharded model as rank 0's engine sees it: a model like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvferry.engine.fault_isolation import DeviceLost
from kvferry.engine.models.base import ForwardAbandoned, Model, SuspendedPass, Wanted
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.ranks.adapters import Numbers
from kvferry.engine.ranks.calls import GO_ON, STOP, CopyBlock, DropAdapter, Forward, Logits, TakeAdapter, packed
from kvferry.engine.ranks.group import Group
from kvferry.engine.ranks.rank_worker import RankWorker
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_step import NextLogits, always
from kvferry.protocol.errors import reason


class ShardedModel(Model):
    """A `Model`. Whatever it computes, it tells the other ranks before, and what it returns is there once their K/V is
    in the pool, too: in the one that all of them share, or in theirs. own: of this rank; tell: brings them a message,
    in order. Raises DeviceLost for whatever goes wrong on the way, and ever after: the ranks compute no longer the
    same."""

    resumable = True
    fed_by_host = True

    def __init__(self, decoder: Decoder, group: Group, tell: Callable[[bytes], None]) -> None:
        self.info, self.dtype, self.device, self.ops = decoder.info, decoder.dtype, decoder.device, decoder.ops
        self.ranks = group.ranks
        self.own, self._tell, self._lost = RankWorker(decoder, group), tell, ""
        self._numbers = Numbers(
            lambda number, adapter: tell(packed(TakeAdapter(number, adapter.id, adapter.others))),
            lambda number: tell(packed(DropAdapter(number))),
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        wanted: Wanted = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        with self._together():
            asks = wanted is not always
            self._tell_step(Forward(token_ids, plan, halfway, asks, draws=False))
            wanted = self._agreed(wanted) if asks else wanted
            return self._forward(token_ids, kv, plan, wanted, halfway)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with self._together():
            self._tell(packed(Logits(hidden)))
            return self.own.decoder.logits(hidden)

    def next_logits(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> NextLogits:
        with self._together():
            self._tell_step(Forward(token_ids, plan, None, asks=False, draws=True))
            return NextLogits(self.own.decoder.logits(self._forward(token_ids, kv, plan)))

    def copy_block(self, kv: torch.Tensor, source: int, target: int) -> None:
        with self._together():
            if self.own.group.apart:
                self._tell(packed(CopyBlock(source, target)))
            kv[target].copy_(kv[source])

    def _tell_step(self, step: Forward) -> None:
        self._numbers.bring(step.plan)
        self._tell(packed(step, self._numbers))

    def _forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        wanted: Wanted = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        token_ids, plan = self.own.inputs(token_ids, plan)
        return self.own.decoder.forward(token_ids, self.own.of_pool(kv), plan, wanted, halfway)

    def _agreed(self, wanted: Wanted) -> Wanted:
        """Return all stop before the same layer."""

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
        except ForwardAbandoned:
            raise
        except Exception as error:
            self._lost = f"the {self.ranks} ranks do not compute together any more: {reason(error)}"
            raise DeviceLost(self._lost) from error
