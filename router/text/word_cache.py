"""WordCache: cache of token ids by word for short texts; a lookup takes a fifth of the time of encoding.

Texts are cut as `token_cache` cuts long ones, at every allowed place, and for the same tokenizers: no token spans a
cut. Text without such places is encoded whole. The cache's timing tells a client almost nothing about others' texts: a
known word saves microseconds, and asking for it once makes it known."""

from __future__ import annotations

import re
from itertools import chain

from tokenizers import Tokenizer

from kvferry.router.text.token_cache import Encode, around, cuts

SPACE = re.compile(r" (?<=[!-~] )(?=[A-Za-z])", re.ASCII)
"""Space after an allowed cut (`token_cache.CUT`). The regex engine finds spaces quickly and checks only those."""
MAX_WORDS = 2**16
"""Largest number of cached words; beyond it the cache is cleared."""
MAX_WORD_CHARS = 32
"""Longest cached word, in characters."""
MAX_NEW_WORDS = 32
"""Largest number of new words of one text that are encoded separately, at several times the cost."""


class WordCache:
    """Word cache of one tokenizer; not thread-safe.

    `encode` returns the ids of each text, without the model's special tokens around it."""

    def __init__(self, tokenizer: Tokenizer, encode: Encode, max_words: int = MAX_WORDS) -> None:
        self._encode, self._max_words = encode, max_words
        self._around = around(tokenizer) if cuts(tokenizer) else None
        self._known: dict[str, list[int]] = {}
        """Ids by word without the space before it; a text's first word is stored with one."""

    @property
    def apart(self) -> bool:
        """Return whether the tokenizer's texts may be cut; `ids` may be called only then."""
        return self._around is not None

    def ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of the whole text."""
        assert self._around is not None
        before, after = self._around if add_special_tokens else ((), ())
        return [*before, *self._ids(text), *after]

    def _ids(self, text: str) -> list[int]:
        first, *words = SPACE.split(text)
        words.insert(0, " " + first)
        try:
            return list(chain.from_iterable(map(self._known.__getitem__, words)))
        except KeyError:
            return self._learned(text, words)

    def _learned(self, text: str, words: list[str]) -> list[int]:
        """Return the ids of a text with new words, some of which are kept."""
        new = set(words).difference(self._known)
        if len(new) > MAX_NEW_WORDS:
            learned = [word for word in new if len(word) <= MAX_WORD_CHARS][:MAX_NEW_WORDS]
            whole, *apart = self._encode([text, *map(_text, learned)])
            self._keep(dict(zip(learned, apart, strict=True)))
            return whole
        found = dict(zip(new, self._encode([*map(_text, new)]), strict=True))
        ids = list(chain.from_iterable(found[word] if word in found else self._known[word] for word in words))
        self._keep(found)
        return ids

    def _keep(self, found: dict[str, list[int]]) -> None:
        if len(self._known) + len(found) > self._max_words:
            self._known.clear()
        self._known.update((word, ids) for word, ids in found.items() if len(word) <= MAX_WORD_CHARS)


def _text(word: str) -> str:
    """Return the text of a word of the cache."""
    return word[1:] if word.startswith(" ") else " " + word
