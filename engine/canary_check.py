"""One canary check: recomputes a shipped prompt in blocks of its own and compares K and V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvferry.engine import output_tolerance
from kvferry.engine.batch_planner import Part
from kvferry.engine.logits_processors import edited
from kvferry.engine.models.base import Wanted
from kvferry.engine.request import Key, Request
from kvferry.kernels.sampling import is_greedy
from kvferry.protocol.process_names import NodeName


class Computes(Protocol):
    """Runner interface of a canary check: see engine.runner.Runner."""

    kv: torch.Tensor

    def copy_block(self, source: int, target: int) -> None: ...

    def look(self, token_ids: Sequence[int], part: Part, rows: int, wanted: Wanted) -> torch.Tensor: ...


@dataclass(slots=True, eq=False)
class CanaryCheck:
    """At a ship of `sender`, which brought the K/V of all token_ids but the last.

    landed     its blocks, from the sequence's `first` one on
    own        those in which the sequence is computed anew, and one to spare
    greedy     the last token was the likeliest where it was drawn, and nothing else was looked at
    began      when it landed
    computed   tokens of which the K/V is in `own`; `compared` of its blocks were compared
    distance   the largest found so far; see engine.output_tolerance
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
    computed: int = 0
    compared: int = 0
    distance: float = 0.0

    @property
    def known(self) -> int:
        return len(self.token_ids) - 1

    def go_on(self, runner: Computes, most: int, wanted: Wanted) -> bool:
        """Compute the next tokens, `most` at most, or behind all of them the one whose logits are compared at last:
        true then. Raises Unwanted."""
        if self.computed < self.known:
            self._compute(runner, min(most, self.known - self.computed), wanted)
            return False
        chains = (self.own, self._mixed(runner))
        own, theirs = (runner.look(self.token_ids, Part(chain, self.known, 1), 1, wanted)[0] for chain in chains)
        self._found(output_tolerance.of_logits(own, theirs))
        return True

    def _compute(self, runner: Computes, count: int, wanted: Wanted) -> None:
        ends = self.computed + count == self.known
        logits = runner.look(self.token_ids, Part(self.own, self.computed, count), int(ends), wanted)
        self.computed += count
        full, beyond = divmod(self.computed, self.block_size)
        self._compare(runner, full, self.block_size)
        if ends and beyond:
            self._compare(runner, full + 1, beyond)
        if ends and self.greedy:
            self._found(output_tolerance.of_token(logits[0], self.token_ids[-1]))

    def _compare(self, runner: Computes, upto: int, slots: int) -> None:
        """The sequence's blocks before that index which were not compared yet, of each its first slots."""
        begin = max(self.compared, self.first)
        if begin < upto:
            self.compared = upto
            landed = self.landed[begin - self.first : upto - self.first]
            self._found(output_tolerance.of_blocks(runner.kv, self.own[begin:upto], landed, slots))

    def _mixed(self, runner: Computes) -> list[int]:
        """Return the sequence's chain with the landed blocks in it.

        The last token's K/V goes into the block to spare: others read the landed ones, and write behind them."""
        full, beyond = divmod(self.known, self.block_size)
        spare = self.own[-1]
        if beyond:
            runner.copy_block(self.landed[-1], spare)
        return [*self.own[: self.first], *self.landed[: full - self.first], spare]

    def _found(self, distance: float) -> None:
        self.distance = max(self.distance, distance)


def draws_likeliest(request: Request) -> bool:
    """Return whether the token behind what landed was the likeliest, and the only one drawn where it was: nothing but
    the logits told which."""
    job = request.job
    if len(request.token_ids) != len(job.token_ids) + 1 or job.grammar is not None or not is_greedy(job.params):
        return False
    return not edited(job.params)
