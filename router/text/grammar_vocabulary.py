"""Converts a model's tokenizer into the Vocabulary that structured_output checks grammars with."""

from __future__ import annotations

from kvferry.router.text.text_model import TextModel
from kvferry.structured_output.vocabulary import Vocabulary


def vocabulary_of(text: TextModel) -> Vocabulary:
    """Return the vocabulary of a served model; serialising its tokenizer takes some tenths of a second."""
    tokenizer, facts = text.tokenizer, text.facts
    size = max(facts.vocab_size, tokenizer.vocab_size)
    return Vocabulary(tokenizer.library.to_str(), size, facts.eos_token_ids, tokenizer.special_texts)
