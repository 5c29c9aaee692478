"""Vocabulary facts of a model that a grammar compiler needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """tokenizer: tokenizer.json's text; vocab_size: of the logits, at least the tokenizer's; specials: how special
    tokens are spelled."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    specials: tuple[str, ...]
