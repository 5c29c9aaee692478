"""The seam to a grammar library: compile, mask, accept, rollback. `grammars/library.py` is the real one; tests have
another (tests/listed_grammars.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from protocol.work import Grammar

Bits = np.ndarray
"""int32 [words]: bit i % 32 of word i // 32 is set where token i may come next."""


def words_for(vocab_size: int) -> int:
    """Words of a mask."""
    return (vocab_size + 31) // 32


class Matcher(Protocol):
    """A grammar behind some output tokens. A function of both: made anew and fed the same tokens it says the same.
    Belongs to one thread at a time. Each method but `accept` raises GrammarFailed when the grammar turns out to need
    more than its limits allow; the matcher is of no use then."""

    def mask(self, bits: Bits) -> None:
        """Write the tokens that may come next. End-of-sequence tokens are among them where the output may end."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Go on behind these tokens, none of which ends the sequence; returns how many of them the grammar took."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""


class Compiler(Protocol):
    """Makes matchers for one vocabulary. From any thread, several at once."""

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher before the first token. Raises InvalidRequest."""
