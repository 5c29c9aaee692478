from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from kvferry.model_files.gguf_pre_tokenizers import pre_tokenizer
from kvferry.model_files.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, build_tokenizer
from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.protocol.errors import ConfigError
from tests.vocabularies import sentencepiece

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(pre: str, **more: Any) -> dict[str, Any]:
    tokens = [*ALPHABET, "12", "123", "Ġa", "<bos>", "<mark>"]
    types = [NORMAL] * (len(tokens) - 2) + [CONTROL, USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["1 2", "12 3", "Ġ a"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        **more,
    }


def tokens_of(metadata: dict[str, Any], text: str, **options: Any) -> list[str]:
    found: list[str] = build_tokenizer(metadata).encode(text, **options).tokens
    return found


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "3", "4", "Ġa"]),
        ("qwen2", ["1", "2", "3", "4", "Ġa"]),
        ("qwen35", ["1", "2", "3", "4", "Ġa"]),
        ("gpt-2", ["123", "4", "Ġa"]),
        ("lfm2", ["123", "4", "Ġa"]),
        ("falcon-h1", ["123", "4", "Ġa"]),
        ("llama-bpe", ["123", "4", "Ġa"]),
        ("gpt-4o", ["123", "4", "Ġa"]),
        ("tekken", ["1", "2", "3", "4", "Ġa"]),
        ("default", ["123", "4", "Ġa"]),
    ],
)
def test_pre_tokenizers_split_numbers_as_their_models_do(pre: str, expected: list[str]) -> None:
    assert tokens_of(byte_level(pre), "1234 a", add_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("chatglm-bpe", ["It", "'s", " ", "123", "45", " naïve", "\n\n", "日本", ".x"]),
        ("glm4", ["It", "'s", " ", "123", "45", " naïve", "\n\n", "日本", ".x"]),
        ("minimax-m2", ["It's", " ", "123", "45", " naïve", "\n\n", "日本", ".x"]),
        ("hunyuan", ["It", "'s", " ", "1", "2", "3", "4", "5", " naïve", "\n\n", "日本", ".x"]),
        ("hunyuan-dense", ["It", "'s", " ", "123", "45", " naïve", "\n\n", "日本", ".x"]),
        ("deepseek-v3", ["It", "'s", " ", "123", "45", " naïve", "\n\n", "日本", ".x"]),
        ("deepseek-llm", ["It", "'", "s", " ", "12345", " na", "ï", "ve", "\n", "\n", "日本", ".", "x"]),
        ("deepseek-coder", ["It", "'", "s", " ", "1", "2", "3", "4", "5", " naïve", "\n", "\n", "日本", ".", "x"]),
        ("seed-coder", ["It", "'s", " ", "1", "2", "3", "4", "5", " naïve", "\n\n", "日本", ".x"]),
        ("exaone4", ["It", "'s", " 12345", " naïve", "\n", "\n", "日本", ".", "x"]),
        ("exaone-moe", ["It", "'s", " ", "1", "2", "3", "4", "5", " naïve", "\n\n", "日本", ".x"]),
        ("tiny_aya", ["It's", " ", "12", "345", " naïve", "\n\n", "日本", ".x"]),
    ],
)
def test_pre_tokenizers_of_families_cut_as_llama_cpp_does(pre: str, pieces: list[str]) -> None:
    splitter, text = pre_tokenizer(pre), "It's 12345 naïve\n\n日本.x"
    found = splitter.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == pieces


@pytest.mark.parametrize(("pre", "words"), [("qwen35", 1), ("qwen2", 4)])
def test_qwen_3_5_keeps_marks_with_the_letters_before_them(pre: str, words: int) -> None:
    """Vowel signs of Devanagari are marks, which no normalisation joins with letters."""
    splitter = build_tokenizer(byte_level(pre)).pre_tokenizer
    assert len(splitter.pre_tokenize_str("हिन्दी")) == words


