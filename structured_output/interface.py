"""Interface to a grammar library: Compiler makes a Matcher, which masks, accepts, rolls back, and forces an end.

`structured_output/llguidance_backend.py` implements it; tests have another (tests/listed_grammars.py)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from kvferry.protocol.work import Grammar

Bits: TypeAlias = Any
"""Writable contiguous buffer of uint32 words: bit i % 32 of word i // 32 is set if token i may come next.

An engine uses numpy arrays; routers, which validate grammars too, have no numpy."""


def words_for(vocab_size: int) -> int:
    """Return the number of words of a mask."""
    return (vocab_size + 31) // 32


def empty_mask(words: int) -> array[int]:
    """Return a mask, uint32 [words], that allows no token."""
    return array("I", bytes(4 * words))


def without(bits: array[int], tokens: Sequence[int]) -> array[int]:
    """Return a copy of a mask that allows none of these tokens. Tokens beyond the mask are ignored."""
    left = bits[:]
    for token in (each for each in tokens if 0 <= each < 32 * len(bits)):
        left[token >> 5] &= ~(1 << (token & 31))
    return left


class Matcher(Protocol):
    """State of a grammar after some output tokens.

    Deterministic: a new matcher that accepts the same tokens gives the same masks. Not thread-safe. Every method except
    `accept` raises GrammarFailed if the grammar needs more than its limits allow; the matcher is unusable then."""

    @property
    def closes_at(self) -> int:
        """Remaining tokens above which `closing` returns at once; below, it may cost some tens of masks."""

    def mask(self, bits: Bits) -> None:
        """Write the tokens that may come next, end-of-sequence tokens included where the output may end."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance by these tokens, none of which ends the sequence; return how many the grammar accepted."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""

    def closing(self, room: int) -> int | None:
        """Return the token to take now so that JSON output ends within `room` tokens.

        None: any token may follow, the output ends here in any case, or it cannot end in time (see
        structured_output/forced_end.py)."""


class Compiler(Protocol):
    """Makes matchers for one vocabulary. Thread-safe."""

    def compile(self, grammar: Grammar) -> Matcher:
        """Return a matcher before the first token. Raises InvalidRequest."""
