"""ShardedModel: the model that rank 0's engine calls; it announces each computation to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvferry.engine.fault_isolation import DeviceLost
from kvferry.engine.models.base import ForwardAbandoned, KeepGoing, Model, SuspendedPass
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.ranks.adapters import Numbers
from kvferry.engine.ranks.calls import CONTINUE, STOP, CopyBlock, DropAdapter, Forward, Logits, TakeAdapter, packed
from kvferry.engine.ranks.group import Group
from kvferry.engine.ranks.rank_worker import RankWorker
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_step import NextLogits, always
from kvferry.protocol.errors import reason


class ShardedModel(Model):
    """Sharded model on rank 0, implementing `Model`.

    Every computation is announced to the other ranks first. A result is returned once their K/V is in the shared pool,
    or in their own.

    Raises DeviceLost for any failure on the way, and on every later call: the ranks' states may differ by then.

    own: state of rank 0; send: sends a message to the other ranks, in order."""

    resumable = True
    fed_by_host = True

    def __init__(self, decoder: Decoder, group: Group, send: Callable[[bytes], None]) -> None:
        self.info, self.dtype, self.device, self.ops = decoder.info, decoder.dtype, decoder.device, decoder.ops
        self.ranks = group.ranks
        self.own, self._send, self._lost = RankWorker(decoder, group), send, ""
        self._numbers = Numbers(
            lambda number, adapter: send(packed(TakeAdapter(number, adapter.id, adapter.others))),
            lambda number: send(packed(DropAdapter(number))),
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        """Return the hidden states of all tokens: see `Model`."""
        with self._together():
            polls = keep_going is not always
            self._send_step(Forward(token_ids, plan, halfway, polls, draws=False))
            keep_going = self._synchronized(keep_going) if polls else keep_going
            return self._forward(token_ids, kv, plan, keep_going, halfway)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab]."""
        with self._together():
            self._send(packed(Logits(hidden)))
            return self.own.decoder.logits(hidden)

    def next_logits(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> NextLogits:
        """Compute a step of decodes and return its logits."""
        with self._together():
            self._send_step(Forward(token_ids, plan, None, polls=False, draws=True))
            return NextLogits(self.own.decoder.logits(self._forward(token_ids, kv, plan)))

    def copy_block(self, kv: torch.Tensor, source: int, target: int) -> None:
        """Copy the block in every rank's pool."""
        with self._together():
            if self.own.group.apart:
                self._send(packed(CopyBlock(source, target)))
            kv[target].copy_(kv[source])

    def _send_step(self, step: Forward) -> None:
        self._numbers.bring(step.plan)
        self._send(packed(step, self._numbers))

    def _forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        token_ids, plan = self.own.inputs(token_ids, plan)
        return self.own.decoder.forward(token_ids, self.own.of_pool(kv), plan, keep_going, halfway)

    def _synchronized(self, keep_going: KeepGoing) -> KeepGoing:
        """Return a `keep_going` whose answers go to the other ranks, too, so that all stop before the same layer."""

        def polled() -> bool:
            answer = keep_going()
            self._send(CONTINUE if answer else STOP)
            return answer

        return polled

    @contextmanager
    def _together(self) -> Iterator[None]:
        if self._lost:
            raise DeviceLost(self._lost)
        try:
            yield
        except ForwardAbandoned:
            raise
        except Exception as error:
            self._lost = f"the {self.ranks} ranks can no longer compute together: {reason(error)}"
            raise DeviceLost(self._lost) from error
