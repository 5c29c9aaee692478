"""Opens a GGUF file for our own decoder: its config, with longrope's factors from tensors, and its weights."""

from __future__ import annotations

from dataclasses import replace

from kvferry.engine.models.config import DecoderConfig
from kvferry.engine.models.gguf_config import parse_gguf
from kvferry.engine.models.gguf_hybrid import gguf_weights
from kvferry.engine.models.rope_config import RopeConfig
from kvferry.engine.models.weights import GGUFWeights
from kvferry.model_files.gguf import GGUFFile
from kvferry.protocol.errors import ConfigError

SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
"""Tensors with longrope's factors of each frequency, up to the original length and beyond it."""
PHI_MOE_ATTENTION = 1.243163121016122
"""Factor of attention of Phi-3.5-MoE and its smaller siblings at both lengths, from their config.json.

GGUF files hold Phi-3's formula in its place, which gives 1.19."""


def open_gguf(file: GGUFFile) -> tuple[DecoderConfig, GGUFWeights]:
    """Return the config and the weights of a file. Raises ConfigError."""
    config = parse_gguf(file)
    weights = gguf_weights(file, config)
    if SHORT in file.tensors and LONG in file.tensors:
        config = replace(config, rope=_longrope(file, config, weights))
    return config, weights


def _longrope(file: GGUFFile, config: DecoderConfig, weights: GGUFWeights) -> RopeConfig:
    count, longest = config.rope.dim // 2, file.get("context_length")
    short, long = (weights.vector(name, count) for name in (SHORT, LONG))
    attention, original = file.get("rope.scaling.attn_factor"), file.get("rope.scaling.original_context_length")
    if config.model_type == "phimoe":
        attention = PHI_MOE_ATTENTION
    if not isinstance(attention, float | None) or not isinstance(original, int) or original < 1:
        raise ConfigError(f"{file.path.name}: longrope needs the original context length", param="model")
    return replace(
        config.rope,
        kind="longrope",
        short_factor=tuple(short.tolist()),
        long_factor=tuple(long.tolist()),
        original_max_len=original,
        factor=longest / original,
        attention_factor=attention,
    )
