"""Table of model families: what a model_type fixes beyond its config.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Tensor names of a layer's experts, and a family's routing rules.

    renormalised: see `Routing`, unless the config says. sigmoid: scores are, with a correction, and a group is judged
    by its two best. precise: the router computes in float32. biased: router and experts have biases. clamped: their
    gate and up have a limit. stacked: see `Family.stacked`. The rest are names after the layer's."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts"
    renormalised: bool = False
    sigmoid: bool = False
    precise: bool = False
    biased: bool = False
    clamped: bool = False
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """Fixed properties of a model family: defaults of omitted fields, and the structure of its layers.

    gguf            its GGUF files are supported, too
    gguf_permuted   q and k rows of those are reordered for interleaved rotation
    fused, fused_mlp    checkpoints hold as one the tensors that we concatenate: both, or gate_up_proj alone
    interleaved     rotation pairs neighbours: rows of q and k are reordered when read
    windows_rotate  only layers with a window rotate
    partial         the rotated share of a head, unless the config says
    attention_bias  attention has biases, unless the config says
    o_bias          a bias of attention is one of its output, too
    names_behind    with output norms: names of those before the MLP, after attention and after the MLP
    windowed        a sliding window in the config is every layer's
    pattern         it is every layer's except each n-th, unless layer_types says; 0: the config says otherwise
    factors         its config has factors of embedding, attention, layers and logits
    embedding_root  embeddings are multiplied by the root of their size
    logit_scale     factor of logits, unless the config says
    norm_offset     added to the weights of norms
    centred         norms subtract the mean: layer norms without a bias
    parallel        attention and MLP read one norm, the first, and are added together
    norm_before, norm_behind   attention and MLP each have a norm before, after (before the residual is added)
    wide_qk_norm    the norms of q and k span all heads together
    own_qk_norm     each head has weights of its own there
    gelu            the gate is GELU by tanh instead of SiLU
    capped          attention scores and logits have soft caps
    sinks           each head of attention has a sink, see `Ops.paged_attention`
    latent          attention is over a latent (`kernels.latent`)
    two_ropes       layers with a window rotate by parameters of their own
    experts         tensor names of layers with experts; None: there are none
    """

    theta: float = 10000.0
    tie_embeddings: bool = False
    head_dim: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    gguf: bool = True
    gguf_permuted: bool = False
    fused: bool = False
    fused_mlp: bool = False
    interleaved: bool = False
    windows_rotate: bool = False
    partial: float = 1.0
    attention_bias: bool = False
    o_bias: bool = True
    names_behind: tuple[str, str, str] = (
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    )
    windowed: bool = False
    pattern: int = 0
    factors: bool = False
    embedding_root: bool = False
    logit_scale: float = 1.0
    norm_offset: float = 0.0
    centred: bool = False
    parallel: bool = False
    norm_before: bool = True
    norm_behind: bool = False
    wide_qk_norm: bool = False
    own_qk_norm: bool = False
    gelu: bool = False
    capped: bool = False
    sinks: bool = False
    latent: bool = False
    two_ropes: bool = False
    experts: ExpertNames | None = None

    @property
    def stacked(self) -> bool:
        """Return whether checkpoints hold all experts of a layer in one tensor (`engine.models.stacked`)."""
        return self.experts is not None and self.experts.stacked


LLAMA = Family(gguf_permuted=True)
FAMILIES = {
    "llama": LLAMA,
    "mistral": Family(windowed=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen2_vl": Family(gguf=False, qkv_bias=True),
    "qwen2_vl_text": Family(gguf=False, qkv_bias=True),
    "qwen2_5_vl": Family(gguf=False, qkv_bias=True),
    "qwen2_5_vl_text": Family(gguf=False, qkv_bias=True),
    "qwen3_vl_text": Family(gguf=False, qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, windowed=True, experts=ExpertNames()),
    "mixtral": Family(
        theta=1000000.0, gguf_permuted=True, windowed=True,
        experts=ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2", renormalised=True),
    ),
    "olmoe": Family(qk_norm=True, wide_qk_norm=True, experts=ExpertNames()),
    "gpt_oss": Family(
        theta=150000.0, head_dim=64, attention_bias=True, pattern=2, sinks=True,
        experts=ExpertNames(router="mlp.router", renormalised=True, biased=True, clamped=True, stacked=True),
    ),
    "deepseek_v2": Family(latent=True, experts=ExpertNames(precise=True)),
    "deepseek_v3": Family(
        latent=True, experts=ExpertNames(renormalised=True, sigmoid=True, precise=True),
    ),
    "smollm3": Family(theta=2000000.0, tie_embeddings=True, gguf_permuted=True),
    "phi3": Family(gguf=False, fused=True, windowed=True),
    "glm4": Family(
        gguf=False, fused_mlp=True, interleaved=True, partial=0.5, o_bias=False, norm_behind=True,
        names_behind=("post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "granite": Family(gguf=False, factors=True),
    "cohere": Family(
        theta=500000.0, tie_embeddings=True, interleaved=True, logit_scale=0.0625, centred=True, parallel=True,
        own_qk_norm=True,
    ),
    "cohere2": Family(
        tie_embeddings=True, interleaved=True, windows_rotate=True, pattern=4, logit_scale=0.0625, centred=True,
        parallel=True,
    ),
    "gemma": Family(
        gguf=False, tie_embeddings=True, head_dim=256, embedding_root=True, norm_offset=1.0, gelu=True
    ),
    "gemma2": Family(
        gguf=False, tie_embeddings=True, head_dim=256, pattern=2, embedding_root=True, norm_offset=1.0,
        norm_behind=True, gelu=True, capped=True,
    ),
    "gemma3_text": Family(
        gguf=False, theta=1000000.0, tie_embeddings=True, head_dim=256, qk_norm=True, pattern=6, embedding_root=True,
        norm_offset=1.0, norm_behind=True, gelu=True, two_ropes=True,
    ),
    "olmo2": Family(gguf=False, qk_norm=True, norm_before=False, norm_behind=True, wide_qk_norm=True),
    "olmo3": Family(
        gguf=False, theta=500000.0, qk_norm=True, pattern=4, norm_before=False, norm_behind=True, wide_qk_norm=True,
        two_ropes=True,
    ),
}  # fmt: skip
