"""Table of model families whose layers have one dense MLP each: where each departs from the defaults of Family."""

from __future__ import annotations

from kvferry.engine.models.family import Family

_EPS = ("rms_norm_eps", 1e-5)
LLAMA = Family(gguf_permuted=True)
DENSE = {
    "llama": LLAMA,
    "mistral": Family(windowed=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen2_vl": Family(qkv_bias=True),
    "qwen2_vl_text": Family(qkv_bias=True),
    "qwen2_5_vl": Family(qkv_bias=True),
    "qwen2_5_vl_text": Family(qkv_bias=True),
    "qwen3_vl_text": Family(qk_norm=True),
    "smollm3": Family(theta=2000000.0, tie_embeddings=True, gguf_permuted=True),
    "phi3": Family(fused=True, windowed=True),
    "glm4": Family(
        fused_mlp=True, interleaved=True, partial=0.5, o_bias=False, norm_behind=True,
        names_behind=("post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "granite": Family(gguf_permuted=True, factors=True),
    "cohere": Family(
        theta=500000.0, tie_embeddings=True, interleaved=True, logit_scale=0.0625, centred=True, parallel=True,
        eps=("layer_norm_eps", 1e-5), own_qk_norm=True,
    ),
    "cohere2": Family(
        tie_embeddings=True, interleaved=True, windows_rotate=True, pattern=4, logit_scale=0.0625, centred=True,
        parallel=True, eps=("layer_norm_eps", 1e-5),
    ),
    "gemma": Family(
        tie_embeddings=True, head_dim=256, embedding_root=True, norm_offset=1.0, gelu=True
    ),
    "gemma2": Family(
        tie_embeddings=True, head_dim=256, pattern=2, embedding_root=True, norm_offset=1.0,
        norm_behind=True, gelu=True, capped=True,
    ),
    "gemma3_text": Family(
        theta=1000000.0, tie_embeddings=True, head_dim=256, qk_norm=True, pattern=6, embedding_root=True,
        norm_offset=1.0, norm_behind=True, gelu=True, two_ropes=True,
    ),
    "gemma3n_text": Family(
        theta=1000000.0, tie_embeddings=True, head_dim=256, qk_norm=True, embedding_root=True,
        norm_behind=True, gelu=True, two_ropes=True, shaped=True, streams=True, logit_cap=30.0,
    ),
    "gemma4_text": Family(
        theta=1000000.0, tie_embeddings=True, head_dim=256, qk_norm=True, embedding_root=True,
        norm_behind=True, gelu=True, two_ropes=True, shaped=True,
    ),
    "olmo2": Family(qk_norm=True, norm_before=False, norm_behind=True, wide_qk_norm=True),
    "olmo3": Family(
        theta=500000.0, qk_norm=True, pattern=4, norm_before=False, norm_behind=True, wide_qk_norm=True,
        two_ropes=True,
    ),
    "glm": Family(
        head_dim=128, fused_mlp=True, interleaved=True, partial=0.5, attention_bias=True, o_bias=False,
        eps=("rms_norm_eps", 1.5625e-7),
    ),
    "ernie4_5": Family(
        theta=500000.0, tie_embeddings=True, head_dim=128, interleaved=True, biases=("use_bias",) * 3, eps=_EPS
    ),
    "seed_oss": Family(
        head_dim=128, attention_bias=True, biases=("attention_bias", "attention_out_bias", "mlp_bias"),
    ),
    "exaone4": Family(
        qk_norm=True, windows_rotate=True, else_all_rotate=True, pattern=4, norm_before=False, norm_behind=True,
        eps=_EPS,
    ),
    "hunyuan_v1_dense": Family(
        qk_norm=True, norms_rotated=True, ntk_alpha=True, eps=_EPS,
    ),
    "ministral": Family(gguf=False, windowed=True, layered=True),
    "ministral3": Family(
        theta=1000000.0, head_dim=128, gguf_permuted=True, windowed=True, tempered=True, eps=_EPS
    ),
    "arcee": Family(gguf_permuted=True, activation="relu2", eps=_EPS),
    "apertus": Family(
        theta=12000000.0, qk_norm=True, activation="xielu", eps=_EPS,
    ),
    "nemotron": Family(
        norm_offset=1.0, centred=True, norm_bias=True, eps=("norm_eps", 1e-5), partial=0.5, activation="relu2",
    ),
    "olmo": Family(gguf_permuted=True, centred=True, unweighted=True, clipped=True, eps=("layer_norm_eps", 1e-5)),
    "stablelm": Family(
        centred=True, norm_bias=True, eps=("layer_norm_eps", 1e-5), partial=0.25, parallel_option=True,
        own_qk_norm=True, qk_norm_option="qk_layernorm", o_bias=False,
        biases=("use_qkv_bias", "", ""),
    ),
    "starcoder2": Family(
        tie_embeddings=True, centred=True, norm_bias=True, eps=("norm_epsilon", 1e-5), windowed=True,
        activation="gelu_pytorch_tanh", biases=("use_bias",) * 3, attention_bias=True, mlp_bias=True,
    ),
    "phi": Family(
        centred=True, norm_bias=True, eps=("layer_norm_eps", 1e-5), partial=0.5, parallel=True,
        activation="gelu_new", qkv_bias=True, biases=("", "", ""), attention_bias=True, mlp_bias=True, head_bias=True,
    ),
    "helium": Family(
        gguf=False, theta=100000.0, head_dim=128, interleaved=True, o_bias=False, eps=("rms_norm_eps", 1e-8)
    ),
}  # fmt: skip
