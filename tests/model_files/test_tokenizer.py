from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvferry.model_files.gguf import read_gguf
from kvferry.model_files.source import resolve
from kvferry.model_files.tokenizer import BYTE_ALPHABET, TextTokenizer
from kvferry.protocol.errors import ConfigError
from tests.api_parts import demo_text
from tests.vocabularies import CHARS

TEXT = st.text(CHARS, max_size=60)
SPECIALS = [demo_text().tokenizer.token(index) for index in range(17)]
"""Texts that are tokens by themselves."""


def pieces(text: str) -> list[str]:
    tokenizer = demo_text().tokenizer
    return [tokenizer.token(index) for index in demo_text().encode(text, add_special_tokens=False)]


def test_digits_of_the_demo_model_are_tokens_of_their_own() -> None:
    assert pieces("12345 and 3.14") == ["1", "2", "3", "4", "5", "Ġand", "Ġ", "3", ".", "1", "4"]
    assert pieces("year 2026") == ["year", "Ġ", "2", "0", "2", "6"]


def test_known_ids_of_the_demo_model() -> None:
    tokenizer = demo_text().tokenizer
    assert demo_text().encode("<|im_start|>user\nHi<|im_end|>") == [1, 4093, 198, 26843, 2]
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.vocab_size == demo_text().facts.vocab_size == 49152


def test_special_tokens_in_text_are_recognised_and_skipped_in_output() -> None:
    tokenizer = demo_text().tokenizer
    ids = demo_text().encode("a<|im_end|>b")
    assert 2 in ids
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


@given(TEXT)
@settings(max_examples=200, deadline=None)
def test_every_text_survives_the_round_trip(text: str) -> None:
    tokenizer = demo_text().tokenizer
    ids = demo_text().encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


class PlainBPE:
    """Byte-level BPE by definition, over the demo model's vocabulary and merges: digits alone, then GPT-2's words."""

    WORD = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def __init__(self) -> None:
        metadata = read_gguf(resolve("smollm2", weights=False).path).metadata
        self.vocab = {token: place for place, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.rank = {tuple(merge.split(" ")): place for place, merge in enumerate(metadata["tokenizer.ggml.merges"])}

    def encode(self, text: str) -> list[int]:
        words = [word for part in regex.split(r"(\p{N})", text) for word in self.WORD.findall(part)]
        return [self.vocab[token] for word in words for token in self.tokens(word) if token in self.vocab]

    def tokens(self, word: str) -> list[str]:
        parts = [SPELLING[byte] for byte in word.encode()]
        while ranks := [(self.rank[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in self.rank]:
            at = min(ranks)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts


SPELLING = {byte: char for char, byte in BYTE_ALPHABET.items()}


@pytest.fixture(scope="module")
def plain_bpe() -> PlainBPE:
    return PlainBPE()


@given(st.text(CHARS, max_size=30) | st.text("in 2026,3.14%'tsdon\n\t ½漢", max_size=40))
@example(
    "In 2026, 3.14% of 1,000,000 users paid $12.50!  two  spaces\n\n\tTabs 10\t20\n don't we'll I'M １２３ ² ٣٤ 👩‍👧"
)
@settings(max_examples=200, deadline=None)
def test_tokens_equal_those_of_a_plain_bpe(plain_bpe: PlainBPE, text: str) -> None:
    assume(not any(special in text for special in SPECIALS))
    assert demo_text().encode(text, add_special_tokens=False) == plain_bpe.encode(text)


def test_ids_without_a_token_have_no_bytes() -> None:
    assert demo_text().tokenizer.token_bytes(1_000_000) == b""


def test_a_directory_gives_its_tokenizer_json(tmp_path: Path) -> None:
    own = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.Sequence([decoders.ByteLevel()])
    own.enable_truncation(1)
    own.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer.from_directory(tmp_path)
    assert tokenizer.byte_level
    assert tokenizer.library.encode("abab").ids == [2, 2], "a tokenizer's own truncation must not cut prompts"


def test_a_directory_without_or_with_broken_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        TextTokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot read"):
        TextTokenizer.from_directory(tmp_path)
