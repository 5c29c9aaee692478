"""Decoder architectures that kvferry's own kernels support, by config or GGUF header."""

from __future__ import annotations

from typing import Any

from kvferry.model_files.gguf import GGUFFile
from kvferry.model_files.multimodal import is_multimodal

DECODERS = frozenset(
    (
        *("cohere", "cohere2", "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss"),
        *("granite", "llama", "mistral"),
        *("mixtral", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl"),
        *("qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_text", "smollm3"),
    )
)
"""Values of model_type of the families in `engine.models.families`, for code that must not load torch."""

LATENT = frozenset(("deepseek_v2", "deepseek_v3"))
"""Values of model_type with latent attention."""


def own_alone(config: dict[str, Any]) -> str | None:
    """Return the feature of a checkpoint that only kvferry's decoder runs; None: transformers may run it, too."""
    if is_multimodal(config):
        return "the text of a multimodal checkpoint"
    return "latent attention" if config.get("model_type") in LATENT else None


def gguf_family(file: GGUFFile) -> str:
    """Return the model_type of the file's architecture, which may be none of our families."""
    if file.architecture == "llama" and file.get("expert_count"):
        return "mixtral"
    if file.architecture == "deepseek2":
        return "deepseek_v3" if file.get("expert_gating_func") == 2 else "deepseek_v2"
    return {"qwen3moe": "qwen3_moe", "command-r": "cohere", "gpt-oss": "gpt_oss"}.get(
        file.architecture, file.architecture
    )
