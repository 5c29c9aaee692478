"""Tables of the decoder architectures that kvferry's own kernels support, by config or GGUF header."""

from __future__ import annotations

from typing import Any

from kvferry.model_files.gguf import GGUFFile
from kvferry.model_files.gguf_hybrid import HYBRID_ARCHITECTURES
from kvferry.model_files.multimodal import is_multimodal
from kvferry.model_files.recurrent_fields import SIZES

DECODERS = frozenset(
    (
        *("apertus", "arcee", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4"),
        *("exaone_moe", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe"),
        *("glm4_moe_lite", "gpt_oss", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense"),
        *("hunyuan_v1_moe", "phimoe"),
        *("llama", "llama4_text", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nemotron", "olmo"),
        *("olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe"),
        *("qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss"),
        *("smollm3", "stablelm", "starcoder2"),
        *SIZES,
    )
)
"""Values of model_type of the families in `engine.models.families`, for code that must not load torch."""

UNGATED = frozenset(("apertus", "arcee", "nemotron", "phi", "starcoder2"))
"""Values of model_type of decoders whose MLPs have no gate: two dense layers in place of three."""
TIED = frozenset(("cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "smollm3", "starcoder2"))
"""Values of model_type of decoders whose head is the embedding, unless the config says."""
LATENT = frozenset(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"))
"""Values of model_type with latent attention."""
_OF_ARCHITECTURE = {
    "chatglm": "glm",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "command-r": "cohere",
    "ernie4_5-moe": "ernie4_5_moe",
    "exaone-moe": "exaone_moe",
    "glm4moe": "glm4_moe",
    "llama4": "llama4_text",
    "gpt-oss": "gpt_oss",
    "hunyuan-dense": "hunyuan_v1_dense",
    "hunyuan-moe": "hunyuan_v1_moe",
    "minimax-m2": "minimax_m2",
    "mistral3": "ministral3",
    "phi2": "phi",
    "qwen2moe": "qwen2_moe",
    "qwen2vl": "qwen2_vl_text",
    "qwen3moe": "qwen3_moe",
    "qwen3vl": "qwen3_vl_text",
    "qwen3vlmoe": "qwen3_vl_moe_text",
    **HYBRID_ARCHITECTURES,
}
"""Values of model_type of GGUF architectures that have another name."""


def own_alone(config: dict[str, Any]) -> str | None:
    """Return the feature of a checkpoint that only kvferry's decoder runs; None: transformers may run it, too."""
    if is_multimodal(config):
        return "the text of a multimodal checkpoint"
    if config.get("model_type") in SIZES:
        return "recurrent layers"
    if config.get("model_type") == "llama4_text":
        return "chunked attention"
    return "latent attention" if config.get("model_type") in LATENT else None


def gguf_family(file: GGUFFile) -> str:
    """Return the model_type of the file's architecture, which may be none of our families."""
    if file.architecture == "llama" and file.get("expert_count"):
        return "mixtral"
    if file.architecture == "olmo2" and file.get("attention.sliding_window"):
        return "olmo3"
    if file.architecture == "deepseek2":
        return "deepseek_v3" if file.get("expert_gating_func") == 2 else "deepseek_v2"
    return _OF_ARCHITECTURE.get(file.architecture, file.architecture)
