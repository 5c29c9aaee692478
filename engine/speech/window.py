"""Window of audio in the speech engine, and the decodings (Attempt) and readings that are run over it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True, eq=False)
class Window:
    """Window whose encoder output lies in blocks of the pool, from `encode` to `release`.

    text, audio: blocks for the decoder's tokens and for the encoder's output; empty until it is admitted."""

    mel: torch.Tensor | None
    encoded: Future[None] = field(default_factory=Future)
    text: tuple[int, ...] = ()
    audio: tuple[int, ...] = ()
    released: bool = False


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens that the decoder wrote for a window, without the end token, and their probabilities.

    avg_logprob: mean log-probability of a token, the end included. no_speech_prob: probability that nobody speaks."""

    tokens: tuple[int, ...]
    avg_logprob: float
    no_speech_prob: float


@dataclass(slots=True, eq=False)
class Attempt:
    """One decoding of a window.

    prompt: tokens before the first drawn one. start: place of the start token in the prompt, whose logits give the
    probability of no speech. temperature: 0 is greedy. seed: of the noise, a function of seed and position."""

    window: Window
    prompt: Sequence[int]
    start: int
    temperature: float
    seed: int
    limit: int
    done: Future[Decoded] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logprobs: float = 0.0
    no_speech_prob: float = 0.0

    @property
    def result(self) -> Decoded:
        """Return the tokens written so far, with their probabilities."""
        return Decoded(tuple(self.tokens), self.logprobs / (len(self.tokens) + 1), self.no_speech_prob)


@dataclass(slots=True, eq=False)
class Reading:
    """Pass over known tokens of a window. heads: whether to return the alignment heads' scores, else the last logits.

    done: float32 [head, token, position] or [vocabulary]."""

    window: Window
    tokens: Sequence[int]
    heads: bool
    done: Future[Any] = field(default_factory=Future)


def compression_ratio(text: str) -> float:
    """Return the bytes of a text for each byte that zlib makes of it: a high ratio means repetition."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
