"""Encoder architectures that kvferry supports, by config, and their longest text."""

from __future__ import annotations

from typing import Any

ENCODERS = frozenset(("bert", "roberta", "xlm-roberta", "camembert", "modernbert", "distilbert", "electra"))
"""Values of model_type that transformers runs with only token ids, an attention mask and token types."""
_OFFSET = frozenset(("roberta", "xlm-roberta", "camembert"))
"""Encoders whose first position is the padding token's id plus one."""


def is_encoder(config: dict[str, Any]) -> bool:
    """Return whether a config.json is of an encoder."""
    return config.get("model_type") in ENCODERS and not config.get("is_decoder")


def encoder_length(config: dict[str, Any], sentences: dict[str, Any]) -> int:
    """Return the longest text in tokens; 0: unknown. sentences: sentence_bert_config.json; empty without one."""
    length = int(config.get("max_position_embeddings") or 0)
    if config.get("model_type") in _OFFSET and length:
        length -= int(config.get("pad_token_id") or 0) + 1
    return min(length, int(sentences.get("max_seq_length") or length))
