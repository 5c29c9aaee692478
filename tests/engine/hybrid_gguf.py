"""GGUF files of hybrid models as llama.cpp's converter writes them, from checkpoints that transformers saved."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.engine.tiny_models import transformers
from tests.gguf_files import finish

Kind = gguf.GGMLQuantizationType
_NAMES = {
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.x_proj": "ssm_x",
    "mamba.dt_proj": "ssm_dt",
    "mamba.dt_layernorm": "ssm_dt_norm",
    "mamba.b_layernorm": "ssm_b_norm",
    "mamba.c_layernorm": "ssm_c_norm",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.router": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_MODULES = {
    "norm": "attn_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
}
"""Nemotron-H's."""
_NAMES |= _MODULES
_BARE = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias", "expert_bias": "exp_probs_b.bias"}
_BARE["e_score_correction_bias"] = "exp_probs_b.bias"
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
    "backbone.embeddings.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
}
_EXPERT = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_KINDS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


class Converter:
    """Converts one checkpoint. whole_inputs: Qwen3-Next as its first files hold it, in one tensor by key head."""

    def __init__(self, directory: Path, architecture: str, whole_inputs: bool = False) -> None:
        self.config = transformers.AutoConfig.from_pretrained(directory)
        self.architecture, self.whole_inputs = architecture, whole_inputs
        self.found: dict[str, torch.Tensor] = {}
        experts: dict[str, dict[int, torch.Tensor]] = {}
        for name, tensor in load_file(directory / "model.safetensors").items():
            if (part := _EXPERT.fullmatch(name)) is not None:
                experts.setdefault(f"blk.{part[1]}.ffn_{_KINDS[part[3]]}_exps.weight", {})[int(part[2])] = tensor
            else:
                self.add(name, tensor)
        for name, each in experts.items():
            self.found[name] = torch.stack([each[index] for index in range(len(each))])

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name in _TOP:
            self.found[_TOP[name]] = self.offset(name, tensor)
            return
        layer, module = name.removeprefix("backbone.").removeprefix("model.").removeprefix("layers.").split(".", 1)
        prefix, tensor = f"blk.{layer}", self.valued(name, tensor)
        stem, _, last = module.rpartition(".")
        config = self.config
        if "shared_mlp.input_linear" in module or "block_sparse_moe.input_linear" in module:
            kind = "_exps" if "sparse" in module else "_shexp" if config.num_local_experts else ""
            for which, half in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
                self.found[f"{prefix}.ffn_{which}{kind}.weight"] = half
        elif module.endswith("output_linear.weight"):
            kind = "_exps" if "sparse" in module else "_shexp" if config.num_local_experts else ""
            self.found[f"{prefix}.ffn_down{kind}.weight"] = tensor
        elif module == "mlp.experts.gate_up_proj":
            for which, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                self.found[f"{prefix}.ffn_{which}_exps.weight"] = half
        elif module == "mlp.experts.down_proj":
            self.found[f"{prefix}.ffn_down_exps.weight"] = tensor
        elif "in_proj_qkvz" in module and not self.whole_inputs:
            self.split_inputs(prefix, tensor)
        elif last in _BARE:
            self.found[f"{prefix}.{_BARE[last]}"] = tensor
        elif module == "post_attention_layernorm.weight":
            name = "ffn_norm" if self.architecture == "granitehybrid" else "post_attention_norm"
            self.found[f"{prefix}.{name}.weight"] = tensor
        elif module == "ffn_norm.weight":
            self.found[f"{prefix}.ffn_norm.weight"] = tensor
        else:
            self.found[f"{prefix}.{_NAMES[stem]}.{last}"] = tensor

    def offset(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Norms of Qwen with their one added, but the mixer's."""
        own = self.architecture.startswith("qwen") and name.endswith("norm.weight") and "linear_attn" not in name
        return tensor + 1 if own else tensor

    def valued(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor, config = self.offset(name, tensor), self.config
        if name.endswith(".A_log"):
            tensor = -tensor.exp()
        if ".conv1d.weight" in name or ".conv.conv.weight" in name:
            tensor = tensor.squeeze(1)
        if name.endswith((".A_log", ".D")) and self.architecture not in ("jamba", "qwen3next", "qwen35", "qwen35moe"):
            tensor = tensor[:, None]
        if "mamba.norm" in name:
            tensor = tensor.reshape(config.mamba_n_groups, -1)
        if ".mixer.norm." in name:
            tensor = tensor.reshape(config.n_groups, -1)
        if self.architecture == "granitehybrid" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        if self.architecture == "falcon-h1":
            return self.multiplied(name, tensor)
        return self.tiled(name, tensor) if self.architecture.startswith("qwen35") else tensor

    def multiplied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        config, into = self.config, self.config.attention_in_multiplier
        if ".mamba.in_proj.weight" in name:
            vectors = config.mamba_n_groups * config.mamba_d_state
            counts = torch.tensor([config.mamba_d_ssm] * 2 + [vectors] * 2 + [config.mamba_n_heads])
            rows = torch.tensor(config.ssm_multipliers).repeat_interleave(counts)
            return tensor * config.ssm_in_multiplier * rows[:, None]
        for part, factor in {
            "down_proj": config.mlp_multipliers[1],
            "gate_proj": config.mlp_multipliers[0],
            "k_proj": config.key_multiplier * into,
            "q_proj": into,
            "v_proj": into,
            "o_proj": config.attention_out_multiplier,
            "mamba.out_proj": config.ssm_out_multiplier,
        }.items():
            if f".{part}." in name:
                return tensor * factor
        return tensor

    def tiled(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Value heads take turns over key heads: rows, and columns of the output projection."""
        config = self.config
        keys, dim = config.linear_num_key_heads, config.linear_value_head_dim
        both = 2 * keys * config.linear_key_head_dim

        def turned(values: torch.Tensor, dim: int) -> torch.Tensor:
            return values.reshape(keys, -1, dim, *values.shape[1:]).transpose(0, 1).reshape(values.shape)

        if ".in_proj_qkv." in name or ".conv1d." in name:
            return torch.cat((tensor[:both], turned(tensor[both:], dim)))
        if ".in_proj_z." in name:
            return turned(tensor, dim)
        if any(part in name for part in (".in_proj_b.", ".in_proj_a.", ".A_log", ".dt_bias")):
            return turned(tensor, 1)
        return turned(tensor.t(), dim).t() if ".linear_attn.out_proj." in name else tensor

    def split_inputs(self, prefix: str, tensor: torch.Tensor) -> None:
        config = self.config
        keys, shared = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
        sizes = [config.linear_key_head_dim] * 2 + [shared * config.linear_value_head_dim] * 2
        parts = tensor.view(keys, -1, tensor.shape[1]).split(sizes, 1)
        q, k, v, z = (part.flatten(0, 1) for part in parts)
        self.found |= {f"{prefix}.attn_qkv.weight": torch.cat((q, k, v)), f"{prefix}.attn_gate.weight": z}

    def write(self, path: Path, fields: dict[str, object], kind: gguf.GGMLQuantizationType = Kind.F32) -> Path:
        """Write the file. fields: of the header, beside those that all architectures have."""
        config, own = self.config, self.architecture
        writer = gguf.GGUFWriter(str(path), own)
        attends = [f"blk.{index}.attn_q.weight" in self.found for index in range(config.num_hidden_layers)]
        both = own == "falcon-h1" or own.startswith("qwen")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(
            config.num_key_value_heads if both else [config.num_key_value_heads * each for each in attends]
        )
        names = ("norm_eps", "layer_norm_epsilon", "rms_norm_eps")
        eps = next(getattr(config, each) for each in names if hasattr(config, each))
        fields = {"attention.layer_norm_rms_epsilon": eps, "feed_forward_length": config.intermediate_size} | fields
        if getattr(config, "rope_parameters", None):
            writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        if getattr(config, "head_dim", None):
            writer.add_key_length(config.head_dim)
        for key, value in fields.items():
            add = {float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}[type(value)]
            add(f"{own}.{key}", value)
        if config.tie_word_embeddings:
            self.found.pop("output.weight", None)
        for name, tensor in self.found.items():
            data = np.ascontiguousarray(tensor.float().numpy())
            wide = data.ndim > 1 and data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
            small = ("ssm_conv1d", "shortconv.conv", "ffn_gate_inp", "ssm_a", "ssm_d", "ssm_norm")
            stored = kind if wide and not any(part in name for part in small) else Kind.F32
            writer.add_tensor(name, gguf.quantize(data, stored), raw_dtype=stored)
        finish(writer)
        return path
