"""Reuse account of a prompt (`Reuse`): cached and computed tokens, and reasons for missed predictions."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.labels import FOUND_MISSING
from kvferry.protocol.wire import message

Missed = tuple[tuple[str, int], ...]
"""(reason, tokens) of tokens that were predicted in a cache and not found, from left to right."""


@message(3)
@dataclass(frozen=True, slots=True)
class Reuse:
    """Reuse account of a prompt: prompt_len = reused_prefill + reused_decode + fetched + computed.

    missed: computed tokens right after the reused ones that were predicted to be cached (Job.predicted), by the reason
    that the node knows. written: tokens in computed blocks that later prompts may reuse."""

    prompt_len: int
    reused_prefill: int = 0
    reused_decode: int = 0
    fetched: int = 0
    computed: int = 0
    missed: Missed = ()
    written: int = 0

    @property
    def cached_len(self) -> int:
        """Return the tokens that were not computed."""
        return self.reused_prefill + self.reused_decode + self.fetched

    @property
    def balanced(self) -> bool:
        """Return whether the parts add up and none is negative."""
        parts = (self.reused_prefill, self.reused_decode, self.fetched, self.computed)
        if not self.missed:
            return min(parts) >= 0 and sum(parts) == self.prompt_len and 0 <= self.written <= self.computed
        missed = [tokens for _, tokens in self.missed]
        known = all(reason in FOUND_MISSING for reason, _ in self.missed)
        adds_up = sum(parts) == self.prompt_len and max(sum(missed), self.written) <= self.computed
        return min(*parts, *missed, self.written) >= 0 and adds_up and known
