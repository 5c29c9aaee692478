"""`check` tries a grammar against the clock: compiles it and draws some output by it, within CPU time limits.

Times are CPU seconds of the calling thread, so other load on the machine does not count against a grammar.
"""

from __future__ import annotations

import random
import time
from array import array

from kvferry.protocol.errors import GrammarFailed, InvalidRequest
from kvferry.protocol.work import Grammar
from kvferry.structured_output.interface import Bits, Compiler, Matcher, empty_mask, without, words_for

COMPILE_S = 2.0
"""Limit of CPU time to compile a grammar, in seconds."""
TOKEN_S = 0.1
"""Limit of CPU time for each token of the output, in seconds."""
TOKENS = 48
"""Longest trial output, in tokens."""


def _why(matcher: Matcher, bits: Bits) -> str:
    """Say why the grammar rejected a token that it had allowed: usually a limit, which the next mask names."""
    try:
        matcher.mask(bits)
    except GrammarFailed as error:
        return error.message
    return "the grammar rejects its own output"


def _allowed(bits: array[int], place: int) -> int:
    """Return the token at this index among those that a mask allows."""
    for at, word in enumerate(bits):
        count = word.bit_count()
        if place < count:
            return 32 * at + [bit for bit in range(32) if word >> bit & 1][place]
        place -= count
    raise IndexError(place)


def check(grammar: Grammar, compiler: Compiler, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
    """Raise InvalidRequest naming the limit if a trial output of the grammar exceeds one."""
    began = time.thread_time()
    matcher = compiler.compile(grammar)
    spent = time.thread_time() - began
    if spent > COMPILE_S:
        raise InvalidRequest(f"the grammar took {spent:.1f} s to compile; the limit is {COMPILE_S:.0f} s")
    bits, chance = empty_mask(words_for(vocab_size)), random.Random(0)  # noqa: S311 - the same each time
    for place in range(TOKENS):
        began = time.thread_time()
        try:
            matcher.mask(bits)
        except GrammarFailed as error:
            raise InvalidRequest(error.message) from None
        if not any(bits):
            raise InvalidRequest("the grammar allows no output" if not place else "the grammar leads to a dead end")
        going_on = without(bits, eos_token_ids)
        count = sum(map(int.bit_count, going_on))
        if not count:
            return
        if not matcher.accept([_allowed(going_on, chance.randrange(count))]):
            raise InvalidRequest(_why(matcher, bits))
        spent = time.thread_time() - began
        if spent > TOKEN_S:
            raise InvalidRequest(f"the grammar took {spent:.2f} s for one token; the limit is {TOKEN_S:.1f} s")
