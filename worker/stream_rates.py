"""Learned step times of a decode node by the number of its streams."""

from __future__ import annotations

from kvferry.placement.types import STREAM_SHARE

WEIGHT = 0.02
"""Weight of the newest step in the moving averages; an adapter sees whole streams and gives each one more."""


class StreamRates:
    """Seconds between the tokens of a stream that runs alone, and what each further stream adds to them.

    Least squares over recent steps, weighted by the streams beside the first one: steps with many streams say most
    about the next one. Until then each stream adds the share that placement assumes. alone_s: measured at start; 0:
    unknown."""

    def __init__(self, alone_s: float, weight: float = WEIGHT) -> None:
        self.alone_s = alone_s
        self._weight = weight
        self._added, self._others = STREAM_SHARE * alone_s, 1.0

    @property
    def stream_s(self) -> float:
        """Return the seconds that each further stream adds."""
        return max(0.0, self._added / self._others)

    def saw(self, streams: int, token_s: float, *, pure: bool) -> None:
        """Learn from a step in which each of `streams` took `token_s` for a token.

        pure: it computed no prompt; how long a prompt delays a lone stream says nothing about other streams."""
        if streams > 1:
            others = streams - 1
            self._added += self._weight * ((token_s - self.alone_s) * others - self._added)
            self._others += self._weight * (others * others - self._others)
        elif pure:
            self.alone_s += self._weight * (token_s - self.alone_s)
