"""Slice: the tokens of one request that a step computes; `chunks_of` cuts prompts into slices within a token budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvferry.engine.request import Request


@dataclass(frozen=True, slots=True)
class Slice:
    """`count` tokens of a request from `start` on, computed in one step.

    samples: they are the request's last ones, so the next token is drawn or the prompt's vector made. drafts: proposed
    next tokens, computed after the last one: where the token drawn equals the first of them, the token after it is
    drawn too, and so on."""

    request: Request
    start: int
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def decodes(self) -> bool:
        """Return whether it is one token of a running stream; such slices come first in a batch."""
        return self.count == 1

    @property
    def streams(self) -> bool:
        """Return whether it is one token of output, not the rest of a prompt."""
        return self.decodes and self.start >= len(self.request.job.token_ids)

    @property
    def samples(self) -> bool:
        """Return whether a token is drawn or a vector made."""
        return self.start + self.count == len(self.request.token_ids)

    @property
    def draws(self) -> bool:
        """Return whether a token is drawn after its last one."""
        return self.samples and self.request.generates


def chunks_of(
    requests: Iterable[Request],
    budget: int,
    *,
    whole: bool = False,
    stop: Callable[[Request], int] | None = None,
) -> list[Slice]:
    """Return slices of the requests, in order, as far as the budget allows.

    whole: all of a request or nothing, and the last one may exceed the budget. stop: returns the length up to which a
    request's slice may go. Media whose tokens attend to each other are computed whole, even beyond the budget."""
    chunks: list[Slice] = []
    for request in requests:
        if budget <= 0:
            break
        remaining = request.uncomputed if stop is None else stop(request) - request.computed_len
        assert remaining > 0, f"{request.key} has nothing to compute"
        count = remaining if whole else min(remaining, budget)
        if request.media is not None:
            count = request.media.whole(request.computed_len, count)
        budget -= count
        chunks.append(Slice(request, request.computed_len, count))
    return chunks
