"""Multimodal checkpoints: the text part of config.json, names of its tensors, and model types whose towers run."""

from __future__ import annotations

from typing import Any

IMAGES_SERVED = (
    *("gemma3", "idefics3", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl"),
    *("qwen3_vl_moe", "smolvlm"),
)
MEDIA_SERVED = dict.fromkeys(IMAGES_SERVED, "image") | {"qwen2_audio": "audio", "voxtral": "audio"}
"""Modality of the media of prompts by model type, where a tower runs beside the text (`engine.media.loader`)."""
TEXT_SERVED = (*MEDIA_SERVED, "gemma3n", "gemma4", "lfm2_vl", "llama4")
"""Model types whose text part runs as a decoder by itself."""
_OMITTED = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
    },
    "qwen2": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
}
"""Fields that published checkpoints omit because they equal transformers' defaults."""
_NESTED = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_TEXT = (
    *("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head."),
    *("model.embed_tokens_per_layer.", "model.per_layer_", "model.altup_"),
)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a config.json: `text_config` of multimodal models, else all of it."""
    nested = config.get("text_config")
    if not isinstance(nested, dict) or "num_hidden_layers" in config:
        return config
    return _OMITTED.get(str(nested.get("model_type")), {}) | nested


def is_multimodal(config: dict[str, Any]) -> bool:
    """Return whether the model is multimodal. Some keep the text's settings at the top, beside vision_config."""
    return text_config(config) is not config or isinstance(config.get("vision_config"), dict)


def media_taken(config: dict[str, Any]) -> str | None:
    """Return the modality of the checkpoint's tower that runs beside its text: image or audio; None: there is none."""
    return MEDIA_SERVED.get(str(config.get("model_type"))) if is_multimodal(config) else None


def text_name(name: str) -> str:
    """Return a tensor's name in a text-only checkpoint; unchanged if it is not part of the text."""
    for prefix, plain in _NESTED.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def is_text(name: str) -> bool:
    """Return whether the tensor is a part of the text."""
    return text_name(name).startswith(_TEXT)
