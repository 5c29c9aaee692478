"""Sampling of the next token for every row of a step, and log-probabilities of drawn and prompt tokens.

Logits processors come first, then `Ops.adjust` and `Ops.draw`. Tokens that a grammar forbids stay forbidden.

Only stages that some row of the batch asks for are run; rows never affect each other. Names and ranges are those of
protocol.sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kvferry.engine.grammar_mask import GrammarMask
from kvferry.engine.logits_processors import LogitsProcessor, edits_for
from kvferry.kernels.logit_adjustments import Adjusted, Adjustments
from kvferry.kernels.ops import Ops
from kvferry.kernels.sampling import NO_TOKEN, NoiseKeys, is_greedy
from kvferry.protocol.messages import TokenLogprobs
from kvferry.protocol.sampling import MAX_LOGPROBS, SamplingParams

__all__ = ["SampleRow", "Sampled", "draw_plain", "sample", "score_prompt"]


@dataclass(slots=True, eq=False)
class SampleRow:
    """One row to draw, kept from step to step with state derived from its tokens.

    `token_ids` is everything so far, prompt and output, and may only grow; its length is the position of the token to
    draw and its first `prompt_len` are the prompt. is_argmax: the most likely token is drawn, from unchanged logits,
    without scores. mask: tokens that its grammar allows; a row whose mask is not ready draws nothing."""

    params: SamplingParams
    token_ids: Sequence[int]
    prompt_len: int
    mask: GrammarMask | None = None
    is_argmax: bool = field(init=False)
    _edits: tuple[LogitsProcessor, ...] | None = field(init=False, default=None)
    _adjustments: Adjustments = field(init=False)
    _behind: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        params = self.params if self.mask is None else replace(self.params, min_tokens=0)
        self._adjustments = Adjustments(params, self.token_ids, self.prompt_len)
        self.is_argmax = is_greedy(self.params) and self.params.logprobs is None and self.mask is None

    @property
    def drawable(self) -> bool:
        """Return whether a token can be drawn: false while its grammar's mask is not ready."""
        return self.mask is None or (self.mask.ready and self.mask.error is None)

    def ahead(self, count: int, behind: int = -1) -> SampleRow:
        """Return the row of the token `count` places after the next one, whatever the tokens before it are.

        behind: index of the next token among drawn tokens, for a row with penalties."""
        row = SampleRow(self.params, range(len(self.token_ids) + count), self.prompt_len)
        row._edits, row._adjustments, row._behind = self._edits, self._adjustments, behind
        return row

    def edits(self, device: torch.device) -> tuple[LogitsProcessor, ...]:
        """Return the logits processors that run before the row's adjustments."""
        if self._edits is None:
            self._edits = edits_for(self.params, self.token_ids, self.prompt_len, device)
        return self._edits

    def adjusted(self, row: int) -> Adjusted | None:
        """Return the row's additions and penalties in this step."""
        output_len = len(self.token_ids) - self.prompt_len
        active = self._adjustments.active(output_len)
        return Adjusted(row, self._adjustments, output_len, self._behind) if active else None


@dataclass(frozen=True, slots=True)
class Sampled:
    """Token drawn for a row, NO_TOKEN where its logits are NaN; `logprobs` if its parameters ask for them."""

    token_id: int
    logprobs: TokenLogprobs | None


def sample(
    logits: torch.Tensor, rows: Sequence[SampleRow], ops: Ops, best: Sequence[int] | None = None
) -> list[Sampled | None]:
    """Draw one token per row from float32 logits [n, vocab], which may be overwritten.

    Row i's answer depends on logits[i] and rows[i] alone; None: its mask is not ready. best: the most likely token of
    each row, where known."""
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    edits, adjusted = [row.edits(logits.device) for row in rows], _adjusted(rows)
    if best is not None and all(row.is_argmax for row in rows) and not any(edits) and not adjusted:
        return [Sampled(token, None) for token in best]
    if not rows:
        return []
    scored = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    raw = logits[scored].log_softmax(dim=-1) if scored else None
    _change(logits, edits, adjusted, ops)
    drawable = [row.drawable for row in rows]  # checked once: other threads make masks
    masks = [row.mask.bits if row.mask is not None and able else None for row, able in zip(rows, drawable, strict=True)]
    tokens = ops.draw(logits, [row.params for row in rows], _keys(rows), masks).tolist()
    entries = {} if raw is None else _scores(raw, scored, rows, tokens)
    return [Sampled(token, entries.get(i)) if drawable[i] else None for i, token in enumerate(tokens)]


