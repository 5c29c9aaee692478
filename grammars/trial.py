"""Whether a grammar is fit to be used: it is compiled, and some output is drawn by it, against the clock.

Seconds are of computation on the calling thread, so what else the machine does is not held against a grammar.
"""

from __future__ import annotations

import random
import time

import numpy as np

from grammars.seam import Bits, Compiler, Matcher, words_for
from protocol.errors import GrammarFailed, InvalidRequest
from protocol.work import Grammar

COMPILE_S = 2.0
TOKEN_S = 0.1
"""For compiling, and for each token of the output."""
TOKENS = 48


def _why(matcher: Matcher, bits: Bits) -> str:
    """A token that the grammar had allowed was not accepted: usually for a limit, which the next mask tells."""
    try:
        matcher.mask(bits)
    except GrammarFailed as error:
        return error.message
    return "the grammar does not accept what it allows"


def check(grammar: Grammar, compiler: Compiler, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
    """Raises InvalidRequest naming the limit."""
    began = time.thread_time()
    matcher = compiler.compile(grammar)
    spent = time.thread_time() - began
    if spent > COMPILE_S:
        raise InvalidRequest(f"the grammar took {spent:.1f} s to compile; the limit is {COMPILE_S:.0f} s")
    bits, chance = np.zeros(words_for(vocab_size), dtype=np.int32), random.Random(0)
    for place in range(TOKENS):
        began = time.thread_time()
        try:
            matcher.mask(bits)
        except GrammarFailed as error:
            raise InvalidRequest(error.message) from None
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little", count=vocab_size))
        if not len(allowed):
            raise InvalidRequest("the grammar allows no output" if not place else "the grammar leads to a dead end")
        going_on = allowed[~np.isin(allowed, eos_token_ids)]
        if not len(going_on):
            return
        if not matcher.accept([int(going_on[chance.randrange(len(going_on))])]):
            raise InvalidRequest(_why(matcher, bits))
        spent = time.thread_time() - began
        if spent > TOKEN_S:
            raise InvalidRequest(f"the grammar took {spent:.2f} s for one token; the limit is {TOKEN_S:.1f} s")
