"""Step time of decoding as a line in the number of streams, fitted to recent steps; nodes and the simulator use it."""

from __future__ import annotations

from kvferry.placement.types import STREAM_SHARE

WEIGHT = 0.02
"""Weight of the newest step in the moving averages; an adapter sees only whole streams, so it gives each more."""


class StepTimeFit:
    """Step time with a lone stream (`alone_s`), and what each further stream adds (`stream_s`), both in seconds.

    Least squares over recent steps, weighted by the number of further streams, since steps with many say most about one
    more. Before the first such step, each stream adds the share that placement assumes. alone_s: initially as measured
    at start; 0: unknown."""

    def __init__(self, alone_s: float, weight: float = WEIGHT) -> None:
        self.alone_s = alone_s
        self._weight = weight
        self._added, self._others = STREAM_SHARE * alone_s, 1.0

    @property
    def stream_s(self) -> float:
        """Return the time that each further stream adds, in seconds."""
        return max(0.0, self._added / self._others)

    def observe(self, streams: int, token_s: float, *, pure: bool) -> None:
        """Learn from a step with `streams` streams that took `token_s` per token of each.

        pure: the step computed no prompt. A prompt's delay of a lone stream says nothing about further streams."""
        if streams > 1:
            others = streams - 1
            self._added += self._weight * ((token_s - self.alone_s) * others - self._added)
            self._others += self._weight * (others * others - self._others)
        elif pure:
            self.alone_s += self._weight * (token_s - self.alone_s)
