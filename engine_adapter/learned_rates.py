"""Moving averages of an engine's prefill, decode and transfer rates, learned from its answers."""

from __future__ import annotations

from dataclasses import replace

from kvferry.protocol.lease import Rates
from kvferry.worker.step_time_fit import StepTimeFit

WEIGHT = 0.1
"""Weight of a new observation in the moving averages."""
MIN_TOKENS = 64
"""Prompts that compute fewer tokens say nothing about the speed of prefill."""


class LearnedRates:
    """Moving averages of prompt tokens per second, of seconds per step and of bytes shipped per second."""

    def __init__(self, first: Rates | None = None) -> None:
        self.rates = first or Rates()
        self._streams: StepTimeFit | None = None

    def first_token(self, computed: int, seconds: float, *, alone: bool) -> None:
        """Learn from the seconds to the first token of a prompt with `computed` computed tokens.

        alone: nothing else ran or waited; otherwise the time depends mostly on the other requests."""
        if alone and computed >= MIN_TOKENS and seconds > 0:
            self._learn(computed / seconds, self.rates.step_s)

    def stream(self, tokens: int, seconds: float, *, streams: int) -> None:
        """Learn from a stream's tokens after the first. streams: number running when it ended, including itself."""
        if tokens <= 0 or seconds <= 0:
            return
        self._learn(self.rates.prefill_tokens_per_s, seconds / tokens)
        if self.rates.alone_s:
            self._streams = self._streams or StepTimeFit(self.rates.alone_s, WEIGHT)
            self._streams.observe(streams, seconds / tokens, pure=True)
            self.rates = replace(self.rates, alone_s=self._streams.alone_s, stream_s=self._streams.stream_s)

    def shipped(self, size: int, seconds: float) -> None:
        """Learn from a prompt whose blocks another engine fetched. size: in bytes; 0: unknown."""
        if size and seconds > 0:
            old = self.rates
            ship = old.ship_bytes_per_s + WEIGHT * (size / seconds - old.ship_bytes_per_s)
            self.rates = replace(old, ship_bytes_per_s=ship)

    def _learn(self, prefill: float, step_s: float) -> None:
        old = self.rates
        self.rates = replace(
            old,
            prefill_tokens_per_s=old.prefill_tokens_per_s + WEIGHT * (prefill - old.prefill_tokens_per_s),
            step_s=old.step_s + WEIGHT * (step_s - old.step_s),
        )
