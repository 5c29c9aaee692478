"""Ranks encode nodes for a request's images and audio by the expected seconds until their embeddings arrive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvferry.placement.types import NodeKey

USUAL_TOKENS_PER_S = 30.0
"""Rate assumed for an encoder that has not encoded yet, in tokens of media per second: that of a slow CPU."""
PROMPT_DELAY = 2.0
"""Factor on the encoding time of a node that also computes prompts, which wait meanwhile."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """One node that could encode the media.

    queued, missing      tokens of media queued there, and the request's tokens that it does not hold
    tokens_per_s         learned rate; 0: unknown
    bytes, bytes_per_s   size of the rows, and the rate at which they are sent; 0 bytes: they stay on the node
    """

    key: NodeKey
    queued: int
    missing: int
    tokens_per_s: float
    bytes: int = 0
    bytes_per_s: float = 1.0

    @property
    def encode_s(self) -> float:
        """Return the seconds until the rows are made."""
        return (self.queued * (self.missing > 0) + self.missing) / (self.tokens_per_s or USUAL_TOKENS_PER_S)

    @property
    def seconds(self) -> float:
        """Return the seconds until the node that computes the prompt has the rows."""
        return self.encode_s + self.bytes / max(1.0, self.bytes_per_s)


def ranked(encoders: Sequence[Encoder], own: Encoder) -> list[Encoder]:
    """Return the encode nodes that are faster than the prompt's node, the fastest first.

    own: the node that computes the prompt. A node that has not encoded yet counts as fast as that one. Equal
    nodes stay in the order given."""
    if not own.missing:
        return []
    known = [replace(each, tokens_per_s=each.tokens_per_s or own.tokens_per_s) for each in encoders]
    limit_s = PROMPT_DELAY * own.encode_s if own.tokens_per_s else float("inf")
    return sorted((each for each in known if each.seconds < limit_s), key=lambda each: each.seconds)


def expected_s(tokens: int, rates: Iterable[float]) -> float:
    """Return the seconds that tokens of media take, given the learned rates of possible nodes."""
    return tokens / (max(rates, default=0.0) or USUAL_TOKENS_PER_S)
