"""Decision whether to run the draft model: only if its drafts save more measured time than they cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kvferry.engine.draft_acceptance import Accepted
from kvferry.engine.draft_model import MAX_CATCH_UP, DraftModel
from kvferry.engine.ngram_drafts import NgramDrafts
from kvferry.engine.request import Request
from kvferry.engine.step_cost import ROW
from kvferry.engine.step_slices import Slice

log = logging.getLogger("kvferry.engine")

Line = tuple[float, float]
"""Seconds of a step of one row, and of each further row."""
AT_FIRST = 0.6
"""Assumed share of correct drafts before any was measured."""
LEARN = 0.05
"""Weight of one stream in the measured share of correct drafts."""
TRIALS = 0.02
"""Share of the steps' time in which drafts are tried although they do not seem to pay."""
DEBT_S = 2.0
"""Limits of the time that seemingly useful drafts may have lost in total, and of the gain remembered, in seconds."""
EXPECTED = 128
"""Tokens that a stream is expected to generate from now on, unless it has generated more already."""


class Drafter:
    """Drafting decision of one engine.

    share: measured share of correct drafts, over all streams."""

    def __init__(self, model: DraftModel) -> None:
        self.model: DraftModel | None = model
        self.share = AT_FIRST
        self._spent_s = self._waited_s = self._gained_s = 0.0

    def improve(self, requests: Sequence[Request], drafts: Sequence[NgramDrafts | None], step: Line) -> None:
        """Let the model draft for streams without better drafts, if that pays.

        step: measured time of a step. An exception of the model ends drafting and nothing else."""
        began, model = time.monotonic(), self.model
        if model is None:
            return
        undrafted = [
            (request, own)
            for request, own in zip(requests, drafts, strict=True)
            if own is not None and not (own.found and own.share > own.of_model) and model.can(request)
        ]
        chosen = self._choose(model, undrafted, len(requests), step) if undrafted else {}
        if not chosen:
            return
        try:
            found = model.draft([(undrafted[i][0], count) for i, count in chosen.items()])
        except Exception:
            log.exception("the draft model failed and is no longer used")
            model.forget_all()
            self.model = None
            return
        for i, drawn in zip(chosen, found, strict=True):
            if drawn:
                undrafted[i][1].put(drawn)
        self._spent_s, self._waited_s = time.monotonic() - began, model.waited_s

    def settle(self, slices: Sequence[Slice], drawn: Sequence[object], seconds: float, step: Line) -> float:
        """Account the outcome of drafts: time saved by correct tokens minus time of all drafts.

        Returns how many of the step's seconds the model took."""
        rows = right = 0
        for part, found in zip(slices, drawn, strict=True):
            own = part.request.drafts
            if own is None or not own.by_model or not own.found:
                continue
            self.share += LEARN * (own.of_model - self.share)
            if isinstance(found, Accepted):
                rows, right = rows + found.drafted, right + len(found.tokens) - 1
        spent_s, computed_s = self._spent_s, self._spent_s - self._waited_s
        self._spent_s = self._waited_s = 0.0
        a_token = (step[0] + step[1] * (len(slices) - 1)) / len(slices)
        gained = right * a_token - rows * step[1] - computed_s + TRIALS * (seconds - spent_s)
        self._gained_s = min(DEBT_S, self._gained_s + gained)
        return spent_s

    def forget(self, request: Request) -> None:
        """Drop the request."""
        if self.model is not None:
            self.model.forget(request)

    def _choose(
        self, model: DraftModel, undrafted: Sequence[tuple[Request, NgramDrafts]], count: int, step: Line
    ) -> dict[int, int]:
        """Return the number of drafts per stream: those that pay, or at times one for the stream that lacks least."""
        shares = [(own.of_model, own.max_drafts) for _, own in undrafted]
        guessed = (ROW * step[0], ROW * step[1])
        counts, saved_s = best_counts(shares, count, step, model.cost.line() if model.cost.known else guessed)
        lacks = [model.lack(request) for request, _ in undrafted]
        pays = {
            i: drafts
            for i, drafts in enumerate(counts)
            if drafts and (lacks[i] <= MAX_CATCH_UP or lacks[i] * model.token_s <= saved_s * _rest(undrafted[i][0]))
        }
        if pays:
            return pays if self._gained_s > -DEBT_S else {}
        return {min(range(len(undrafted)), key=lacks.__getitem__): 1} if self._gained_s > 0 else {}


def best_counts(streams: Sequence[tuple[float, int]], count: int, step: Line, pass_: Line) -> tuple[list[int], float]:
    """Return the number of drafts per stream that maximises tokens per second, and the seconds saved per token.

    streams: for each, the share of correct drafts and the maximum number of drafts. count: all streams of the step.
    step, pass_: times of the model's and of the draft model's steps."""
    counts = [0] * len(streams)
    tokens, seconds = float(count), step[0] + step[1] * (count - 1)
    before = seconds / tokens
    for place in range(1, max((limit for _, limit in streams), default=0) + 1):
        pace = (step[1] + pass_[1]) * tokens
        chances = {
            i: share**place
            for i, (share, limit) in enumerate(streams)
            if counts[i] == place - 1 and limit >= place and share**place * seconds > pace
        }
        more_s = pass_[0] + pass_[1] * (len(chances) - 1) + step[1] * len(chances)
        if sum(chances.values()) * seconds <= more_s * tokens:
            break
        for i in chances:
            counts[i] = place
        tokens, seconds = tokens + sum(chances.values()), seconds + more_s
    return counts, before - seconds / tokens


def _rest(request: Request) -> int:
    """Return the number of tokens that a stream is expected to generate from now on."""
    return min(request.job.params.max_tokens - request.output_len, max(EXPECTED, request.output_len))
