"""Logits processors for allowed_token_ids and bad_words; tests of whether parameters change logits.

Penalties and logit_bias follow (kernels/logit_adjustments.py), then grammar masks (`Ops.draw`).

They are built once per request and depend on its tokens alone, so another node gets the same result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvferry.protocol.sampling import SamplingParams


class LogitsProcessor(Protocol):
    """Stage that changes logits float32 [vocab] of the request in place."""

    def apply(self, logits: torch.Tensor) -> None:
        """Change the logits in place."""


def edits_for(
    params: SamplingParams, token_ids: Sequence[int], prompt_len: int, device: torch.device
) -> tuple[LogitsProcessor, ...]:
    """Return the logits processors that the parameters ask for.

    token_ids: prompt and output so far, which only grows."""
    edits: list[LogitsProcessor] = []
    if params.allowed_token_ids is not None:
        edits.append(_Allowed(params.allowed_token_ids, device))
    if params.bad_words:
        edits.append(_BadWords(params.bad_words, token_ids, prompt_len, device))
    return tuple(edits)


def edited(params: SamplingParams) -> bool:
    """Return whether anything changes the logits of such a request."""
    banned = params.allowed_token_ids is not None or params.bad_words
    return bool(banned or params.min_tokens or params.logit_bias or reads_history(params))


def reads_history(params: SamplingParams) -> bool:
    """Return whether a change of the logits depends on which tokens were drawn, not only on their number."""
    penalties = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    return bool(params.bad_words or penalties)


class _Allowed:
    """Stage for allowed_token_ids: nothing else can be drawn."""

    def __init__(self, token_ids: Sequence[int], device: torch.device) -> None:
        self._ids = torch.tensor(token_ids, dtype=torch.int64, device=device)

    def apply(self, logits: torch.Tensor) -> None:
        kept = logits.index_select(0, self._ids)
        logits.fill_(-torch.inf)
        logits.index_copy_(0, self._ids, kept)


class _BadWords:
    """Stage for bad_words: bans each sequence's last token if the output ends with the tokens before it.

    A step checks only the sequences whose next-to-last token was drawn last."""

    def __init__(
        self, words: Sequence[tuple[int, ...]], token_ids: Sequence[int], prompt_len: int, device: torch.device
    ) -> None:
        self._token_ids, self._prompt_len = token_ids, prompt_len
        self._always = torch.tensor([word[0] for word in words if len(word) == 1], dtype=torch.int64, device=device)
        self._behind: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._behind.setdefault(word[-2], []).append(word)

    def apply(self, logits: torch.Tensor) -> None:
        logits[self._always] = -torch.inf
        output_len = len(self._token_ids) - self._prompt_len
        for word in self._behind.get(self._token_ids[-1], ()) if output_len else ():
            before = len(word) - 1
            if before <= output_len and tuple(self._token_ids[-before:]) == word[:-1]:
                logits[word[-1]] = -torch.inf
