"""Log-probabilities for clients: of the model's own distribution, before penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.protocol.messages import TokenLogprobs
from kvferry.protocol.sampling import MAX_LOGPROBS

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
        # Fixed, because which of several equal tokens is found must not depend on other rows.
        best = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[1]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ranked = (sorted(zip(*pair, strict=True), key=lambda entry: (-entry[1], entry[0])) for pair in pairs)
        tops = [tuple(row[:count]) for row, count in zip(ranked, top, strict=True)]
    return [
        TokenLogprobs(token, value, rank, row)
        for token, value, rank, row in zip(token_ids, own.squeeze(1).tolist(), ranks, tops, strict=True)
    ]
