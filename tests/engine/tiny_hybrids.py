"""Tiny random models of each hybrid family, and passes that are suspended before a layer."""

from __future__ import annotations

import pytest
import torch

from kvferry.engine.models.base import ForwardAbandoned
from tests.engine.tiny_models import EXPERTS, Cache, family

LFM2 = ["conv", "full_attention", "conv", "full_attention"]
LINEAR = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "layer_types": LINEAR,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_chunk_size": 16}
GRANITE = {
    "layer_types": LINEAR,
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.3,
    "logits_scaling": 0.7,
    **MAMBA2,
}
FALCON = {
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.4,
    "mlp_multipliers": [0.8, 0.6],
    "key_multiplier": 0.5,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.9, 0.8, 1.3, 0.7, 1.1],
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.7,
}
MIXTURE = EXPERTS | {"shared_expert_intermediate_size": 40}
JAMBA = {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
NEMOTRON = {
    "num_hidden_layers": None,
    "head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 10,
    "n_groups": 2,
    "chunk_size": 16,
    "pad_token_id": 0,
}
NEMOTRON_EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
}
HYBRIDS = {
    "lfm2": lambda: family(
        "Lfm2Config",
        num_hidden_layers=4,
        layer_types=LFM2,
        block_ffn_dim_multiplier=1.2,
        block_multiple_of=8,
        tie_word_embeddings=True,
    ),
    "lfm2-biased-wide": lambda: family(
        "Lfm2Config", layer_types=LFM2[:3], conv_bias=True, conv_L_cache=5, block_auto_adjust_ff_dim=False
    ),
    "qwen3.5": lambda: family("Qwen3_5TextConfig", **DELTA),
    "qwen3.5-one-key-head": lambda: family(
        "Qwen3_5TextConfig",
        tie_word_embeddings=True,
        attention_bias=True,
        **DELTA | {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 3},
    ),
    "granite4": lambda: family("GraniteMoeHybridConfig", tie_word_embeddings=True, **GRANITE),
    "granite4-rope": lambda: family(
        "GraniteMoeHybridConfig",
        position_embedding_type="rope",
        mamba_n_groups=2,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        attention_bias=True,
        **GRANITE,
    ),
    "bamba": lambda: family("BambaConfig", attn_layer_indices=[1], mamba_n_groups=4, mamba_d_conv=3, **MAMBA2),
    "falcon-h1": lambda: family("FalconH1Config", mamba_d_ssm=96, **MAMBA2 | FALCON | {"mamba_d_head": 12}),
    "falcon-h1-norm": lambda: family(
        "FalconH1Config",
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_n_groups=2,
        mamba_d_ssm=128,
        projectors_bias=True,
        tie_word_embeddings=True,
        **MAMBA2 | FALCON,
    ),
    "falcon-h1-gate-first": lambda: family(
        "FalconH1Config",
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_n_groups=2,
        mamba_d_ssm=128,
        **MAMBA2 | FALCON,
    ),
    "falcon-h1-norm-first": lambda: family(
        "FalconH1Config", mamba_rms_norm=True, mamba_d_ssm=128, mamba_proj_bias=True, attention_bias=True, **MAMBA2
    ),
    "granite4-moe": lambda: family(
        "GraniteMoeHybridConfig", **GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3}, intermediate_size=32
    ),
    "qwen3.5-moe": lambda: family("Qwen3_5MoeTextConfig", **DELTA, **MIXTURE),
    "qwen3-next": lambda: family("Qwen3NextConfig", norm_topk_prob=False, mlp_only_layers=[1], **DELTA, **MIXTURE),
    "qwen3-next-renormalised": lambda: family("Qwen3NextConfig", **DELTA, **MIXTURE),
    "qwen3-next-as-many-heads": lambda: family(
        "Qwen3NextConfig",
        attention_bias=True,
        decoder_sparse_step=2,
        **DELTA | {"linear_num_key_heads": 4},
        **MIXTURE,
    ),
    "lfm2-moe": lambda: family(
        "Lfm2MoeConfig", num_dense_layers=1, routed_scaling_factor=1.5, layer_types=LFM2[:3], **EXPERTS
    ),
    "lfm2-moe-plain": lambda: family(
        "Lfm2MoeConfig", num_dense_layers=0, norm_topk_prob=False, conv_L_cache=4, layer_types=LFM2[1:], **EXPERTS
    ),
    "jamba": lambda: family(
        "JambaConfig", attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=5, mamba_d_state=6, **JAMBA
    ),
    "jamba-biased": lambda: family(
        "JambaConfig",
        attn_layer_period=3,
        attn_layer_offset=0,
        expert_layer_offset=0,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        mamba_d_conv=3,
        mamba_expand=1,
        **JAMBA,
    ),
    "jamba-dense": lambda: family(
        "JambaConfig", attn_layer_period=2, attn_layer_offset=0, num_experts=1, num_experts_per_tok=1, pad_token_id=0
    ),
    "minimax": lambda: family(
        "MiniMaxConfig",
        num_hidden_layers=4,
        head_dim=24,
        block_size=16,
        full_attn_alpha_factor=1.5,
        linear_attn_alpha_factor=1.3,
        mlp_alpha_factor=0.7,
        num_local_experts=4,
    ),
    "nemotron-h": lambda: family(
        "NemotronHConfig",
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        **NEMOTRON,
    ),
    "nemotron-h-biased": lambda: family(
        "NemotronHConfig",
        layers_block_type=["full_attention", "linear_attention", "mlp"],
        use_bias=True,
        mlp_bias=True,
        use_conv_bias=False,
        conv_kernel=3,
        **NEMOTRON | {"n_groups": 1},
    ),
    "nemotron-3": lambda: family("NemotronHConfig", **NEMOTRON | NEMOTRON_EXPERTS),
    "nemotron-3-super": lambda: family("NemotronHConfig", moe_latent_size=20, **NEMOTRON | NEMOTRON_EXPERTS),
    "nemotron-3-super-biased": lambda: family(
        "NemotronHConfig", moe_latent_size=72, mlp_bias=True, **NEMOTRON | NEMOTRON_EXPERTS
    ),
}


def suspended_logits(cache: Cache, name: str, tokens: torch.Tensor, layers: int) -> torch.Tensor:
    """Logits of tokens whose pass is given up before each layer in turn and goes on there."""
    halfway = None
    for layer in range(1, layers):
        start, asked = cache.computed.get(name, 0), iter([False])
        with pytest.raises(ForwardAbandoned) as given_up:
            cache.step({name: tokens}, lambda: next(asked), halfway)  # noqa: B023
        halfway = given_up.value.halfway
        assert halfway is not None
        assert halfway.layer == layer
        cache.computed[name] = start
    return cache.step({name: tokens}, lambda: True, halfway)[0]
