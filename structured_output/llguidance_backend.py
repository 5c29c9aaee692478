"""LlguidanceBackend: compiles grammars by the llguidance library, and advances matchers token by token.

It was chosen over xgrammar, which needs torch and transformers (routers check grammars, too), takes up to 20 s to
compile a schema of a hundred lines, and ignores keywords that it cannot enforce.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvferry.protocol.errors import ConfigError, GrammarFailed, InvalidRequest, reason
from kvferry.protocol.work import Grammar
from kvferry.structured_output.forced_end import ForcedEnd, Marks, marks_of
from kvferry.structured_output.interface import Bits, Matcher, words_for
from kvferry.structured_output.replayed_rollback import ReplayedRollback, needs_replay
from kvferry.structured_output.to_lark import lark_of
from kvferry.structured_output.vocabulary import Vocabulary

MAX_LEXER_STATES = 50_000
"""Limit of lazily built states of all regular expressions of a grammar, 1 to 2 kB each."""
MAX_GRAMMAR_SIZE = 200_000
"""Limit of symbols in a grammar's rules."""
MAX_LEXER_WORK = 1_000_000
"""Limit of steps to build a grammar's regular expressions (about 20 ms)."""
KEPT = 128
"""Maximum number of compiled grammars in the cache, 0.1 to 2 MB each."""
MAX_STEP_LEXER_WORK = 100_000
"""Limit of regular-expression steps for one mask (about 7 ms)."""
MAX_STEP_ITEMS = 20_000
"""Limit of parser items for one mask (about 10 ms)."""


class LlguidanceBackend:
    """Grammar compiler for one vocabulary. Its construction holds the GIL for about a second."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raise ConfigError if the library cannot read this kind of tokenizer."""
        if not vocabulary.eos_token_ids:
            raise ConfigError("the model has no end-of-sequence token", param="model")
        try:
            self._tokenizer = LLTokenizer(
                vocabulary.tokenizer, n_vocab=vocabulary.vocab_size, eos_token=list(vocabulary.eos_token_ids)
            )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # ValueError, or a panic of the Rust library, which is not an Exception
            raise ConfigError(
                f"grammars are not supported for this tokenizer: {reason(error)}", param="model"
            ) from error
        self._marks = marks_of(
            self._tokenizer.tokenize_str,
            lambda token: self._tokenizer.decode_bytes([token]),
            vocabulary.eos_token_ids,
            words_for(vocabulary.vocab_size),
        )
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, _Matcher] = OrderedDict()
        self._specials: Collection[str] = vocabulary.specials
        self._limits = LLParserLimits(
            initial_lexer_fuel=MAX_LEXER_WORK,
            step_lexer_fuel=MAX_STEP_LEXER_WORK,
            step_max_items=MAX_STEP_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SIZE,
            verbose_errors=False,
        )

    def compile(self, grammar: Grammar) -> Matcher:
        """Return a matcher before the first token, from the cache if possible. Raises InvalidRequest."""
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
        if kept is None:
            kept = self._compile(grammar)
            with self._lock:
                self._kept[grammar] = kept
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return kept.copy()

    def _compile(self, grammar: Grammar) -> _Matcher:
        text = lark_of(grammar)
        if any(special in text for special in self._specials):
            # The library tokenises forced text as a whole, so text that looks like a special token would become one.
            text = '%llguidance {"no_forcing": true}\n' + text
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(text), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be used: {_summary(matcher)}")
        replayed = ReplayedRollback(matcher) if needs_replay(text) else None
        return _Matcher(matcher, self._marks if "%json" in text else None, replayed)


class _Matcher:
    def __init__(self, matcher: LLMatcher, marks: Marks | None, replayed: ReplayedRollback | None) -> None:
        self._matcher, self._marks, self._replayed = matcher, marks, replayed
        self._closing = ForcedEnd(marks) if marks is not None else None

    def copy(self) -> _Matcher:
        replayed = self._replayed.copy() if self._replayed is not None else None
        return _Matcher(self._matcher.deep_copy(), self._marks, replayed)

    @property
    def closes_at(self) -> int:
        return 0 if self._closing is None else self._closing.look

    def closing(self, room: int) -> int | None:
        return None if self._closing is None else self._closing.token(room, self.copy)

    def mask(self, bits: Bits) -> None:
        self._matcher.unsafe_compute_mask_ptr(
            ctypes.addressof(ctypes.c_char.from_buffer(bits)), memoryview(bits).nbytes
        )
        self._check()

    def accept(self, token_ids: Sequence[int]) -> int:
        tokens = list(token_ids)
        count = self._matcher.try_consume_tokens(tokens)
        if self._replayed is not None:
            self._replayed.accepted(tokens[:count])
        return count

    def rollback(self, count: int) -> None:
        if count:
            if self._replayed is not None:
                self._matcher = self._replayed.before(count)
            else:
                self._matcher.rollback(count)
            self._closing = ForcedEnd(self._marks) if self._marks is not None else None
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(f"the grammar needs more than its limits allow: {_summary(self._matcher)}")


def _summary(matcher: LLMatcher) -> str:
    """Return the library's error in one line, without the quoted grammar."""
    reasons = []
    for line in map(str.strip, matcher.get_error().splitlines()):
        if line[:1].isdigit() or line.startswith(("<", "^")):
            break
        reasons += [line] if line else []
    text = " ".join(reasons) or "no reason given"
    return "it allows no output" if text == "NoExtensionBias" else text[:300]
