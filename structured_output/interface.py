"""Interface to a grammar library: compile, mask, accept, rollback, and forced end.

`structured_output/llguidance_backend.py` implements it; tests have another (tests/listed_grammars.py)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from kvferry.protocol.work import Grammar

Bits: TypeAlias = Any
"""A buffer, writable and contiguous, of 4 bytes for each word: bit i % 32 of word i // 32 is set where token i may come
next. An engine's are numpy's; routers, which try grammars too, have no numpy."""


def words_for(vocab_size: int) -> int:
    """Words of a mask."""
    return (vocab_size + 31) // 32


def empty_mask(words: int) -> array[int]:
    """uint32 [words], none of whose bits is set."""
    return array("I", bytes(4 * words))


def without(bits: array[int], tokens: Sequence[int]) -> array[int]:
    """A copy of a mask that allows none of these tokens, some of which the vocabulary may lack."""
    left = bits[:]
    for token in (each for each in tokens if 0 <= each < 32 * len(bits)):
        left[token >> 5] &= ~(1 << (token & 31))
    return left


class Matcher(Protocol):
    """A grammar behind some output tokens.

    A function of both: made anew and fed the same tokens it says the same. Belongs to one thread at a time. Each method
    but `accept` raises GrammarFailed when the grammar turns out to need more than its limits allow; the matcher is of
    no use then."""

    @property
    def closes_at(self) -> int:
        """With more room than this `closing` answers at once; with less it takes as long as some tens of masks."""

    def mask(self, bits: Bits) -> None:
        """Write the tokens that may come next. End-of-sequence tokens are among them where the output may end."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Go on behind these tokens, none of which ends the sequence; returns how many of them the grammar took."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""

    def closing(self, room: int) -> int | None:
        """The token to take now if an output of JSON is to end within `room` tokens.

        None: there is room to go on freely, the output ends here in any case, or it cannot end in time (see
        structured_output/forced_end.py)."""


class Compiler(Protocol):
    """Makes matchers for one vocabulary. From any thread, several at once."""

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher before the first token. Raises InvalidRequest."""
