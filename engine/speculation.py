"""Drafts that are computed beside the last tokens of streams, as many as make the step's tokens cheaper.

A draft changes no text: the token at its place is drawn from logits and noise as it would be without it, and where it
differs from the draft, nothing behind it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.block_pool import BlockPool
from engine.drafts import Drafts
from engine.edits import look_back
from engine.request import Request
from engine.sampler import Sampled
from engine.slices import Slice
from protocol.layout import blocks_for

KEPT = 8
"""A draft may not take the last one of so many blocks."""
ROW = 0.1
"""Of a step of one row: what another row is taken to cost before any step had more."""
FORGET, TRUST = 0.98, 2.0
"""What an older step counts for beside the one after it, and how many steps that guess counts for."""
NEAR, FADE = 0.5, 0.001
"""Steps of as many rows as usual tell nothing of what a row costs: what was known of that fades, by so much a step."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Drawn for one slice: as many tokens as its drafts were right, and the next one. `drafted`: how many it had."""

    tokens: tuple[Sampled, ...]
    drafted: int


def accept(drafts: Sequence[int], drawn: Sequence[Sampled | None]) -> Accepted:
    """Of what was drawn behind the last token and behind each draft, what follows right drafts alone."""
    right = 0
    while right < len(drafts) and _is(drawn[right], drafts[right]):
        right += 1
    return Accepted(tuple(one for one in drawn[: right + 1] if one is not None), len(drafts))


def _is(drawn: Sampled | None, token_id: int) -> bool:
    return drawn is not None and drawn.token_id == token_id


class StepCost:
    """Seconds of a step by its rows, as a line through the steps so far, the latest of which count most."""

    def __init__(self) -> None:
        self._count = self._rows = self._seconds = self._squares = self._products = 0.0
        self._row = ROW

    def saw(self, rows: int, seconds: float) -> None:
        mean = self._rows / self._count if self._count else rows
        self._count = FORGET * self._count + 1
        self._rows = FORGET * self._rows + rows
        self._seconds = FORGET * self._seconds + seconds
        self._squares = FORGET * self._squares + rows * rows
        self._products = FORGET * self._products + rows * seconds
        if abs(rows - mean) > NEAR:
            first, further = self.line()
            self._row = further / first
        else:
            self._row += FADE * (ROW - self._row)

    @property
    def spread(self) -> float:
        """Of the rows of the steps that count: with little of it, what a row costs is not known from them."""
        return max(0.0, self._squares - self._rows**2 / self._count) if self._count else 0.0

    def line(self) -> tuple[float, float]:
        """Seconds of a step of one row, and of each further one; (1, ROW) while nothing is known."""
        if not self._count:
            return 1.0, ROW
        rows, seconds = self._rows / self._count, self._seconds / self._count
        guessed = self._row * seconds / (1 + self._row * (rows - 1))
        slope = (self._products - rows * self._seconds + TRUST * guessed) / (self.spread + TRUST)
        slope = min(max(slope, 0.01 * seconds / rows), seconds / rows)
        return seconds - slope * (rows - 1), slope


class Speculation:
    """Of one engine. most: drafts of a stream in a step; 0: there are none. rows: tokens of a step."""

    def __init__(self, pool: BlockPool, most: int, rows: int) -> None:
        self._pool, self._most, self._rows = pool, most, rows
        self._cost = StepCost()
        self._turn = self._drafted = self._accepted = 0

    def __bool__(self) -> bool:
        """Whether there may be drafts."""
        return self._most > 0

    def extend(self, slices: Sequence[Slice]) -> Sequence[Slice]:
        """The same slices, where all are of streams with drafts behind some. While it is not known what a draft costs,
        every other step has none."""
        self._turn += 1
        plain = self._turn % 2 and self._cost.spread < TRUST
        if not self._most or plain or not all(part.streams for part in slices):
            return slices
        drafts = [self._look(part.request) for part in slices]
        counts = self._counts(drafts)
        return [
            replace(part, drafts=own.found[: self._room(part.request, count)]) if own and count else part
            for part, own, count in zip(slices, drafts, counts, strict=True)
        ]

    def settle(self, slices: Sequence[Slice], drawn: Sequence[object], seconds: float) -> None:
        """What became of them in a step that took so long."""
        if not self._most or not all(part.streams for part in slices):
            return
        self._cost.saw(sum(1 + len(part.drafts) for part in slices), seconds)
        for part, found in zip(slices, drawn, strict=True):
            if isinstance(found, Accepted):
                self._drafted += found.drafted
                self._accepted += len(found.tokens) - 1
            tokens = found.tokens if isinstance(found, Accepted) else (found,)
            if part.request.drafts is not None:
                part.request.drafts.saw([one.token_id for one in tokens if isinstance(one, Sampled)])

    def take(self) -> tuple[int, int]:
        """Drafts computed since it was asked last, and those of them that were right."""
        taken = self._drafted, self._accepted
        self._drafted = self._accepted = 0
        return taken

    def _look(self, request: Request) -> Drafts | None:
        """Drafts for the request; None where the tokens behind a draft could not be drawn as without it."""
        row = request.sample_row
        if row is None or row.mask is not None or look_back(row.params):
            return None
        most = min(self._most, row.params.max_tokens - request.output_len - 1)
        if most <= 0:
            return None
        if request.drafts is None:
            request.drafts = Drafts(request.token_ids)
        request.drafts.look(most)
        return request.drafts

    def _counts(self, drafts: Sequence[Drafts | None]) -> list[int]:
        """How many of each are worth their rows: the likeliest first, while one more makes more tokens of a second."""
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
        """How many of so many drafts there are blocks for, which are taken."""
        size, known = request.block_size, len(request.token_ids)
        missing = blocks_for(known + count, size) - len(request.block_ids)
        if missing > 0:
            more = self._pool.acquire(*request.holder, [], missing, keep=self._pool.num_blocks // KEPT)
            request.block_ids.extend(more or ())
        return min(count, len(request.block_ids) * size - known)
