"""Converts the words of `bad_words` into the token sequences that outputs must not contain."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.router.text.text_model import TextModel


def bad_word_ids(words: Sequence[str], text: TextModel) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of each word, without and with a leading space.

    As in vLLM, the form with a space is kept only if it differs and has as many tokens: a longer one begins with a
    token of the space alone."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(text.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(text.encode(" " + word.lstrip(), add_special_tokens=False))
        found[plain] = None
        if spaced and plain and spaced[0] != plain[0] and len(spaced) == len(plain):
            found[spaced] = None
    found.pop((), None)
    return tuple(found)
