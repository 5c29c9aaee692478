"""Table of model families with mixture-of-experts layers: where each departs from the defaults."""

from __future__ import annotations

from dataclasses import replace

from kvferry.engine.models.family import ExpertNames, Family, Stack

CORRECTED = ExpertNames(
    renormalised=True, sigmoid=True, grouped=True, correction="mlp.gate.e_score_correction_bias", precise=True
)
"""DeepSeek V3's routing."""
MIXTRAL = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2", renormalised=True)
GRANITE = ExpertNames(
    "block_sparse_moe.router.layer", "block_sparse_moe.experts", shared="shared_mlp", renormalised=True,
    stack=Stack(
        "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight",
        shared_gate_up="shared_mlp.input_linear.weight", shared_down="shared_mlp.output_linear.weight",
    ),
)  # fmt: skip
_INPUTS_FIRST = Stack("mlp.experts.gate_up_proj", "mlp.experts.down_proj", inputs_first=True)

MIXTURES = {
    "qwen2_moe": Family(
        qkv_bias=True, experts=ExpertNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")
    ),
    "qwen3_moe": Family(qk_norm=True, windowed=True, experts=ExpertNames()),
    "qwen3_vl_moe_text": Family(
        qk_norm=True, theta=5000000.0, experts=ExpertNames(renormalised=True, stack=_INPUTS_FIRST)
    ),
    "mixtral": Family(theta=1000000.0, gguf_permuted=True, windowed=True, experts=MIXTRAL),
    "minimax_m2": Family(
        theta=5000000.0, qk_norm=True, wide_qk_norm=True,
        experts=replace(MIXTRAL, sigmoid=True, correction="block_sparse_moe.e_score_correction_bias", precise=True),
    ),
    "olmoe": Family(qk_norm=True, wide_qk_norm=True, experts=ExpertNames()),
    "gpt_oss": Family(
        theta=150000.0, head_dim=64, attention_bias=True, pattern=2, sinks=True,
        experts=ExpertNames(
            router="mlp.router", renormalised=True, biased=True, clamped=True,
            stack=replace(_INPUTS_FIRST, alternating=True),
        ),
    ),
    "deepseek_v2": Family(latent=True, experts=ExpertNames(precise=True)),
    "deepseek_v3": Family(latent=True, experts=CORRECTED),
    "glm4_moe": Family(partial=0.5, o_bias=False, experts=CORRECTED),
    "glm4_moe_lite": Family(latent=True, experts=CORRECTED),
    "exaone_moe": Family(
        qk_norm=True, windows_rotate=True, else_all_rotate=True, pattern=4,
        experts=replace(CORRECTED, correction="mlp.e_score_correction_bias"),
    ),
    "hunyuan_v1_moe": Family(
        qk_norm=True, norms_rotated=True, ntk_alpha=True, eps=("rms_norm_eps", 1e-5),
        experts=ExpertNames("mlp.gate.wg", shared="mlp.shared_mlp", renormalised=True, precise=True),
    ),
    "phimoe": Family(
        theta=1000000.0, centred=True, norm_bias=True, eps=("rms_norm_eps", 1e-5), windowed=True,
        head_bias_option="lm_head_bias", experts=replace(MIXTRAL, renormalised=False, mixer=True),
    ),
    "ernie4_5_moe": Family(
        theta=500000.0, tie_embeddings=True, interleaved=True, biases=("use_bias",) * 3, head_bias_option="use_bias",
        experts=ExpertNames(
            renormalised=True, correction="mlp.moe_statics.e_score_correction_bias", correction_row=True, precise=True
        ),
    ),
    "llama4_text": Family(
        theta=500000.0, head_dim=128, interleaved=True, qk_norm=True, chunked=True, mlp="feed_forward",
        experts=ExpertNames(
            "feed_forward.router", "feed_forward.experts", shared="feed_forward.shared_expert", sigmoid=True,
            on_inputs=True,
            stack=Stack("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", inputs_first=True),
        ),
    ),
    "granitemoe": Family(gguf_permuted=True, factors=True, experts=GRANITE),
    "granitemoeshared": Family(gguf_permuted=True, factors=True, experts=GRANITE),
}  # fmt: skip
