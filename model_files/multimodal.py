"""Text part of multimodal checkpoints: its section of config.json and its tensors."""

from __future__ import annotations

from typing import Any

TEXT_SERVED = ("gemma3", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Model types whose text part runs as a decoder by itself."""
_OMITTED = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
    }
}
"""Fields that published checkpoints omit because they equal transformers' defaults."""
_NESTED = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_TEXT = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a config.json: `text_config` of multimodal models, else all of it."""
    nested = config.get("text_config")
    if not isinstance(nested, dict) or "vocab_size" in config:
        return config
    return _OMITTED.get(str(nested.get("model_type")), {}) | nested


def is_multimodal(config: dict[str, Any]) -> bool:
    """Return whether the model is multimodal. Some keep the text's settings at the top, beside vision_config."""
    return text_config(config) is not config or isinstance(config.get("vision_config"), dict)


def text_name(name: str) -> str:
    """Return a tensor's name in a text-only checkpoint; unchanged if it is no part of the text."""
    for prefix, plain in _NESTED.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def is_text(name: str) -> bool:
    """Return whether the tensor is a part of the text."""
    return text_name(name).startswith(_TEXT)
