"""Translates tensor names of checkpoints into Llama's names, which our own decoder reads.

A layer's recurrent mixer is called `mixer`, with the parts of Mamba 2."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.model_files.multimodal import text_name

_MAMBA = (
    (".mamba.", ".mixer."),
    (".feed_forward.", ".mlp."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    ("model.final_layernorm.", "model.norm."),
)
_HUNYUAN = ((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm."))
_DELTA = ((".linear_attn.", ".mixer."),)
_LFM2 = (
    (".operator_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    ("model.embedding_norm.", "model.norm."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
    (".conv.conv.", ".mixer.conv1d."),
    (".conv.", ".mixer."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
    (".feed_forward.", ".mlp."),
)
_RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_next": _DELTA,
    "granitemoehybrid": ((".mamba.", ".mixer."),),
    "apertus": (
        (".attention_layernorm.", ".input_layernorm."),
        (".feedforward_layernorm.", ".post_attention_layernorm."),
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "phi": (
        (".self_attn.dense.", ".self_attn.o_proj."),
        (".mlp.fc1.", ".mlp.up_proj."),
        (".mlp.fc2.", ".mlp.down_proj."),
        ("model.final_layernorm.", "model.norm."),
    ),
    "stablelm": ((".q_layernorm.norms.", ".q_norm."), (".k_layernorm.norms.", ".k_norm.")),
    "starcoder2": ((".mlp.c_fc.", ".mlp.up_proj."), (".mlp.c_proj.", ".mlp.down_proj.")),
    "bamba": _MAMBA,
    "falcon_h1": _MAMBA,
    "jamba": _MAMBA,
    "nemotron_h": (
        ("backbone.embeddings.", "model.embed_tokens."),
        ("backbone.norm_f.", "model.last_norm."),
        ("backbone.", "model."),
        (".mixer.norm.", ".mixer.own_norm."),
        (".norm.", ".input_layernorm."),
        (".mixer.own_norm.", ".mixer.norm."),
        ("model.last_norm.", "model.norm."),
        (".mixer.q_proj.", ".self_attn.q_proj."),
        (".mixer.k_proj.", ".self_attn.k_proj."),
        (".mixer.v_proj.", ".self_attn.v_proj."),
        (".mixer.o_proj.", ".self_attn.o_proj."),
        (".mixer.up_proj.", ".mlp.up_proj."),
        (".mixer.down_proj.", ".mlp.down_proj."),
        (".mixer.gate.", ".mlp.gate."),
        (".mixer.fc1_latent_proj.", ".mlp.fc1_latent_proj."),
        (".mixer.fc2_latent_proj.", ".mlp.fc2_latent_proj."),
        (".mixer.experts.", ".mlp.experts."),
        (".mixer.shared_experts.", ".mlp.shared_experts."),
    ),
    "minimax": (
        (".self_attn.qkv_proj.", ".mixer.in_proj."),
        (".self_attn.out_proj.", ".mixer.out_proj."),
        (".self_attn.output_gate.", ".mixer.gate."),
        (".self_attn.norm.", ".mixer.norm."),
    ),
}
"""Parts of names that a family's checkpoints spell otherwise, in the order of their replacement: theirs, ours."""


def renamed(model_type: str) -> Callable[[str], str]:
    """Return the translation of a tensor's name in checkpoints of this model_type."""
    parts = _RENAMED.get(model_type, ())

    def translated(name: str) -> str:
        name = text_name(name)
        for theirs, ours in parts:
            name = name.replace(theirs, ours)
        return name

    return translated
