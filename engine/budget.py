"""How many tokens of prompts a step may compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from engine.request import Request

LEAST = 16
"""Tokens of prompts beside streams: with fewer a step is hardly shorter."""
ALONE = 2.0
"""A step with prompts may take so many times what one of streams alone takes, where that is more than its time."""
LEARN = 0.3
"""Weight of the newest step."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a step (tokens, sequences); see WorkerSettings. beside_s: seconds that one with streams and prompts
    should take; whole: a prompt is computed in one piece, as an encoder needs it; only the last of a step may then
    exceed the budget."""

    max_num_batched_tokens: int
    max_prefill_tokens_while_decoding: int
    max_num_seqs: int
    whole: bool = False
    beside_s: float = inf


class Budget:
    """Of one engine. Beside streams it is as many tokens as keep a step within its time, as far as the steps so far
    tell, and no more than the limit. Newcomers' prompts may take all that streams leave, for the streams' tenants had
    more than their own."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._beside = limits.max_prefill_tokens_while_decoding
        self._alone_s = 0.0

    def tokens(self, decodes: int, here: Iterable[Request]) -> int:
        """For prompts, beside so many streams. here: who runs or waits."""
        left = self._limits.max_num_batched_tokens - decodes
        if not decodes:
            return left
        hurried = sum(r.uncomputed for r in here if r.job.newcomer and r.grant is None and not r.output_len)
        return min(left, max(self._beside, hurried))

    def stepped(self, decodes: int, prompt: int, seconds: float) -> None:
        """A step of so many streams, and tokens of prompts beside them, took so long."""
        if not decodes:
            return
        if not prompt:
            self._alone_s += (LEARN if self._alone_s else 1.0) * (seconds - self._alone_s)
        elif 2 * prompt >= self._beside:
            room = max(self._limits.beside_s, ALONE * self._alone_s) - self._alone_s
            fits = prompt * room / max(1e-6, seconds - self._alone_s)
            most = self._limits.max_prefill_tokens_while_decoding
            self._beside = min(most, max(LEAST, round(self._beside + LEARN * (min(fits, 2 * most) - self._beside))))
