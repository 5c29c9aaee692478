"""Edits of one request's logits before its next token is drawn: what may be drawn at all, logit_bias, penalties.

They are made once per request and follow its tokens as they come, so that a step costs what changed and one pass over
the distinct tokens. They depend on the tokens alone: made anew on another node they edit alike. Order and meaning of
the stages are those of vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from protocol.sampling import SamplingParams

_FEW = 8
"""New tokens that are written to the device one by one; more are written at once."""


class Edit(Protocol):
    """A stage that changes logits float32 [vocab] of the request in place."""

    def active(self, output_len: int) -> bool:
        """Whether it does anything after that many output tokens."""

    def apply(self, logits: torch.Tensor) -> None: ...


def edits_for(
    params: SamplingParams, token_ids: Sequence[int], prompt_len: int, vocab_size: int, device: torch.device
) -> tuple[Edit, ...]:
    """What the parameters ask for. token_ids: prompt and output so far, which only ever grows."""
    edits: list[Edit] = []
    if params.allowed_token_ids is not None:
        edits.append(_Allowed(params.allowed_token_ids, device))
    if params.bad_words:
        edits.append(_BadWords(params.bad_words, token_ids, prompt_len, device))
    if params.min_tokens:
        edits.append(_NoEnd(params, vocab_size, device))
    if params.logit_bias:
        edits.append(_Bias(params.logit_bias, device))
    if params.repetition_penalty != 1.0:
        edits.append(_Repetition(params.repetition_penalty, Tally(token_ids, 0, device)))
    if params.frequency_penalty or params.presence_penalty:
        edits.append(_Frequency(params, Tally(token_ids, prompt_len, device)))
    return tuple(edits)


def look_back(params: SamplingParams) -> bool:
    """Whether an edit depends on which tokens were drawn, not on their number alone."""
    penalties = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    return bool(params.bad_words or penalties)


class Tally:
    """The distinct ones of token_ids[start:] and how often each occurs, on the device; follows the list as it grows."""

    def __init__(self, token_ids: Sequence[int], start: int, device: torch.device) -> None:
        self._token_ids = token_ids
        self._upto = start
        self._places: dict[int, int] = {}
        self._often: list[int] = []
        self._ids = torch.empty(0, dtype=torch.int64, device=device)
        self._counts = torch.empty(0, device=device)

    def follow(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids int64 [n], counts float32 [n]) as of now."""
        new = self._token_ids[self._upto :]
        self._upto += len(new)
        if len(new) > _FEW or len(self._often) + len(new) > len(self._ids):
            self._count_many(Counter(new))
            self._write_all()
        else:
            for token in new:
                place = self._count(token, 1)
                self._ids[place], self._counts[place] = token, self._often[place]
        return self._ids[: len(self._often)], self._counts[: len(self._often)]

    def _count_many(self, counts: Counter[int]) -> None:
        if self._places:
            for token, count in counts.items():
                self._count(token, count)
        else:
            self._places = dict(zip(counts, range(len(counts)), strict=True))
            self._often = list(counts.values())

    def _count(self, token: int, count: int) -> int:
        place = self._places.setdefault(token, len(self._often))
        if place == len(self._often):
            self._often.append(0)
        self._often[place] += count
        return place

    def _write_all(self) -> None:
        """Anew, with room to grow."""
        spare = [0] * max(64, len(self._often) // 4)
        ids, counts = np.array([*self._places, *spare], dtype=np.int64), np.array([*self._often, *spare], np.float32)
        self._ids = torch.from_numpy(ids).to(self._ids.device)
        self._counts = torch.from_numpy(counts).to(self._counts.device)


class _Allowed:
    """allowed_token_ids: nothing else can be drawn."""

    def __init__(self, token_ids: Sequence[int], device: torch.device) -> None:
        self._ids = torch.tensor(token_ids, dtype=torch.int64, device=device)

    def active(self, output_len: int) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> None:
        kept = logits.index_select(0, self._ids)
        logits.fill_(-torch.inf)
        logits.index_copy_(0, self._ids, kept)


class _BadWords:
    """bad_words: of each sequence the last token, where the output ends with the ones before it. A step looks at those
    sequences alone whose last but one token was drawn last."""

    def __init__(
        self, words: Sequence[tuple[int, ...]], token_ids: Sequence[int], prompt_len: int, device: torch.device
    ) -> None:
        self._token_ids, self._prompt_len = token_ids, prompt_len
        self._always = torch.tensor([word[0] for word in words if len(word) == 1], dtype=torch.int64, device=device)
        self._behind: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._behind.setdefault(word[-2], []).append(word)

    def active(self, output_len: int) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> None:
        logits[self._always] = -torch.inf
        output_len = len(self._token_ids) - self._prompt_len
        for word in self._behind.get(self._token_ids[-1], ()) if output_len else ():
            before = len(word) - 1
            if before <= output_len and tuple(self._token_ids[-before:]) == word[:-1]:
                logits[word[-1]] = -torch.inf


class _NoEnd:
    """min_tokens: nothing that ends the request can be drawn yet. Ids that the model has not cannot be drawn anyway."""

    def __init__(self, params: SamplingParams, vocab_size: int, device: torch.device) -> None:
        self._until = params.min_tokens
        ids = [token for token in params.ending_token_ids if 0 <= token < vocab_size]
        self._ids = torch.tensor(ids, dtype=torch.int64, device=device)

    def active(self, output_len: int) -> bool:
        return output_len < self._until

    def apply(self, logits: torch.Tensor) -> None:
        logits[self._ids] = -torch.inf


class _Bias:
    """logit_bias is added; a token that is named twice gets both."""

    def __init__(self, logit_bias: Sequence[tuple[int, float]], device: torch.device) -> None:
        tokens, biases = zip(*logit_bias, strict=True)
        self._ids = torch.tensor(tokens, dtype=torch.int64, device=device)
        self._biases = torch.tensor(biases, dtype=torch.float32, device=device)

    def active(self, output_len: int) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> None:
        logits.index_add_(0, self._ids, self._biases)


class _Repetition:
    """Tokens of prompt and output: positive logits are divided, others multiplied (Keskar et al., arXiv 1909.05858),
    which is the lesser of both results for a penalty above 1 and the greater one below."""

    def __init__(self, penalty: float, tally: Tally) -> None:
        self._penalty = penalty
        self._either = torch.minimum if penalty > 1 else torch.maximum
        self._tally = tally

    def active(self, output_len: int) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> None:
        ids, _ = self._tally.follow()
        values = logits.index_select(0, ids)
        logits.scatter_(0, ids, self._either(values / self._penalty, values * self._penalty))


class _Frequency:
    """Output tokens only: minus count * frequency_penalty, minus presence_penalty once (OpenAI API reference)."""

    def __init__(self, params: SamplingParams, tally: Tally) -> None:
        self._frequency, self._presence = params.frequency_penalty, params.presence_penalty
        self._tally = tally

    def active(self, output_len: int) -> bool:
        return output_len > 0

    def apply(self, logits: torch.Tensor) -> None:
        ids, counts = self._tally.follow()
        logits.index_add_(0, ids, counts * self._frequency + self._presence, alpha=-1)
