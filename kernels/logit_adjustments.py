"""Logit adjustments of one request (min_tokens, logit_bias, penalties), with token counts that follow its output.

Adjustments are built once per request and follow its tokens, so a step costs only what changed plus one pass over the
distinct tokens. They depend on the tokens alone, so another node gets the same result. Order and meaning are vLLM's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvferry.protocol.sampling import SamplingParams

_MAX_SINGLE_WRITES = 8
"""Maximum number of new tokens that are written to the device one by one; more are written at once."""


class Adjustments:
    """Logit adjustments of one request.

    token_ids: prompt and output so far, which only grows. `counting`: the adjustments depend on the tokens themselves,
    not only on their number. `apply` is `Ops.adjust` of one row in PyTorch."""

    def __init__(self, params: SamplingParams, token_ids: Sequence[int], prompt_len: int) -> None:
        self.params, self.token_ids, self.prompt_len = params, token_ids, prompt_len
        self.penalised = bool(params.frequency_penalty or params.presence_penalty)
        self.counting = params.repetition_penalty != 1.0 or self.penalised
        self._on_device: _OnDevice | None = None

    def active(self, output_len: int) -> bool:
        """Return whether any adjustment applies after `output_len` output tokens."""
        params = self.params
        repeats = params.repetition_penalty != 1.0
        return bool(repeats or params.logit_bias or output_len < params.min_tokens or (self.penalised and output_len))

    def additions(self, output_len: int, vocab_size: int) -> list[tuple[int, float]]:
        """Return tokens and the amounts added to their logits before all penalties.

        Tokens that end the request get minus infinity before min_tokens; ids outside the vocabulary cannot be drawn
        anyway. Then the bias: a token that is named twice gets both."""
        ends = self.params.ending_token_ids if output_len < self.params.min_tokens else ()
        return [*((token, -float("inf")) for token in ends if 0 <= token < vocab_size), *self.params.logit_bias]

    def apply(self, logits: torch.Tensor, output_len: int, last: torch.Tensor | None = None) -> None:
        """Adjust float32 logits [vocab] in place. last: int64 [1], an output token that the host does not know yet."""
        if self._on_device is None:
            self._on_device = _OnDevice(self, logits.device, len(logits))
        self._on_device.apply(logits, output_len, None if last is None else last.clamp(min=0))


class Adjusted(NamedTuple):
    """Row of logits, its adjustments, and the number of its request's output tokens.

    behind: index of the request's last token among those drawn on the device, if the host does not have it yet; else
    negative."""

    row: int
    adjustments: Adjustments
    output_len: int
    behind: int = -1


class _OnDevice:
    """Tensors of one request."""

    def __init__(self, of: Adjustments, device: torch.device, vocab_size: int) -> None:
        params = of.params
        self._of = of
        ends = [token for token in params.ending_token_ids if params.min_tokens and 0 <= token < vocab_size]
        tokens, biases = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self._biased = torch.tensor(tokens, dtype=torch.int64, device=device)
        self._biases = torch.tensor(biases, dtype=torch.float32, device=device)
        self._seen = Tally(of.token_ids, 0, device)
        self._made = Tally(of.token_ids, of.prompt_len, device)

    def apply(self, logits: torch.Tensor, output_len: int, last: torch.Tensor | None) -> None:
        params = self._of.params
        if output_len < params.min_tokens:
            logits[self._ends] = -torch.inf
        if params.logit_bias:
            logits.index_add_(0, self._biased, self._biases)
        if params.repetition_penalty != 1.0:
            self._divide(logits, params.repetition_penalty, last)
        if self._of.penalised and output_len:
            ids, counts = self._made.follow()
            if last is not None:
                repeated = ids == last
                ids, counts = torch.cat((ids, last)), torch.cat((counts + repeated, ~repeated.any(0, keepdim=True)))
            logits.index_add_(
                0, ids, counts * params.frequency_penalty + (counts > 0) * params.presence_penalty, alpha=-1
            )

    def _divide(self, logits: torch.Tensor, penalty: float, last: torch.Tensor | None) -> None:
        """Divide positive logits by the penalty and multiply all other logits (Keskar et al., arXiv 1909.05858).

        That is the lesser of both results for a penalty above 1 and the greater one below."""
        ids, _ = self._seen.follow()
        ids = ids if last is None else torch.cat((ids, last))
        values = logits.index_select(0, ids)
        either = torch.minimum if penalty > 1 else torch.maximum
        logits.scatter_(0, ids, either(values / penalty, values * penalty))


class Tally:
    """Distinct tokens of token_ids[start:] and their counts on the device. Follows the list as it grows."""

    def __init__(self, token_ids: Sequence[int], start: int, device: torch.device) -> None:
        self._token_ids = token_ids
        self._upto = start
        self._places: dict[int, int] = {}
        self._often: list[int] = []
        self._ids = torch.empty(0, dtype=torch.int64, device=device)
        self._counts = torch.empty(0, device=device)

    def follow(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (token ids int64 [n], counts float32 [n]) as of now."""
        new = self._token_ids[self._upto :]
        self._upto += len(new)
        if len(new) > _MAX_SINGLE_WRITES or len(self._often) + len(new) > len(self._ids):
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
        """Rewrite both tensors, with capacity to grow."""
        spare = [0] * max(64, len(self._often) // 4)
        ids, counts = np.array([*self._places, *spare], dtype=np.int64), np.array([*self._often, *spare], np.float32)
        self._ids = torch.from_numpy(ids).to(self._ids.device)
        self._counts = torch.from_numpy(counts).to(self._counts.device)
