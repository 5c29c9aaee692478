"""Names and sizes of a decoder's large tensors, assumed from its config when no file lists them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvferry.model_files.config_fields import whole_or
from kvferry.model_files.expert_fields import experts_in, holds_experts, shared_width
from kvferry.model_files.hybrid import SINGLE, HybridLayers
from kvferry.model_files.safetensors_headers import Tensor
from kvferry.model_files.supported_decoders import TIED, UNGATED
from kvferry.protocol.errors import ConfigError


def first_whole(config: dict[str, Any], *names: str) -> int:
    """Return the first of these fields that is a positive whole number. Raises ConfigError if none is."""
    for name in names:
        if isinstance(config.get(name), int) and config[name] > 0:
            return int(config[name])
    raise ConfigError(f"config.json has no {names[0]}", param="model")


def assumed_tensors(
    text: dict[str, Any], hidden: int, layers: int, attention: int, hybrid: HybridLayers | None
) -> Iterator[Tensor]:
    """Yield the tensors of a Llama-like decoder, one with experts, or a hybrid one. attention: weights of a layer."""
    vocab, inner = first_whole(text, "vocab_size"), whole_or(text, "intermediate_size", 4 * hidden)
    yield Tensor("embed_tokens.weight", (vocab, hidden))
    if not text.get("tie_word_embeddings", text.get("model_type") in TIED):
        yield Tensor("lm_head.weight", (vocab, hidden))
    attending, mlps = layers, layers
    if hybrid is not None:
        attending, mlps = hybrid.attending, sum(map(hybrid.has_mlp, range(layers)))
        yield Tensor("layers.mixer.weight", (hybrid.recurring, hybrid.sizes.weights(hidden)))
    yield Tensor("layers.attn.weight", (attending, attention))
    experts = experts_in(text)
    mixed = sum(holds_experts(text, index) for index in range(layers)) if experts else 0
    matrices = 2 if text.get("model_type") in SINGLE | UNGATED else 3
    yield Tensor("layers.mlp.weight", (mlps - mixed, matrices * inner, hidden))
    inner = whole_or(text, "moe_intermediate_size", inner)
    latent = whole_or(text, "moe_latent_size", 0)
    yield Tensor("layers.experts.weight", (mixed, matrices * experts * inner, latent or hidden))
    yield Tensor("layers.latents.weight", (mixed, 2 * latent, hidden))
    yield Tensor("layers.shared_experts.weight", (mixed, matrices * shared_width(text, inner), hidden))
