"""Choosing the next token of every row of a step.

A pipeline: edits of single rows' logits (min_tokens, logit_bias, penalties), then `Ops.draw`.
Only what some row of the batch asks for is run; rows never affect each other. Order and meaning of the stages are
those of vLLM, names and ranges those of protocol.sampling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.logprobs import score_prompt, token_logprobs
from kernels.draw import NoiseKeys, most_likely
from kernels.ops import Ops
from protocol.messages import TokenLogprobs
from protocol.sampling import SamplingParams

__all__ = ["SampleRow", "Sampled", "sample", "score_prompt"]

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row to draw. `token_ids` is everything so far, prompt and output; its length is the position of the token to
    draw and the first `prompt_len` of it are the prompt."""

    params: SamplingParams
    token_ids: Sequence[int]
    prompt_len: int

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def greedy(self) -> bool:
        return self.params.temperature < _GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token drawn for a row; `logprobs` if its parameters ask for them."""

    token_id: int
    logprobs: TokenLogprobs | None


def sample(
    logits: torch.Tensor, rows: Sequence[SampleRow], ops: Ops, best: Sequence[int] | None = None
) -> list[Sampled]:
    """Draw one token per row from float32 logits [n, vocab], which may be overwritten. Row i's answer depends on
    logits[i] and rows[i] alone. best: the most likely token of each row, where that is known."""
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    if best is not None and all(map(_is_plain, rows)):
        return [Sampled(token, None) for token in best]
    if not rows:
        return []
    scored = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    raw = logits[scored].log_softmax(dim=-1) if scored else None
    _edit(logits, rows)
    tokens = _choose(logits, rows, ops).tolist()
    entries = {} if raw is None else _scores(raw, scored, rows, tokens)
    return [Sampled(token, entries.get(i)) for i, token in enumerate(tokens)]


def _scores(
    raw: torch.Tensor, scored: Sequence[int], rows: Sequence[SampleRow], tokens: Sequence[int]
) -> dict[int, TokenLogprobs]:
    """By row: what row i of `raw` [len(scored), vocab], log-probabilities, tells of the token drawn for scored[i]."""
    top = [rows[i].params.logprobs or 0 for i in scored]
    return dict(zip(scored, token_logprobs(raw, [tokens[i] for i in scored], top), strict=True))


def _choose(logits: torch.Tensor, rows: Sequence[SampleRow], ops: Ops) -> torch.Tensor:
    """Token ids int64 [n]: the most likely one where greedy, else drawn."""
    random = [i for i, row in enumerate(rows) if not row.greedy]
    if not random:
        return most_likely(logits)
    mixed = len(random) < len(rows)
    part = logits[random] if mixed else logits
    chosen = [rows[i] for i in random]
    keys = NoiseKeys(tuple(row.params.seed for row in chosen), tuple(len(row.token_ids) for row in chosen))
    drawn = ops.draw(part, [row.params for row in chosen], keys)
    if not mixed:
        return drawn
    greedy = [i for i, row in enumerate(rows) if row.greedy]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    tokens[random] = drawn
    tokens[greedy] = most_likely(logits[greedy])
    return tokens


def _is_plain(row: SampleRow) -> bool:
    """Whether all the row wants is the most likely token of its logits as they are."""
    return row.greedy and row.params.logprobs is None and not any(edit.wanted(row) for edit in _EDITS)


def _edit(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    for index, row in enumerate(rows):
        for edit in _EDITS:
            if edit.wanted(row):
                edit.apply(logits[index], row)


@dataclass(frozen=True, slots=True)
class _Edit:
    """A stage that changes a few logits of one row, in place; `apply` takes them as float32 [vocab]."""

    wanted: Callable[[SampleRow], bool]
    apply: Callable[[torch.Tensor, SampleRow], None]


def _forbid_ending(logits: torch.Tensor, row: SampleRow) -> None:
    """min_tokens: nothing that ends the request can be drawn yet."""
    logits[_ids(logits, row.params.ending_token_ids)] = -torch.inf


def _add_bias(logits: torch.Tensor, row: SampleRow) -> None:
    tokens, biases = zip(*row.params.logit_bias, strict=True)
    logits.index_add_(0, _ids(logits, tokens), torch.tensor(biases, dtype=logits.dtype, device=logits.device))


def _repetition(logits: torch.Tensor, row: SampleRow) -> None:
    """Tokens of prompt and output: positive logits are divided, others multiplied (Keskar et al., arXiv 1909.05858)."""
    seen = _ids(logits, list(set(row.token_ids)))
    values, penalty = logits[seen], row.params.repetition_penalty
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _frequency_and_presence(logits: torch.Tensor, row: SampleRow) -> None:
    """Output tokens only: minus count * frequency_penalty, minus presence_penalty once (OpenAI API reference)."""
    counts = Counter(row.token_ids[row.prompt_len :])
    often = torch.tensor(list(counts.values()), device=logits.device)
    logits[_ids(logits, list(counts))] -= often * row.params.frequency_penalty + row.params.presence_penalty


def _ids(logits: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=logits.device)


_EDITS = (
    _Edit(lambda row: row.output_len < row.params.min_tokens, _forbid_ending),
    _Edit(lambda row: bool(row.params.logit_bias), _add_bias),
    _Edit(lambda row: row.params.repetition_penalty != 1.0, _repetition),
    _Edit(
        lambda row: row.output_len > 0 and bool(row.params.frequency_penalty or row.params.presence_penalty),
        _frequency_and_presence,
    ),
)
