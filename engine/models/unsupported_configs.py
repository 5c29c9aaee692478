"""`unsupported`: names a feature of a config.json that our own decoder lacks, which decides a model's route."""

from __future__ import annotations

from typing import Any

from kvferry.engine.models.experts_config import unsupported_routing
from kvferry.engine.models.families import FAMILIES
from kvferry.engine.models.rope_config import ROPE_KINDS, SHAPED_KINDS, rope_dicts, rope_kind
from kvferry.kernels.activation import Kind
from kvferry.model_files.expert_fields import common_names
from kvferry.model_files.quantisation import quantisation

SILU, GELU = ("silu", "swish"), ("gelu", "gelu_pytorch_tanh")
"""Names of the activations of gates. Gemma's first checkpoints call GELU by tanh gelu."""
UNGATED: dict[str, Kind] = {
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "xielu": "xielu",
}
"""Kinds of activations of MLPs without a gate, by their names in a config."""
IMAGES = "vision"
"""Value of use_bidirectional_attention that leaves text causal."""


def unsupported(config: dict[str, Any]) -> str | None:
    """Return why kvferry's decoder cannot run this config.json (transformers may still); None: it can."""
    if config.get("model_type") not in FAMILIES:
        return f"architecture {config.get('model_type')!r:.80} is not one of {', '.join(FAMILIES)}"
    config, family = common_names(config), FAMILIES[config["model_type"]]
    if (stored := config.get("quantization_config")) and (quantisation(config) is None) != (family.stack is not None):
        return f"quantisation {stored.get('quant_method', 'unnamed')!r:.80} of a checkpoint of {config['model_type']}"
    act = config.get("hidden_activation") or config.get("hidden_act", "")
    if act not in ("", *(UNGATED if family.activation else GELU if family.gelu else SILU)):
        return f"activation {act!r:.80}"
    names = [] if family.clipped else ["clip_qkv"]
    if config.get("use_bidirectional_attention") != IMAGES:
        names.append("use_bidirectional_attention")
    if not family.capped:
        names += ["attn_logit_softcapping"] if family.shaped else ["attn_logit_softcapping", "final_logit_softcapping"]
    if family.latent:
        names.append("mlp_bias")
    for name in names:
        if config.get(name):
            return name
    if family.experts is not None and (routing := unsupported_routing(config, family.experts)) is not None:
        return routing
    option, tied = family.head_bias_option, config.get("tie_word_embeddings", family.tie_embeddings)
    if option and config.get(option) and tied:
        return f"{option} with tied embeddings"
    if family.head_bias and config.get("qk_layernorm"):
        return "qk_layernorm"
    for rope in rope_dicts(config, family):
        if any(isinstance(value, dict) for value in rope.values()):
            return "rope parameters that differ between layers"
        if family.norms_rotated and rope_kind(rope) in ("yarn", "longrope"):
            return f"rope scaling {rope_kind(rope)!r} before norms of q and k"
        if rope_kind(rope) not in (SHAPED_KINDS if family.shaped else ROPE_KINDS):
            return f"rope scaling {rope_kind(rope)!r:.80}"
    return None
