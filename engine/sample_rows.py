"""Sampling rows of a step's slices (one per drawn token, drafts included), and the drawn results grouped by slice."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.engine.draft_acceptance import Accepted, accept
from kvferry.engine.pooling import Read
from kvferry.engine.sampler import Sampled, SampleRow
from kvferry.engine.step_slices import Slice

Outcome = Sampled | Accepted | Read | None
"""Outcome of a slice: next token, several tokens after drafts, or a vector; None for a slice that does not sample."""


def only_draws(part: Slice) -> bool:
    """Return whether the slice is one token and only the next token is needed."""
    return part.decodes and part.samples and part.request.generates and not part.request.wants_prompt_logprobs


def sample_rows(part: Slice) -> list[SampleRow]:
    """Return the row of a stream's next token, and of the tokens after each draft."""
    row = sample_row(part)
    return [row, *(row.ahead(place + 1) for place in range(len(part.drafts)))]


def by_slice(slices: Sequence[Slice], drawn: Sequence[Sampled | None]) -> list[Outcome]:
    """Return the outcome of each slice, from the tokens drawn for all rows."""
    found: list[Outcome] = []
    rows = iter(drawn)
    for part in slices:
        own = [next(rows) for _ in range(1 + len(part.drafts))]
        found.append(accept(part.drafts, own) if part.drafts else own[0])
    return found


def sample_row(part: Slice) -> SampleRow:
    """Return the sampling state of the slice's request, made with its first token."""
    request = part.request
    if request.sample_row is None:
        request.sample_row = SampleRow(request.job.params, request.token_ids, request.job.prompt_len)
    return request.sample_row
