"""A tokenizer as BERT has it: letters, [CLS] before a text, [SEP] behind each, token types for pairs."""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = string.ascii_lowercase
VOCAB_SIZE = len(MARKS) + 2 * len(LETTERS)


def wordpiece() -> Tokenizer:
    """Each letter is a token."""
    words = [*MARKS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    made = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    made.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.decoder = decoders.WordPiece()
    return made


def save_wordpiece(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    wordpiece().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", "unk_token": "[UNK]"}))
    return path
