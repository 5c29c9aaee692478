"""Vocabulary: the tokenizer and token ids of a model that a grammar compiler needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Vocabulary of a model.

    tokenizer: text of tokenizer.json. vocab_size: width of the logits, at least the tokenizer's size. specials:
    spellings of the special tokens."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    specials: tuple[str, ...]
