"""Budget of prompt tokens in a step beside running streams, from measured step times and a target time per step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from kvferry.engine.request import Request
from kvferry.engine.step_cost import StepCost

MIN_TOKENS = 16
"""Fewest prompt tokens beside streams: with fewer a step is hardly shorter."""
MAX_SLOWDOWN = 2.0
"""Factor by which a step with prompts may exceed the time of a stream alone, if that is more than its target."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a step (tokens, sequences); see WorkerSettings.

    beside_s: target seconds of a step with streams and prompts. whole: a prompt is computed in one piece, as encoders
    need; then the last one of a step may exceed the budget."""

    max_num_batched_tokens: int
    max_prefill_tokens_while_decoding: int
    max_num_seqs: int
    whole: bool = False
    beside_s: float = inf


class Budget:
    """Prompt token budget of one engine's steps.

    Beside streams it is the number of tokens that keeps a step within its target time, as measured so far, and at most
    the limit. If more requests wait for their first tokens than streams run, a step may take longer by that ratio:
    streams lose no more than the waiting requests gain. Prompts of newcomers may use all tokens that streams leave,
    because the streams' tenants had more than their share."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._cost = StepCost()

    def tokens(self, decodes: int, here: Iterable[Request]) -> int:
        """Return the prompt tokens that a step may compute beside `decodes` streams.

        here: running and waiting requests."""
        left = self._limits.max_num_batched_tokens - decodes
        if not decodes:
            return left
        prompts = [r for r in here if r.grant is None and not r.output_len]
        hurried = sum(r.uncomputed for r in prompts if r.job.newcomer)
        seats = self._limits.max_num_seqs - decodes
        return min(left, max(self._beside(decodes, min(len(prompts), seats)), hurried))

    def stepped(self, rows: int, seconds: float) -> None:
        """Note that a step of `rows` tokens, of streams and prompts, took `seconds`."""
        self._cost.observe(rows, seconds)

    def _beside(self, decodes: int, prompts: int) -> int:
        """Return the budget beside streams. prompts: the number of prompts that have or find a seat.

        The minimum is doubled until steps of several lengths were measured, which the minimum alone never gives."""
        limit = self._limits.max_prefill_tokens_while_decoding
        if not self._cost.known:
            return limit
        first, further = self._cost.line()
        alone_s = first + further * (decodes - 1)
        longest_s = max(self._limits.beside_s * max(1.0, prompts / decodes), MAX_SLOWDOWN * alone_s)
        tokens = round(min(limit, max(MIN_TOKENS, (longest_s - alone_s) / further)))
        return tokens if tokens > MIN_TOKENS or self._cost.is_measured else min(limit, 2 * MIN_TOKENS)