@pytest.mark.parametrize(
    "pre",
    [
        *("smollm", "qwen2", "qwen35", "gpt-2", "llama-bpe", "gpt-4o", "tekken", "default", "seed-coder", "exaone-moe"),
        *("deepseek-llm", "deepseek-coder", "deepseek-v3", "tiny_aya"),
    ],
)
@given(st.text(max_size=20).filter(lambda text: text.isascii()))
@settings(max_examples=20, deadline=None)
def test_pre_tokenizers_lose_nothing(pre: str, text: str) -> None:
    tokenizer = build_tokenizer(byte_level(pre))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_begin_token_follows_the_file_else_llama_cpp() -> None:
    assert tokens_of(byte_level("llama-bpe"), "a") == ["<bos>", "a"]
    assert tokens_of(byte_level("lfm2"), "a") == ["<bos>", "a"]
    assert tokens_of(byte_level("smollm"), "a") == ["a"]
    assert tokens_of(byte_level("smollm", **{"tokenizer.ggml.add_bos_token": True}), "a") == ["<bos>", "a"]
    assert tokens_of(byte_level("llama-bpe", **{"tokenizer.ggml.add_bos_token": False}), "a") == ["a"]


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    tokenizer = TextTokenizer(build_tokenizer(byte_level("smollm")))
    ids = tokenizer.library.encode("<bos>a<mark>").ids
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "a<mark>"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "martian"),
        ({"tokenizer.ggml.model": "t5"}, "t5"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer"),
    ],
)
def test_unknown_kinds_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_tokenizer({**byte_level("smollm"), **change})


def best_pair_first(metadata: dict[str, Any], text: str) -> list[str]:
    """SentencePiece's BPE by definition: join the neighbours whose union scores highest, leftmost first."""
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not joins:
            return [
                token
                for part in parts
                for token in ([part] if part in scores else [f"<0x{b:02X}>" for b in part.encode()])
            ]
        at = min(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(st.text("abc é", min_size=1, max_size=16))
@settings(deadline=None)
def test_sentencepiece_joins_the_best_pair_first(text: str) -> None:
    metadata = sentencepiece()
    assert tokens_of(metadata, text, add_special_tokens=False) == best_pair_first(metadata, text)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁<"), max_size=16))
@settings(deadline=None)
def test_sentencepiece_round_trip(text: str) -> None:
    tokenizer = build_tokenizer(sentencepiece())
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_sentencepiece_begins_with_bos_and_needs_scores() -> None:
    assert tokens_of(sentencepiece(), "ab") == ["<s>", "▁ab"]
    with pytest.raises(ConfigError, match="scores"):
        build_tokenizer({**sentencepiece(), "tokenizer.ggml.scores": []})


def gemma4(**more: Any) -> dict[str, Any]:
    tokens = ["<pad>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\n", "\n\n", "▁", *"abc", "ab"]
    tokens += ["▁ab", "c\n", "<|turn>"]
    types = [CONTROL] * 2 + [UNKNOWN] + [BYTE] * 256 + [NORMAL] * 9 + [CONTROL]
    merges = ["a b", "▁ ab", "\n \n", "c \n"]
    frame = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.unknown_token_id": 2, "tokenizer.ggml.merges": merges}
    kinds = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    return {"tokenizer.ggml.model": "gemma4", **kinds, **frame, **more}


def test_gemma_4_merges_in_order_with_line_breaks_apart_and_bytes_for_what_is_unknown() -> None:
    text = "ab ab\n\nc\né<|turn>"
    pieces = ["ab", "▁ab", "\n\n", "c", "\n", "<0xC3>", "<0xA9>", "<|turn>"]
    assert tokens_of(gemma4(), text, add_special_tokens=False) == pieces
    assert tokens_of(gemma4(), "ab") == ["<bos>", "ab"]
    tokenizer = build_tokenizer(gemma4())
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == f"<bos>{text}"
