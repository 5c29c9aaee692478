"""What is put together from known words is what the whole text encodes to."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvferry.router.text.word_cache
from kvferry.router.text.token_cache import CUT
from kvferry.router.text.word_cache import SPACE, WordCache
from tests.router.text.test_token_cache import CORPUS, KINDS, drawn, refused


def words_of(tokenizer, most=2**16, encoded=None):
    def encode(some):
        if encoded is not None:
            encoded.extend(some)
        return [each.ids for each in tokenizer.encode_batch_fast(list(some), add_special_tokens=False)]

    return WordCache(tokenizer, encode, most)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("most", "learned"), [(2**16, 32), (20, 3)])
def test_words_make_the_whole(kind, most, learned, monkeypatch):
    monkeypatch.setattr(kvferry.router.text.word_cache, "MAX_NEW_WORDS", learned)
    tokenizer, source = KINDS[kind], random.Random(1)
    words = words_of(tokenizer, most)
    assert words.apart
    for number in range(200):
        text, special = drawn(source), number % 2 == 0
        assert words.ids(text, add_special_tokens=special) == tokenizer.encode(text, add_special_tokens=special).ids
        assert len(words._known) <= most


def test_only_new_words_are_encoded():
    encoded: list[str] = []
    words, source = words_of(KINDS["demo"], encoded=encoded), random.Random(1)
    for _ in range(50):
        words.ids(" ".join(source.choices(CORPUS.split(), k=100)), add_special_tokens=False)
    encoded.clear()
    words.ids(" ".join(source.choices(CORPUS.split(), k=100)), add_special_tokens=False)
    assert sum(map(len, encoded)) < 100


def test_a_text_of_new_words_costs_little_more_than_itself():
    encoded: list[str] = []
    words = words_of(KINDS["demo"], encoded=encoded)
    text = " ".join(f"word{number}x" for number in range(500))
    assert words.ids(text, add_special_tokens=False) == KINDS["demo"].encode(text, add_special_tokens=False).ids
    assert len(encoded) == 1 + kvferry.router.text.word_cache.MAX_NEW_WORDS


@pytest.mark.parametrize("kind", refused())
def test_texts_of_other_tokenizers_are_not_cut(kind):
    assert not words_of(refused()[kind]).apart


@given(st.text(" aZ09!~.\u00e9\u2014\n\t@[`{|", max_size=40))
def test_words_are_cut_where_parts_are(text: str) -> None:
    first, *words = SPACE.split(text)
    assert [first, *(" " + word for word in words)] == CUT.split(text)
    assert all(word[0].isascii() and word[0].isalpha() for word in words)  # so that none is taken for a first word
