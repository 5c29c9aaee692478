"""GrammarMask: bit mask of the tokens that one request's grammar allows next, and the state of making it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Grammar
from kvferry.structured_output.interface import Matcher

TRIALS = 4
"""Masks of a request that grammar threads make before the engine thread does.

A step thus waits for a slow mask, some milliseconds at most, once per TRIALS masks."""
TRIALS_IF_SLOW = 256
"""Masks of a request that grammar threads make after a slow one."""
BAN = -100.0
"""A logit_bias that bans its token."""


@dataclass(slots=True, eq=False)
class GrammarMask:
    """Mask of one request, owned by the engine thread or a grammar thread in turn.

    The engine thread owns it from `ready` to the next `advance`, and while it is deferred.

    token_ids, prompt_len   of the request: tokens after the prompt are output
    upto                    number of output tokens that the mask should follow; behind: number that it does follow
    bits                    int32, see structured_output.interface: tokens that may be drawn next
    written                 bits were written at least once
    closing                 the output is being ended before max_tokens would cut it
    ready, late             it is made; it was not when it was needed, or will not be
    trials, deferred        masks to make on grammar threads before the engine thread does; the engine thread makes it
    error                   why there is none, and why the request must end
    """

    grammar: Grammar
    params: SamplingParams
    token_ids: Sequence[int]
    prompt_len: int
    bits: np.ndarray
    matcher: Matcher | None = None
    upto: int = 0
    behind: int = 0
    spent_s: float = 0.0
    slow: bool = False
    late: bool = False
    ready: bool = False
    trials: int = TRIALS
    deferred: bool = False
    closing: bool = False
    written: bool = False
    error: KvferryError | None = None
    after: list[Callable[[], None]] = field(default_factory=list)
    _may_close: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        bans = params.bad_words or params.allowed_token_ids is not None or any(b <= BAN for _, b in params.logit_bias)
        self._may_close = not (bans or params.ignore_eos)

    def may_close(self, place: int) -> bool:
        """Return whether output token `place` may be chosen to end the output in time.

        False if the request bans tokens, since the one token left might be among them, or requires more tokens: such an
        output is cut."""
        return self._may_close and place >= self.params.min_tokens

    @property
    def is_outdated(self) -> bool:
        """Return whether the output has changed since the mask was last begun."""
        return len(self.token_ids) - self.prompt_len != self.upto

    @property
    def is_fast(self) -> bool:
        """Return whether the next mask will probably be made in microseconds, so that the engine thread may make it."""
        matcher = self.matcher
        if self.trials or matcher is None:
            return False
        return not self.may_close(self.upto) or self.params.max_tokens - self.upto > matcher.closes_at

    @property
    def blocks(self) -> bool:
        """Return whether the request must not be scheduled now."""
        return self.late and not self.ready


def ban_ends(mask: GrammarMask) -> None:
    """Ban tokens that end the request as long as the grammar allows others.

    That holds before min_tokens, and for an end of sequence under ignore_eos."""
    params = mask.params
    early = mask.behind < params.min_tokens
    if not (early or params.ignore_eos):
        return
    ends = {*(params.eos_token_ids if early or params.ignore_eos else ()), *(params.stop_token_ids if early else ())}
    bits = mask.bits.view(np.uint32)
    allowed = [token for token in ends if 0 <= token < 32 * len(bits) and bits[token // 32] >> token % 32 & 1]
    for token in allowed:
        bits[token // 32] ^= 1 << token % 32
    if allowed and not bits.any():
        for token in allowed:
            bits[token // 32] |= 1 << token % 32
