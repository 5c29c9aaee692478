"""Reuse account of a prompt: cached tokens, computed tokens, and reasons for missed predictions."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.labels import FOUND_MISSING
from kvferry.protocol.wire import message

Missed = tuple[tuple[str, int], ...]
"""(reason, tokens) of what was predicted to be in a cache and was not, from left to right."""


@message(3)
@dataclass(frozen=True, slots=True)
class Reuse:
    """Origin of a prompt's tokens: prompt_len = reused_prefill + reused_decode + fetched + computed.

    `missed` are those of the computed ones that follow the reused ones and were predicted (Job.predicted), by what the
    node that looked for them knows of them."""

    prompt_len: int
    reused_prefill: int = 0
    reused_decode: int = 0
    fetched: int = 0
    computed: int = 0
    missed: Missed = ()

    @property
    def cached_len(self) -> int:
        return self.reused_prefill + self.reused_decode + self.fetched

    @property
    def balanced(self) -> bool:
        """Return whether it adds up, without a negative part."""
        parts = (self.reused_prefill, self.reused_decode, self.fetched, self.computed)
        missed = [tokens for _, tokens in self.missed]
        known = all(reason in FOUND_MISSING for reason, _ in self.missed)
        return min(*parts, *missed) >= 0 and sum(parts) == self.prompt_len and sum(missed) <= self.computed and known
