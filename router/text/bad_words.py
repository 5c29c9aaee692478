"""bad_words as token sequences."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.router.text.text_model import TextModel


def bad_word_ids(words: Sequence[str], text: TextModel) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at the beginning of a text and, where that is another sequence of as many tokens, as it
    stands behind a space (as vLLM has it: one that is longer begins with a token of the space alone)."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tuple(text.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(text.encode(" " + word.lstrip(), add_special_tokens=False))
        found[bare] = None
        if spaced and bare and spaced[0] != bare[0] and len(spaced) == len(bare):
            found[spaced] = None
    found.pop((), None)
    return tuple(found)
