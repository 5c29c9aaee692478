"""Speculation: chooses the draft tokens that a step verifies, of n-grams or a draft model, by measured step times.

A draft never changes the text: the token at its position is drawn from the same logits and noise as without it, and
everything after the first difference is discarded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvferry.engine.block_assignment import BlockAssignment
from kvferry.engine.draft_acceptance import Accepted
from kvferry.engine.draft_model import DraftModel
from kvferry.engine.drafter import Drafter
from kvferry.engine.logits_processors import reads_history
from kvferry.engine.ngram_drafts import NgramDrafts
from kvferry.engine.request import Request
from kvferry.engine.sampler import Sampled
from kvferry.engine.step_cost import ASSUMED_WEIGHT, StepCost
from kvferry.engine.step_slices import Slice

RESERVE_DIVISOR = 8
"""Drafts are not added when at most 1/RESERVE_DIVISOR of the blocks is left."""


class Speculation:
    """Speculative decoding of one engine.

    max_drafts: drafts per stream in a step, 0 for none; rows: tokens of a step; model: draft model, used where no
    n-gram matches."""

    def __init__(self, blocks: BlockAssignment, max_drafts: int, rows: int, model: DraftModel | None = None) -> None:
        self._blocks, self._max_drafts, self._rows = blocks, max_drafts, rows
        self._drafter = Drafter(model) if model is not None else None
        self._cost = StepCost()
        self._turn = self._drafted = self._accepted = 0

    def __bool__(self) -> bool:
        """Return whether there may be drafts."""
        return self._max_drafts > 0

    def extend(self, slices: Sequence[Slice]) -> Sequence[Slice]:
        """Return the slices with drafts added if all are of streams.

        While the cost of a draft is unknown, every other step has none."""
        self._turn += 1
        plain = self._turn % 2 and self._cost.spread < ASSUMED_WEIGHT
        if not self._max_drafts or plain or not all(part.streams for part in slices):
            return slices
        drafts = [self._propose(part.request) for part in slices]
        if self._drafter is not None:
            self._drafter.improve([part.request for part in slices], drafts, self._cost.line())
        counts = self._counts(drafts)
        return [
            replace(part, drafts=own.found[: self._room(part.request, count)]) if own and count else part
            for part, own, count in zip(slices, drafts, counts, strict=True)
        ]

    def settle(self, slices: Sequence[Slice], drawn: Sequence[object], seconds: float) -> float:
        """Record the outcome of a step's drafts and its seconds; return the seconds that a draft model took."""
        if not self._max_drafts or not all(part.streams for part in slices):
            return 0.0
        drafting_s = self._drafter.settle(slices, drawn, seconds, self._cost.line()) if self._drafter else 0.0
        self._cost.observe(sum(1 + len(part.drafts) for part in slices), seconds - drafting_s)
        for part, found in zip(slices, drawn, strict=True):
            if isinstance(found, Accepted):
                self._drafted += found.drafted
                self._accepted += len(found.tokens) - 1
            tokens = found.tokens if isinstance(found, Accepted) else (found,)
            if part.request.drafts is not None:
                part.request.drafts.observe([one.token_id for one in tokens if isinstance(one, Sampled)])
        return drafting_s

    def forget(self, request: Request) -> None:
        """Forget a request that no longer runs here."""
        if self._drafter is not None:
            self._drafter.forget(request)

    def take(self) -> tuple[int, int]:
        """Return drafts computed and drafts accepted since the last call."""
        taken = self._drafted, self._accepted
        self._drafted = self._accepted = 0
        return taken

    def _propose(self, request: Request) -> NgramDrafts | None:
        """Return drafts for the request; None where drafts would change how the tokens after them are drawn."""
        row = request.sample_row
        if row is None or row.mask is not None or reads_history(row.params):
            return None
        max_drafts = min(self._max_drafts, row.params.max_tokens - request.output_len - 1)
        if request.pause_at is not None:
            max_drafts = min(max_drafts, request.pause_at - request.computed_len - 1)
        if max_drafts <= 0:
            return None
        if request.drafts is None:
            request.drafts = NgramDrafts(request.token_ids, self._drafter.share if self._drafter else 0.0)
        request.drafts.max_drafts = max_drafts
        request.drafts.propose(max_drafts)
        return request.drafts

    def _counts(self, drafts: Sequence[NgramDrafts | None]) -> list[int]:
        """Return how many drafts of each stream are worth their rows.

        The likeliest are added first, while tokens per second grow."""
        first, further = self._cost.line()
        counts, rows = [0] * len(drafts), len(drafts)
        tokens, seconds = float(rows), first + further * (rows - 1)
        chances = sorted(
            (
                (own.share ** (place + 1), index)
                for index, own in enumerate(drafts)
                if own
                for place in range(len(own.found))
            ),
            key=lambda chance: -chance[0],
        )
        for chance, index in chances[: max(0, self._rows - rows)]:
            if chance * seconds <= further * tokens:
                break
            counts[index] += 1
            tokens, seconds = tokens + chance, seconds + further
        return counts

    def _room(self, request: Request, count: int) -> int:
        """Take blocks and rows of states for the drafts; return how many of `count` drafts they hold."""
        known, rows = len(request.token_ids), request.state_rows
        self._blocks.extend(request, known + count, self._blocks.pool.num_blocks // RESERVE_DIVISOR)
        count = min(count, self._blocks.room(request) - known)
        return count if rows is None else rows.take_up_to(count)
