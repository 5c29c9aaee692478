"""Texts for encoders: special tokens around them, pairs with their boundary, cutting that keeps what closes them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from kvferry.protocol.errors import ContextLengthExceeded
from kvferry.protocol.settings import RouterSettings
from kvferry.router.text.encoding import LONG_CHARS, Bound, Encoder
from kvferry.router.text.loader import load_text_model
from kvferry.router.text.text_model import TextModel
from tests.wordpiece import VOCAB_SIZE, save_wordpiece

A = 5
"""Token of the letter a at a word's beginning; inside a word 26 more."""


@pytest.fixture
def text(tmp_path: Path) -> TextModel:
    config = {"model_type": "bert", "vocab_size": VOCAB_SIZE, "hidden_size": 8, "max_position_embeddings": 64}
    (save_wordpiece(tmp_path) / "config.json").write_text(json.dumps(config))
    return load_text_model(RouterSettings(model=(str(tmp_path),)))


def test_a_text_and_a_pair(text: TextModel) -> None:
    assert text.task.encoder
    assert text.encode("a b") == [2, A, A + 1, 3]
    assert text.encode_pair("a", "b c") == ([2, A, 3, A + 1, A + 2, 3], 3)


def test_cutting_keeps_the_closing_token(text: TextModel) -> None:
    cut = text.tokenizer.cut
    assert cut(text.encode("a b c"), 5) == [2, A, A + 1, A + 2, 3]
    assert cut(text.encode("a b c"), 4) == [2, A, A + 1, 3]
    assert cut(text.encode("a b c"), 1) == [3]
    ids, second = text.encode_pair("a", "b c")
    assert cut(ids, 5) == [2, A, 3, A + 1, 3]
    assert second == 3


def test_long_pairs_are_encoded_alike_beside_the_loop(text: TextModel) -> None:
    pairs = [("a", "b " * LONG_CHARS), ("a", "b")]
    encoder = Encoder(text)
    found = asyncio.run(encoder.encode_pairs(pairs, Bound(2 * LONG_CHARS, "text_2")))
    assert found == [text.encode_pair(*pair) for pair in pairs]
    with pytest.raises(ContextLengthExceeded):
        asyncio.run(encoder.encode_pairs([("a", "b" * 10**6)], Bound(16, "text_2")))
