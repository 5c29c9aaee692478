"""Token budget for prompts in one step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from kvferry.engine.request import Request
from kvferry.engine.step_cost import StepCost

LEAST = 16
"""Tokens of prompts beside streams: with fewer a step is hardly shorter."""
ALONE = 2.0
"""A step with prompts may take so many times what one of its streams alone takes, where that is more than its time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a step (tokens, sequences); see WorkerSettings.

    beside_s: seconds that one with streams and prompts should take; whole: a prompt is computed in one piece, as an
    encoder needs it; only the last of a step may then exceed the budget."""

    max_num_batched_tokens: int
    max_prefill_tokens_while_decoding: int
    max_num_seqs: int
    whole: bool = False
    beside_s: float = inf


class Budget:
    """Prompt token budget of one engine's steps.

    Beside streams it is as many tokens as keep a step within its time, as far as the steps so far tell, and no more
    than the limit. Where more requests wait for their first tokens than streams run, a step may take so many times
    longer: streams lose no more by it than the others win. Newcomers' prompts may take all that streams leave, for the
    streams' tenants had more than their own."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._cost = StepCost()

    def tokens(self, decodes: int, here: Iterable[Request]) -> int:
        """Return the prompt tokens that a step may compute beside so many streams.

        here: who runs or waits. here: who runs or waits."""
        left = self._limits.max_num_batched_tokens - decodes
        if not decodes:
            return left
        prompts = [r for r in here if r.grant is None and not r.output_len]
        hurried = sum(r.uncomputed for r in prompts if r.job.newcomer)
        seats = self._limits.max_num_seqs - decodes
        return min(left, max(self._beside(decodes, min(len(prompts), seats)), hurried))

    def stepped(self, rows: int, seconds: float) -> None:
        """A step of so many tokens, of streams and prompts, took so long."""
        self._cost.saw(rows, seconds)

    def _beside(self, decodes: int, prompts: int) -> int:
        """prompts: how many of them have a seat, or find one.

        The least of them is doubled until steps tell that it is right: with as few in every step they would never tell.
        """
        most = self._limits.max_prefill_tokens_while_decoding
        if not self._cost.known:
            return most
        first, further = self._cost.line()
        alone_s = first + further * (decodes - 1)
        longest_s = max(self._limits.beside_s * max(1.0, prompts / decodes), ALONE * alone_s)
        tokens = round(min(most, max(LEAST, (longest_s - alone_s) / further)))
        return tokens if tokens > LEAST or self._cost.told else min(most, 2 * LEAST)
