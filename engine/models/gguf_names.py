"""Names of a decoder's tensors in GGUF files, translated from their Hugging Face names."""

from __future__ import annotations

import re

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
_MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.fc1_latent_proj": "ffn_latent_down",
    "mlp.fc2_latent_proj": "ffn_latent_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_SHARED = ("mlp.shared_experts", "mlp.shared_expert", "shared_mlp", "mlp.shared_mlp", "feed_forward.shared_expert")
"""Names of the MLP for all tokens, beside experts."""
_MODULES |= {f"{name}.{part}_proj": f"ffn_{part}_shexp" for name in _SHARED for part in ("gate", "up", "down")}
_EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
"""Tensors that hold all experts of a layer."""
_OWN = {(name, "ffn_norm"): "post_attention_norm" for name in ("gpt-oss", "glm4moe", "seed_oss", "exaone4", "olmo2")}
"""Names that only some architectures use."""
_IN_HEADER = re.compile(r"model\.layers\.(\d+)\.mlp\.act_fn\.(\w+)")
_FUSED = {"self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v"}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
_GLM4 = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
_OF_ARCHITECTURE = {**dict.fromkeys(("gemma2", "gemma3", "gemma3n", "gemma4"), _GEMMA), "glm4": _GLM4}
"""Names of modules that go before `_MODULES` in some architectures."""
_PARAMETERS = {
    "self_attn.sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
"""Tensors of a layer whose names do not end like those of modules."""
_CORRECTION = ".e_score_correction_bias"
_STACKED = re.compile(r"model\.(altup_projections|altup_unembed_projections)\.(\d+)\.weight")
_STACKS = {"altup_projections": "altup_proj.weight", "altup_unembed_projections": "altup_unembd_proj.weight"}
"""Tensors of several modules in one."""
_PART = re.compile(r"(.+\.experts\.\w+_proj)\.(\d+)")
"""Name of one expert in a tensor of all."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.((.+)\.(weight|bias)|.+)")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.(weight|bias)")


def gguf_name(name: str, architecture: str) -> tuple[str, int | None]:
    """Return the tensor's name in a file and, if the file's tensor holds several (as of experts), its index in it."""
    if (part := _PART.fullmatch(name)) is not None:
        return gguf_name(part[1], architecture)[0], int(part[2])
    if (stacked := _STACKED.fullmatch(name)) is not None:
        return _STACKS[stacked[1]], int(stacked[2])
    if (expert := _EXPERT.fullmatch(name)) is not None:
        return f"blk.{expert[1]}.{_EXPERTS[expert[3]]}.{expert[4]}", int(expert[2])
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _TOP[name], None
    if layer[2] in _PARAMETERS:
        return f"blk.{layer[1]}.{_PARAMETERS[layer[2]]}", None
    if layer[2].endswith(_CORRECTION):
        return f"blk.{layer[1]}.exp_probs_b.bias", None
    own = _OF_ARCHITECTURE.get(architecture, {}).get(layer[3]) or _MODULES[layer[3]]
    return f"blk.{layer[1]}.{_OWN.get((architecture, own), own)}.{layer[4]}", None


def header_entry(name: str) -> tuple[str, int] | None:
    """Return the key of the header that has this parameter of all layers, and the layer; None: it is a tensor."""
    found = _IN_HEADER.fullmatch(name)
    return None if found is None else (f"xielu.{found[2]}", int(found[1]))


def fused_in(name: str) -> tuple[str, str] | None:
    """Return the name of the tensor that holds q, k and v of a layer one after the other, and which of them it is."""
    layer = _LAYER.fullmatch(name)
    if layer is None or layer[3] not in _FUSED:
        return None
    return f"blk.{layer[1]}.attn_qkv.{layer[4]}", _FUSED[layer[3]]


def parts_of(name: str) -> list[str]:
    """Return the names under which newer files keep a tensor in two."""
    layer = _LAYER.fullmatch(name)
    if layer is None or layer[2] != "self_attn.kv_b_proj.weight":
        return []
    return [f"blk.{layer[1]}.attn_{part}_b.weight" for part in "kv"]
