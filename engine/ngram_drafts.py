"""Drafts of one request, by n-gram lookup or from a draft model, and the share of them that proves right.

Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), with the longest match and, of
equally long ones, the latest."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

LONGEST = 8
"""Longest match, in tokens."""
CLASSES = (2, 4, LONGEST)
"""Upper bounds of the classes of matches, by their length in tokens."""
AT_FIRST = (0.1, 0.3, 0.5, 0.8)
"""Assumed share of correct drafts per class before any was seen."""
MODEL = len(AT_FIRST)
"""Class of drafts that a draft model made."""
WEIGHT = 0.1
"""Weight of a new observation in that share."""
SURE = 0.98
"""Upper bound of the assumed share of correct drafts."""


class NgramDrafts:
    """N-gram drafts of one request, whose token_ids only grow.

    `found`: draft after its last token. `share`: how often a token of such a draft was right if those before it were.
    of_model: the share assumed of a draft model before any was seen. max_drafts: number that is useful now."""

    def __init__(self, token_ids: Sequence[int], of_model: float = 0.0) -> None:
        self._token_ids = token_ids
        self._ids = np.empty(0, dtype=np.int32)
        self._upto = 0
        self._class = 0
        self._shares = [*AT_FIRST, of_model]
        self.found: tuple[int, ...] = ()
        self.max_drafts = 0

    @property
    def share(self) -> float:
        """Share of correct drafts of the class found last."""
        return min(self._shares[self._class], SURE)

    @property
    def of_model(self) -> float:
        """Return the share of a draft model."""
        return min(self._shares[MODEL], SURE)

    @property
    def by_model(self) -> bool:
        """Return whether the current draft is of a draft model."""
        return self._class == MODEL

    def put(self, drawn: tuple[int, ...]) -> None:
        """Take over the draft of a draft model."""
        self._class, self.found = MODEL, drawn

    def propose(self, max_drafts: int) -> None:
        """Draft `max_drafts` tokens, or none if the last token is a new one."""
        self._follow()
        end = self._upto - 1
        ends = np.flatnonzero(self._ids[:end] == self._ids[end])
        matched = 0
        while len(ends) and matched < LONGEST:
            at, matched = int(ends[-1]), matched + 1
            ends = ends[ends >= matched]
            ends = ends[self._ids[ends - matched] == self._ids[end - matched]]
        self._class = bisect_right(CLASSES, matched)
        self.found = tuple(np.resize(self._ids[at + 1 : self._upto], max_drafts).tolist()) if matched else ()

    def observe(self, token_ids: Sequence[int]) -> None:
        """Learn from the tokens drawn after the last one, whether their drafts were computed or not."""
        for drafted, drawn in zip(self.found, token_ids, strict=False):
            self._shares[self._class] += WEIGHT * ((drafted == drawn) - self._shares[self._class])
            if drafted != drawn:
                break
        self.found = ()

    def _follow(self) -> None:
        new = self._token_ids[self._upto :]
        if self._upto + len(new) > len(self._ids):
            self._ids = np.resize(self._ids, len(self._token_ids) + max(256, len(self._ids) // 2))
        self._ids[self._upto : self._upto + len(new)] = new
        self._upto += len(new)
