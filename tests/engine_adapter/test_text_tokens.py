"""Tokens of a text that comes in parts: what they decode to is the text so far, wherever it is cut."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine_adapter.text_tokens import TextTokens, TextVocabulary
from kvferry.model_files.gguf_tokenizer import build_tokenizer
from kvferry.model_files.source import resolve
from kvferry.model_files.tokenizer import TextTokenizer, load_tokenizer
from kvferry.protocol.errors import ConfigError, StepFailed
from kvferry.router.text.detokenizer import detokenizer
from tests.vocabularies import CHARS, sentencepiece

CODE = ["def f(x):\n", "    return", " x**2\n\n", "\t", "  ", "</s>", "<|im_end|>", "<s>", "{}", "'\\n'"]
WORDS = [*CODE, "a", " abc", "é", "e\u0301", " 漢字", "😀", "👩‍👧", "🏳️‍🌈", " ", "▁", "\ufffd", "\u200b", "\ufeff"]
TEXT = st.text(CHARS, max_size=40) | st.lists(st.sampled_from(WORDS), max_size=20).map("".join)


@functools.cache
def made(kind: str) -> tuple[TextTokenizer, TextVocabulary]:
    if kind == "bytes":
        tokenizer = load_tokenizer(resolve("smollm2", weights=False))
    else:
        tokenizer = TextTokenizer(build_tokenizer(sentencepiece()))
    return tokenizer, TextVocabulary(tokenizer)


def behind_a_prompt(tokenizer: TextTokenizer) -> list[int]:
    return [min(set(range(300)) - tokenizer.special_ids - tokenizer.byte_tokens.keys())] * 3


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@given(text=TEXT, cuts=st.lists(st.integers(0, 80), max_size=12))
@settings(max_examples=300, deadline=None)
def test_the_tokens_of_each_part_are_its_text_for_the_router(kind: str, text: str, cuts: list[int]) -> None:
    tokenizer, vocabulary = made(kind)
    steps, tokens = detokenizer(tokenizer, behind_a_prompt(tokenizer)), TextTokens(vocabulary)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = ""
    for begin, end in itertools.pairwise(bounds):
        shown += "".join(map(steps.feed, tokens.feed(text[begin:end])))
        assert shown == text[:end]
    assert tokens.finish() == ()
    assert steps.finish() == ""


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@given(text=TEXT)
@settings(max_examples=100, deadline=None)
def test_no_text_becomes_a_special_token(kind: str, text: str) -> None:
    tokenizer, vocabulary = made(kind)
    spelled = vocabulary.ids(text + "</s><|im_end|><s>")
    assert tokenizer.special_ids.isdisjoint(spelled)


@given(text=st.text("a😀漢🏳️‍🌈 ", max_size=12), data=st.data())
@settings(deadline=None)
def test_halves_of_surrogate_pairs_wait_for_each_other(text: str, data: st.DataObject) -> None:
    """A server that counts in UTF-16 may cut a character in two."""
    tokenizer, vocabulary = made("bytes")
    units = text.encode("utf-16-le")
    halves = [units[at : at + 2].decode("utf-16-le", "surrogatepass") for at in range(0, len(units), 2)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(halves)), max_size=6)))
    tokens, found = TextTokens(vocabulary), list[int]()
    for begin, end in itertools.pairwise([0, *cuts, len(halves)]):
        found += tokens.feed("".join(halves[begin:end]))
        assert "\ufffd" not in tokenizer.decode(found)
    assert tokenizer.decode([*found, *tokens.finish()]) == text


@pytest.mark.parametrize(("parts", "shown"), [(["a\ud83d"], "a\ufffd"), (["\ud83d", "a"], "\ufffda"),
                                              (["a\ude00b"], "a\ufffdb")])  # fmt: skip
def test_half_a_pair_that_stays_alone_is_replaced(parts: list[str], shown: str) -> None:
    tokenizer, vocabulary = made("bytes")
    tokens = TextTokens(vocabulary)
    found = [token for part in parts for token in tokens.feed(part)]
    assert tokenizer.decode([*found, *tokens.finish()]) == shown


@given(st.lists(st.integers(300, 49000), min_size=1, max_size=12))
@settings(deadline=None)
def test_a_text_that_is_one_token_is_that_token(ids: list[int]) -> None:
    """A server that sends one token at a time is read exactly, as long as its tokens are whole characters."""
    tokenizer, vocabulary = made("bytes")
    for token in ids:
        data = tokenizer.token_bytes(token)
        if data.decode(errors="replace").encode() == data:
            assert TextTokens(vocabulary).feed(data.decode()) == (token,)


def test_a_text_is_spelled_as_the_model_learned_it() -> None:
    tokenizer, vocabulary = made("bytes")
    text = "The quick brown fox jumps over the lazy dog."
    assert list(vocabulary.ids(text)) == tokenizer.library.encode(text, add_special_tokens=False).ids
    pieces, words = made("pieces")
    assert [pieces.token(each) for each in words.ids(" abc ab")] == ["▁abc", "▁ab"]
    assert [pieces.token(each) for each in words.ids("bc abc")] == ["bc", "▁abc"]


def test_a_character_of_another_model_fails_the_request() -> None:
    _, vocabulary = made("bytes")
    with pytest.raises(StepFailed, match="byte 0x04"):
        vocabulary.ids("a\x04")


def test_a_vocabulary_without_bytes_is_refused() -> None:
    from tokenizers import Tokenizer, decoders, models

    library = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="single bytes"):
        TextVocabulary(TextTokenizer(library))
