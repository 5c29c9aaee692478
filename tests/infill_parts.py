"""The demo model's text side with tokens of code models."""

from __future__ import annotations

from dataclasses import replace

from tokenizers import AddedToken, Tokenizer

from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.router.text.text_model import TextModel
from tests.api_parts import demo_text


def text_with(*tokens: str) -> TextModel:
    """Return the demo model's text side with these special tokens in its vocabulary."""
    demo = demo_text()
    library = Tokenizer.from_str(demo.tokenizer.library.to_str())
    library.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in tokens])
    size = library.get_vocab_size(with_added_tokens=True)
    return replace(demo, tokenizer=TextTokenizer(library), facts=replace(demo.facts, vocab_size=size))
