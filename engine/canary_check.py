"""One canary check: recomputes a received prompt in blocks of its own, and compares K/V, state and the next logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvferry.engine import output_tolerance
from kvferry.engine.batch_planner import Part
from kvferry.engine.canary_state import CheckedState
from kvferry.engine.logits_processors import edited
from kvferry.engine.models.base import KeepGoing, Model
from kvferry.engine.request import Key, Request
from kvferry.kernels.pool_views import layer_views
from kvferry.kernels.sampling import is_greedy
from kvferry.protocol.process_names import NodeName


class Computes(Protocol):
    """Runner interface of a canary check: see engine.runner.Runner."""

    kv: torch.Tensor
    model: Model

    def copy_block(self, source: int, target: int) -> None:
        """Copy the K/V of block `source` to `target`."""

    def compute_logits(
        self,
        token_ids: Sequence[int],
        part: Part,
        rows: int,
        keep_going: KeepGoing,
        states: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Return float32 logits [rows, vocab] after the last tokens. states: see `Runner.compute_logits`."""


@dataclass(slots=True, eq=False)
class CanaryCheck:
    """Check of a transfer from `sender`, which brought the K/V of all token_ids but the last.

    landed     the received blocks, from the sequence's `first` one on
    own        blocks in which the sequence is recomputed, and one spare
    greedy     the last token was the likeliest when drawn, with nothing else considered
    began      time of the transfer's arrival
    computed   tokens whose K/V is in `own`; `compared` of its blocks were compared
    chain      blocks that the check holds, parents first: `landed`, those before, and those that replaced some
    state      recurrent state, of a model with recurrent layers
    distance   largest difference so far; see engine.output_tolerance
    """

    key: Key
    router_id: str
    sender: NodeName
    token_ids: list[int]
    first: int
    landed: list[int]
    greedy: bool
    began: float
    block_size: int
    own: list[int]
    chain: list[int]
    state: CheckedState | None = None
    computed: int = 0
    compared: int = 0
    distance: float = 0.0

    @property
    def known(self) -> int:
        """Return the number of tokens that the check recomputes: all but the last."""
        return len(self.token_ids) - 1

    def advance(self, runner: Computes, max_tokens: int, keep_going: KeepGoing) -> bool:
        """Compute at most `max_tokens` further tokens, or finally the one whose logits are compared; return True then.

        Raises ForwardAbandoned."""
        if self.computed < self.known:
            self._compute(runner, min(max_tokens, self.known - self.computed), keep_going)
            return False
        parts = (Part(chain, self.known, 1) for chain in (self.own, self._mixed(runner)))
        states = (None, None) if self.state is None else self.state.ends
        own, theirs = (
            runner.compute_logits(self.token_ids, part, 1, keep_going, rows)[0]
            for part, rows in zip(parts, states, strict=True)
        )
        self._record(output_tolerance.of_logits(own, theirs))
        return True

    def _compute(self, runner: Computes, count: int, keep_going: KeepGoing) -> None:
        ends = self.computed + count == self.known
        part, states = Part(self.own, self.computed, count), None if self.state is None else self.state.step
        logits = runner.compute_logits(self.token_ids, part, int(ends), keep_going, states)
        self.computed += count
        if self.state is not None:
            self.state.advance()
        full, beyond = divmod(self.computed, self.block_size)
        self._compare(runner, full, self.block_size)
        if ends and beyond:
            self._compare(runner, full + 1, beyond)
        if ends and self.state is not None:
            self._record(self.state.compare())
        if ends and self.greedy:
            self._record(output_tolerance.of_token(logits[0], self.token_ids[-1]))

    def _compare(self, runner: Computes, upto: int, slots: int) -> None:
        """Compare the next blocks, those before index `upto`: the first `slots` slots of each."""
        begin = max(self.compared, self.first)
        if begin < upto:
            self.compared = upto
            landed = self.landed[begin - self.first : upto - self.first]
            layers = layer_views(runner.kv, runner.model.info.layers, self.block_size)
            self._record(output_tolerance.of_blocks(layers, self.own[begin:upto], landed, slots))

    def _mixed(self, runner: Computes) -> list[int]:
        """Return the sequence's chain with the received blocks in it.

        The last token's K/V goes into the spare block: requests read the received blocks and write after them."""
        full, beyond = divmod(self.known, self.block_size)
        spare = self.own[-1]
        if beyond:
            runner.copy_block(self.landed[-1], spare)
        return [*self.own[: self.first], *self.landed[: full - self.first], spare]

    def _record(self, distance: float) -> None:
        self.distance = max(self.distance, distance)


def draws_likeliest(request: Request) -> bool:
    """Return whether the token after the received ones was drawn from the logits alone, as the likeliest."""
    job = request.job
    if len(request.token_ids) != len(job.token_ids) + 1 or job.grammar is not None or not is_greedy(job.params):
        return False
    return not edited(job.params)
