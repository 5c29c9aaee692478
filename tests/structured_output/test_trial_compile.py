"""Outputs are drawn by a grammar before it is used, without numpy."""

from __future__ import annotations

import pytest

from kvferry.protocol.errors import InvalidRequest
from kvferry.structured_output.interface import empty_mask, without
from kvferry.structured_output.trial_compile import check
from tests.listed_grammars import ListedCompiler, listed

EOS, VOCABULARY = 63, 100


def test_a_trial_draws_a_whole_output() -> None:
    compiler = ListedCompiler(EOS)
    check(listed([1, 40, 99], [1, 40, 98]), compiler, VOCABULARY, (EOS,))
    assert compiler.masks == 4, "three tokens, and the end"


def test_a_grammar_that_allows_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="allows no output"):
        check(listed(), ListedCompiler(EOS), VOCABULARY, (EOS,))


def test_ends_that_the_vocabulary_lacks_are_no_harm() -> None:
    """A model's files may name such."""
    check(listed([5, 6]), ListedCompiler(EOS), VOCABULARY, (EOS, 10_000_000))


def test_a_mask_without_some_tokens() -> None:
    bits = empty_mask(4)
    bits[0], bits[3] = 0xFFFF_FFFF, 0b110
    left = without(bits, (0, 31, 97, 98, 999))
    assert list(left) == [0x7FFF_FFFE, 0, 0, 0]
    assert bits[0] == 0xFFFF_FFFF, "a copy"