def draw_plain(
    logits: torch.Tensor, rows: Sequence[SampleRow], ops: Ops, drawn: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw for rows without masks and scores: token ids int64 [n] on the logits' device, without waiting.

    drawn: int64 [m], tokens that rows index by `behind` when they are ahead of the host."""
    _change(logits, [row.edits(logits.device) for row in rows], _adjusted(rows), ops, drawn)
    return ops.draw(logits, [row.params for row in rows], _keys(rows))


def _adjusted(rows: Sequence[SampleRow]) -> list[Adjusted]:
    return [found for i, row in enumerate(rows) if (found := row.adjusted(i)) is not None]


def _change(
    logits: torch.Tensor,
    edits: Sequence[Sequence[LogitsProcessor]],
    adjusted: Sequence[Adjusted],
    ops: Ops,
    drawn: torch.Tensor | None = None,
) -> None:
    """Apply each row's logits processors and adjustments."""
    for i, some in enumerate(edits):
        for edit in some:
            edit.apply(logits[i])
    if adjusted:
        ops.adjust(logits, adjusted, drawn)


def _keys(rows: Sequence[SampleRow]) -> NoiseKeys:
    return NoiseKeys(tuple(row.params.seed for row in rows), tuple(len(row.token_ids) for row in rows))


def _scores(
    raw: torch.Tensor, scored: Sequence[int], rows: Sequence[SampleRow], tokens: Sequence[int]
) -> dict[int, TokenLogprobs]:
    """Return scores by row.

    Row i of `raw` [len(scored), vocab] has the log-probabilities after the token drawn for row scored[i]."""
    top = [rows[i].params.logprobs or 0 for i in scored]
    entries = zip(scored, token_logprobs(raw, [max(tokens[i], 0) for i in scored], top), strict=True)
    return {i: entry for i, entry in entries if tokens[i] != NO_TOKEN}


_ROWS_AT_ONCE = 64


def score_prompt(logits: torch.Tensor, next_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Return log-probabilities of given tokens: row i of float32 logits [n, vocab] scores next_ids[i].

    Each has the `top` most likely tokens beside it. Extra memory is bounded for any n."""
    assert logits.shape[0] == len(next_ids), (logits.shape, len(next_ids))
    scored: list[TokenLogprobs] = []
    for start in range(0, len(next_ids), _ROWS_AT_ONCE):
        ids = next_ids[start : start + _ROWS_AT_ONCE]
        scored += token_logprobs(logits[start : start + len(ids)].log_softmax(dim=-1), ids, [top] * len(ids))
    return scored


def token_logprobs(logprobs: torch.Tensor, token_ids: Sequence[int], top: Sequence[int]) -> list[TokenLogprobs]:
    """Return entries for token_ids[i] in row i of `logprobs` [n, vocab], each with the top[i] most likely tokens.

    top[i] is at most MAX_LOGPROBS. Rank is 1 + the number of strictly likelier tokens; ties are listed by id."""
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logprobs.device)[:, None]
    own = logprobs.gather(1, ids)
    ranks = (logprobs > own).sum(dim=-1).add_(1).tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(token_ids)
    if any(top):
        # A fixed number, because the choice among equally likely tokens must not depend on other rows.
        best = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[1]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ranked = (sorted(zip(*pair, strict=True), key=lambda entry: (-entry[1], entry[0])) for pair in pairs)
        tops = [tuple(row[:count]) for row, count in zip(ranked, top, strict=True)]
    return [
        TokenLogprobs(token, value, rank, row)
        for token, value, rank, row in zip(token_ids, own.squeeze(1).tolist(), ranks, tops, strict=True)
    ]
